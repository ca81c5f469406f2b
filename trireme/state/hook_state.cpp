#include "trireme/state/hook_state.h"

#include <ATen/ATen.h>

#include "trireme/state/whole_state.h"

namespace trireme::state {
namespace {

constexpr const char* kSteps = "hook_steps";
constexpr const char* kFactor = "hook_factor";
constexpr const char* kOwed = "owed.";

std::string owed_name(int64_t dp_rank, const std::string& param) {
  return optimizer_name(kOwed + std::to_string(dp_rank), param);
}

/// How many ranks of the saved run owe something for `param`: their tensors are in the file, numbered from 0.
int64_t ranks_that_owe(const StateReader& reader, const std::string& param) {
  int64_t ranks = 0;
  while (reader.file_has(owed_name(ranks, param))) ++ranks;
  return ranks;
}

}  // namespace

void add_hook_pieces(const parallel::FlatUnit& unit, int64_t dp_rank, std::vector<StatePiece>& pieces) {
  const std::vector<parallel::HookState> states = unit.hook_state();
  for (size_t i = 0; i < states.size(); ++i) {
    const plan::FlatEntry& entry = unit.layout().entries()[i];
    if (entry.part.copy > 0) continue;
    const auto& [owed, factor, steps] = states[i];
    const auto add = [&](const std::string& name, const plan::Shape& shape, const plan::Region& region,
                         const at::Tensor& values, HeldBy held_by) {
      pieces.push_back({name, shape, region, values.reshape({-1}), held_by, /*passes_change_it=*/true});
    };
    const auto add_whole = [&](const char* kind, const plan::Shape& shape, const at::Tensor& values) {
      add(optimizer_name(kind, entry.name), shape, plan::Region::whole(shape), values, HeldBy::kAllRanks);
    };
    if (owed.defined())
      add(owed_name(dp_rank, entry.name), entry.whole_shape(), entry.region({entry.offset, entry.end()}),
          owed, HeldBy::kThisRank);
    if (factor.defined()) add_whole(kFactor, factor.sizes().vec(), factor);
    if (steps > 0 && entry.part.first_element() == 0) add_whole(kSteps, {}, at::full({1}, steps, at::kLong));
  }
}

void allow_hook_state(StateReader& reader, const parallel::DataParallel& engine) {
  for (const parallel::FlatUnit* unit : engine.units()) {
    for (const plan::FlatEntry& entry : unit->layout().entries()) {
      const int64_t owing = ranks_that_owe(reader, entry.name);
      for (int64_t rank = 0; rank < owing; ++rank)
        reader.allow(owed_name(rank, entry.name), entry.whole_shape(), at::kFloat);
      reader.allow(optimizer_name(kSteps, entry.name), {}, at::kLong);
      const std::string factor = optimizer_name(kFactor, entry.name);
      if (reader.file_has(factor)) reader.allow(factor, reader.file_shape(factor), at::kFloat);
    }
  }
}

void read_hook_state(const StateReader& reader, parallel::DataParallel& engine) {
  const comm::Group& ranks = *engine.mesh().dp;
  for (size_t index = 0; index < engine.units().size(); ++index) {
    const parallel::FlatUnit& unit = *engine.units()[index];
    const at::TensorOptions on_device = unit.master().options().dtype(at::kFloat);
    std::vector<parallel::HookState> states;
    for (const plan::FlatEntry& entry : unit.layout().entries()) {
      parallel::HookState& state = states.emplace_back();
      const int64_t owing = ranks_that_owe(reader, entry.name);
      const plan::Region all = entry.region({entry.offset, entry.end()});
      // All ranks have the same tensors, so a rank that owes nothing has zeros and not an undefined tensor.
      if (owing > 0) state.owed = at::zeros({entry.numel}, on_device);
      for (int64_t rank = ranks.rank(); rank < owing; rank += ranks.size())
        state.owed += reader.read(owed_name(rank, entry.name), all).to(on_device);
      if (const std::string name = optimizer_name(kSteps, entry.name); reader.has(name))
        state.steps = reader.read(name).item<int64_t>();
      if (const std::string name = optimizer_name(kFactor, entry.name); reader.has(name)) {
        state.factor = reader.read(name).to(on_device);
      }
    }
    engine.set_hook_state(index, states);
  }
}

}  // namespace trireme::state
