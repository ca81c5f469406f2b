// What optimizers are given to update, ours and torch's, and how their updates reach the module.
#include <torch/optim/optimizer.h>

#include <utility>

#include "trireme/base/error.h"
#include "trireme/kernels/range.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {

std::vector<optim::FlatParam> DataParallel::optimizer_params(const GroupRule& rule) {
  group_rule_ = rule;
  follow_freezing();
  optimized_ = updated_ = completion_.trainable();
  std::vector<optim::FlatParam> params;
  for (const auto& unit : units_) params.push_back(unit->optimizer_param(rule));
  return params;
}

void DataParallel::round_as(const std::string& parameter, const std::string& name, int64_t first) {
  if (unit_of_frozen(parameter)) return;  // it has no state
  const auto [unit, index] = place_of(parameter);
  units_[unit]->round_as(index, name, first);
}

void DataParallel::check_own(const optim::Optimizer& optimizer, const char* operation) const {
  bool own = optimizer.size() == units_.size();
  for (size_t unit = 0; own && unit < units_.size(); ++unit)
    own = optimizer.master(unit).is_same(units_[unit]->master());
  if (own) return;
  throw LogicError(
      "[parallel.{}] rank {}: the optimizer updates the {} units of another engine, not the {} of this one, "
      "as happens when the module was wrapped again; build it from this engine's optimizer_params()",
      operation, mesh_.world->rank(), optimizer.size(), units_.size());
}

/// Leaves parameters that do not require a gradient now out of the update, as torch's optimizers do.
void DataParallel::follow_frozen(optim::Optimizer& optimizer) {
  const Completion::Flags& trainable = completion_.trainable();
  if (trainable == updated_) return;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (size_t i = 0; i < trainable[unit].size(); ++i) {
      TRIREME_CHECK(!trainable[unit][i] || optimized_[unit][i],
                    "[parallel.step] parameter {} did not require a gradient when optimizer_params() was "
                    "called; build the optimizer again after unfreezing it",
                    units_[unit]->params()[i].first);
    }
    if (trainable[unit] != updated_[unit]) optimizer.set_segments(unit, units_[unit]->segments(group_rule_));
  }
  updated_ = trainable;
}

std::vector<std::pair<std::string, at::Tensor>> DataParallel::named_optimizer_tensors() {
  TRIREME_CHECK(
      handed_out_ || !complete_,
      "[parallel.optimizer_tensors] a gradient exists already; call optimizer_tensors() before backward()");
  watch_updates();
  handed_out_ = true;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& unit : units_) {
    for (const FlatUnit::Piece& piece : unit->pieces()) {
      tensors.emplace_back(unit->params()[piece.param].first, piece.master);
    }
  }
  return tensors;
}

std::vector<at::Tensor> DataParallel::optimizer_tensors(
    const std::function<bool(const std::string&)>& select) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_optimizer_tensors()) {
    if (!select || select(name)) tensors.push_back(tensor);
  }
  return tensors;
}

void DataParallel::step(torch::optim::Optimizer& optimizer) {
  const kernels::TraceRange range("update");
  check_complete("step");
  optimizer.step();
  notice_update();
  if (!complete_) return;
  throw LogicError(
      "[parallel.step] rank {}: the optimizer changed none of engine->optimizer_tensors(); build it over "
      "them, not over the module's parameters, and call zero_grad(), if at all, before backward()",
      mesh_.world->rank());
}

/// Something was written on all ranks or none, since each rank has a piece of every parameter, if an empty
/// one.
void DataParallel::notice_update() {
  if (!std::exchange(pieces_written_, false)) return;
  const at::NoGradGuard no_grad;
  complete_ = false;
  executor_.update(programs_.update(), [this](size_t unit) { return units_[unit]->take_pieces(); });
  end_update();
}

}  // namespace trireme::parallel
