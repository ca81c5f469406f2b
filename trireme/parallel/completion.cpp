#include "trireme/parallel/completion.h"

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/some_names.h"

namespace trireme::parallel {

Completion::Completion(const Units& units, Callback callback)
    : units_(units), callback_(std::move(callback)) {
  for (const auto& unit : units_) {
    used_.emplace_back(unit->params().size());
    accumulators_.emplace_back(unit->params().size());
  }
  follow_freezing();
}

bool Completion::follow_freezing() {
  Flags now = trainable_now();
  if (now == trainable_) return false;
  trainable_ = std::move(now);
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (size_t param = 0; param < trainable_[unit].size(); ++param) {
      if (trainable_[unit][param]) watch(unit, param);
    }
  }
  return true;
}

Completion::Flags Completion::trainable_now() const {
  Flags trainable;
  for (const auto& unit : units_) {
    std::vector<bool>& params = trainable.emplace_back();
    for (const auto& [name, leaf] : unit->params()) params.push_back(leaf.requires_grad());
  }
  return trainable;
}

void Completion::watch(size_t unit, size_t param) {
  Node& accumulator = accumulators_[unit][param];
  if (accumulator) return;
  accumulator = nn::call_when_complete(units_[unit]->params()[param].second,
                                       [this, unit, param] { callback_(unit, param); });
}

/// Torch may give a parameter another accumulator together with other memory. Graphs keep the one that they
/// were made with.
void Completion::follow(size_t unit, size_t param) {
  Node& accumulator = accumulators_[unit][param];
  const at::Tensor& leaf = units_[unit]->params()[param].second;
  if (!accumulator || !leaf.requires_grad() || nn::is_watched(leaf, accumulator)) return;
  passing_.push_back(std::move(accumulator));
  accumulator.reset();
  watch(unit, param);
}

void Completion::begin() {
  awaited_ = trainable_;
}

bool Completion::take(size_t unit, size_t param) {
  TRIREME_CHECK(
      awaited_[unit][param],
      "[parallel.backward] parameter {} got its gradient more than once in one backward pass, as happens "
      "when a recomputed block runs twice; recompute around all of its uses at once, or around none",
      units_[unit]->params()[param].first);
  used_[unit][param] = true;
  awaited_[unit][param] = false;
  return std::ranges::find(awaited_[unit], true) == awaited_[unit].end();
}

void Completion::check_all_used(int64_t rank) const {
  std::vector<std::string> names;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const auto& params = units_[unit]->params();
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].second.requires_grad() && !used_[unit][i]) names.push_back(params[i].first);
    }
  }
  if (names.empty()) return;
  throw LogicError(
      "[parallel.backward] rank {}: {} parameters did not contribute to this step's loss: {}; use them, set "
      "requires_grad to false, or allow it with Unused::kZero",
      rank, names.size(), some_names(names));
}

void Completion::forget() {
  for (auto& params : used_) std::fill(params.begin(), params.end(), false);
}

}  // namespace trireme::parallel
