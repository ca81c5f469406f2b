// What an engine is made of, in words for people.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "trireme/base/text.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {
namespace {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "fp32";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    default:
      return c10::toString(dtype);
  }
}

std::string bytes(int64_t count) {
  return format_bytes(static_cast<double>(count));
}

/// Units of the table that follow each other and are alike.
struct Row {
  std::string first, last;
  int64_t units = 0, numel = 0, whole = 0, kept = 0;
  bool trainable = true;

  bool is_like(const Row& other) const {
    return numel == other.numel && whole == other.whole && kept == other.kept && trainable == other.trainable;
  }
  std::string name() const { return units == 1 ? first : fmt::format("{} to {}", first, last); }
};

int64_t elements(const FlatUnit& unit) {
  int64_t sum = 0;
  for (const plan::FlatEntry& entry : unit.layout().entries()) sum += entry.numel;
  if (unit.frozen() == nullptr) return sum;
  for (const plan::FlatEntry& entry : unit.frozen()->layout().entries()) sum += entry.numel;
  return sum;
}

/// Bytes of a unit's parameters, whole and on each of so many ranks that have a shard.
struct ParameterBytes {
  int64_t whole, kept;
};
ParameterBytes parameter_bytes(const FlatUnit& unit, at::ScalarType compute, int64_t shards) {
  const int64_t trained = unit.layout().numel() * static_cast<int64_t>(c10::elementSize(compute));
  const plan::UnitBuffers& buffers = unit.buffers();
  const int64_t rest = unit.nf4() ? unit.nf4()->rest * static_cast<int64_t>(c10::elementSize(compute)) : 0,
                frozen = buffers.frozen_bytes + (buffers.keeps_shard ? rest : 0);
  return {trained + frozen,
          trained / shards + (buffers.keeps_shard ? buffers.frozen_shard_bytes : buffers.frozen_bytes)};
}

std::vector<Row> rows_of(const std::vector<std::unique_ptr<FlatUnit>>& units, at::ScalarType compute,
                         int64_t shards) {
  std::vector<Row> rows;
  for (const auto& unit : units) {
    const ParameterBytes bytes = parameter_bytes(*unit, compute, shards);
    Row row{unit->name(), unit->name(), 1, elements(*unit), bytes.whole, bytes.kept, unit->trainable()};
    if (rows.size() > 1 && rows.back().is_like(row)) {  // the root has a line of its own
      rows.back().last = row.last;
      ++rows.back().units;
    } else {
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

std::string table_of(const std::vector<Row>& rows) {
  size_t width = 4;
  for (const Row& row : rows) width = std::max(width, row.name().size());
  std::string text = fmt::format("{:<{}}  {:>5}  {:>15}  {:>10}  {:>10}\n", "unit", width, "count",
                                 "parameters each", "whole", "a rank");
  for (const Row& row : rows) {
    text += fmt::format("{:<{}}  {:>5}  {:>15}  {:>10}  {:>10}{}\n", row.name(), width, row.units,
                        with_commas(row.numel), bytes(row.whole), bytes(row.kept),
                        row.trainable ? "" : "  frozen");
  }
  return text;
}

}  // namespace

int64_t DataParallel::whole_bytes() const {
  int64_t sum = 0;
  for (const auto& unit : units_) sum += parameter_bytes(*unit, options_.compute, 1).whole;
  return sum;
}

/// A module that announces nothing before it runs is taken to use its units in their order.
int64_t DataParallel::most_gathered_bytes() const {
  plan::EngineSetting asked = setting();
  if (use_from_ == UseFrom::kOperators) asked.use_from = UseFrom::kRunUnit;
  const std::vector<plan::ProgramUnit>& units = programs_.step().units;
  int64_t most = 0;
  for (const plan::HeldBytes& held :
       plan::held_bytes(plan::step_program(units, asked, declared_order(units, asked.use_from))))
    most = std::max(most, held[plan::Role::kParameters]);
  return most;
}

std::string DataParallel::summary() const {
  int64_t numel = 0;
  for (const auto& unit : units_) numel += elements(*unit);
  const std::string ranks = options_.policy.hybrid
                                ? fmt::format("{} x {}", groups_.replicate->size(), groups_.shard->size())
                                : fmt::format("{}", mesh_.dp->size());
  const char* const kind = use_from_ == UseFrom::kBuckets ? "bucket" : "unit";
  const std::string memory =
      setting().gathers()
          ? fmt::format("at most {} of {} whole at once", bytes(most_gathered_bytes()), bytes(whole_bytes()))
          : fmt::format("{} whole on every rank", bytes(whole_bytes()));
  return fmt::format("{} on {} rank{}: {} parameters ({}) in {} {}{}, {}", options_.policy.label(), ranks,
                     mesh_.dp->size() == 1 ? "" : "s", with_commas(numel), dtype_name(options_.compute),
                     units_.size(), kind, units_.size() == 1 ? "" : "s", memory);
}

std::string DataParallel::describe() const {
  const plan::StateBytes state = state_bytes();
  const std::string masters =
      state.optimizer > 0 ? fmt::format("fp32 masters of {}, ", bytes(state.optimizer)) : "";
  return fmt::format(
      "{}\n{}between steps a rank holds parameters of {}, {}gradients of {} and the optimizer's moments; "
      "gradients are sent as {}\n",
      summary(), table_of(rows_of(units_, options_.compute, setting().gathers() ? groups_.shard->size() : 1)),
      bytes(state.parameters), masters, bytes(state.gradients), dtype_name(options_.reduce));
}

}  // namespace trireme::parallel
