#include "trireme/plan/step_writer.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "trireme/plan/kept_buffers.h"
#include "trireme/plan/unit_transfers.h"

namespace trireme::plan {

namespace {

std::vector<ProgramUnit> with_uses(std::vector<ProgramUnit> units, const UseOrder& order) {
  for (int64_t unit = 0; unit < std::ssize(units); ++unit)
    units[static_cast<size_t>(unit)].uses = std::max<int64_t>(1, std::ranges::count(order.forward, unit));
  return units;
}

}  // namespace

StepWriter::StepWriter(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                       const UseOrder& order)
    : setting_(setting), order_(order), builder_(with_uses(units, order)) {
  for (const ProgramUnit& unit : units)
    memory_.emplace_back(unit.numel, setting, unit.fp8, unit.frozen, unit.nf4);
  if (order_.reductions.empty()) order_.reductions = completions();
}

std::vector<int64_t> StepWriter::completions() const {
  std::vector<int64_t> units;
  for (const UseOrder::Event& event : order_.backward) {
    if (event.kind == UseOrder::Event::Kind::kComplete && builder_.unit(event.unit).trainable)
      units.push_back(event.unit);
  }
  return units;
}

std::vector<int64_t> StepWriter::backward_uses() const {
  std::vector<int64_t> units;
  for (const UseOrder::Event& event : order_.backward) {
    if (event.kind == UseOrder::Event::Kind::kBegin) units.push_back(event.unit);
  }
  return units;
}

void StepWriter::unshard(int64_t unit) {
  if (!memory(unit).parameters_come_and_go || builder_.is_open(Role::kParameters, unit)) return;
  const int64_t bytes = memory(unit).whole_bytes, frozen = memory(unit).frozen_bytes;
  builder_.open(Role::kParameters, unit, bytes + frozen);
  const int64_t ranks =
      builder_.is_open(Role::kSlice, unit) ? setting_.policy.reshard_after_forward : setting_.shard_ranks();
  std::vector<Transfer> transfers;
  if (memory(unit).in_fp8 && exchanged_.insert(unit).second)
    transfers.push_back(gather_transfer(memory(unit).exchanged_bytes, setting_.shard_ranks()));
  if (bytes > 0 || frozen == 0) transfers.push_back(gather_transfer(bytes, ranks));
  if (frozen > 0) transfers.push_back(gather_transfer(frozen, setting_.shard_ranks()));
  builder_.add(ActionKind::kUnshard, unit, Lane::kUnshard, std::move(transfers));
}

/// Those of `uses` that follow `place`, as far ahead as the setting says.
void StepWriter::unshard_ahead(const std::vector<int64_t>& uses, size_t place) {
  if (!setting_.beside) return;
  const size_t end = std::min(uses.size(), place + 1 + static_cast<size_t>(setting_.prefetch));
  for (size_t at = place + 1; at < end; ++at) unshard(uses[at]);
}

void StepWriter::reshard(int64_t unit) {
  if (held_ || !builder_.is_open(Role::kParameters, unit)) return;
  builder_.add(ActionKind::kReshard, unit, Lane::kCompute);
  builder_.close(Role::kParameters, unit);
  builder_.close(Role::kSlice, unit);
}

void StepWriter::reshard_after_forward(int64_t unit) {
  const int64_t together = setting_.policy.reshard_after_forward;
  if (held_ || !builder_.is_open(Role::kParameters, unit) || together == 1) return;
  if (together != Policy::kSameRanks && !builder_.is_open(Role::kSlice, unit))
    builder_.open(Role::kSlice, unit, memory(unit).whole_bytes / together);
  builder_.add(ActionKind::kReshard, unit, Lane::kCompute);
  builder_.close(Role::kParameters, unit);
}

void StepWriter::compute_forward(int64_t unit) {
  if (builder_.micro_batch() != Action::kOnceAStep && unit != Action::kWholeModel) {
    if (const int64_t bytes = builder_.unit(unit).activation_bytes; bytes > 0)
      builder_.open(Role::kActivations, unit, bytes, builder_.micro_batch());
  }
  builder_.add(ActionKind::kForward, unit, Lane::kCompute);
}

void StepWriter::forward_pass(int64_t micro_batch) {
  const bool trains = micro_batch != Action::kOnceAStep;
  builder_.begin_pass(Pass::Kind::kForward, micro_batch);
  if (setting_.use_from == UseFrom::kBuckets) return compute_forward(Action::kWholeModel);
  for (size_t place = 0; place < order_.forward.size(); ++place) {
    const int64_t unit = order_.forward[place];
    unshard(unit);
    unshard_ahead(order_.forward, place);
    compute_forward(unit);
    if (is_root(unit)) continue;
    if (!trains) reshard(unit);
    if (trains && place + 1 < order_.forward.size()) reshard_after_forward(unit);
  }
}

void StepWriter::hold_gradients(int64_t unit) {
  if (!builder_.unit(unit).trainable || builder_.is_open(Role::kSum, unit)) return;
  if (adds_up_ && memory(unit).sums_micro_batches_apart)
    return builder_.open(Role::kSum, unit, kFp32Bytes * memory(unit).whole);
  hold_whole_gradients(unit);
}

void StepWriter::hold_whole_gradients(int64_t unit) {
  if (memory(unit).gradients_stay || builder_.is_open(Role::kGradients, unit)) return;
  builder_.open(Role::kGradients, unit, setting_.compute_bytes * memory(unit).whole);
}

void StepWriter::begin_backward(int64_t unit, ActionKind kind) {
  hold_gradients(unit);
  begun_.insert(unit);
  builder_.add(kind, unit, Lane::kCompute);
  builder_.close(Role::kActivations, unit, builder_.micro_batch());
  const int64_t bytes = builder_.unit(unit).between_halves_bytes;
  if (kind == ActionKind::kBackwardInput && bytes > 0)
    builder_.open(Role::kActivations, unit, bytes, builder_.micro_batch());
}

/// Units are gathered, computed and freed in the order of a backward pass; `complete` hears of each whose
/// gradients are.
template <typename Complete>
void StepWriter::walk_backward(ActionKind kind, const Complete& complete) {
  const std::vector<int64_t> uses = backward_uses();
  size_t place = 0;
  for (const UseOrder::Event& event : order_.backward) {
    switch (event.kind) {
      case UseOrder::Event::Kind::kBegin:
        unshard(event.unit);
        unshard_ahead(uses, place++);
        begin_backward(event.unit, kind);
        break;
      case UseOrder::Event::Kind::kComplete:
        complete(event.unit);
        break;
      case UseOrder::Event::Kind::kEnd:
        if (!is_root(event.unit)) reshard(event.unit);
        break;
    }
  }
}

void StepWriter::backward_pass(int64_t micro_batch, bool last) {
  builder_.begin_pass(Pass::Kind::kBackward, micro_batch);
  adds_up_ = !last;
  completed_.clear();
  begun_.clear();
  launched_ = 0;
  if (setting_.use_from == UseFrom::kBuckets) {
    for (int64_t unit = 0; unit < builder_.units(); ++unit) hold_gradients(unit);
    builder_.add(ActionKind::kBackward, Action::kWholeModel, Lane::kCompute);
  } else if (setting_.use_from == UseFrom::kRunUnit && builder_.units() > 0) {
    hold_gradients(0);
  }
  walk_backward(ActionKind::kBackward, [&](int64_t unit) { complete(unit, last); });
  for (const int64_t unit : order_.reductions) completed_.insert(unit);
  reduce_ready(last);
  finish_reductions(0);
  for (int64_t unit = 1; unit < builder_.units(); ++unit) reshard(unit);
}

void StepWriter::backward_input_pass(int64_t micro_batch) {
  builder_.begin_pass(Pass::Kind::kBackwardInput, micro_batch);
  adds_up_ = true;
  begun_.clear();
  if (builder_.units() > 0) hold_gradients(0);
  walk_backward(ActionKind::kBackwardInput, [&](int64_t unit) {
    if (!begun_.contains(unit)) begin_backward(unit, ActionKind::kBackwardInput);
  });
  for (int64_t unit = 1; unit < builder_.units(); ++unit) reshard(unit);
}

void StepWriter::backward_weight_pass(int64_t micro_batch) {
  builder_.begin_pass(Pass::Kind::kBackwardWeight, micro_batch);
  adds_up_ = true;
  // The first half ends before units of which nothing is trained, where nothing before them is either.
  std::set<int64_t> reached;
  for (const UseOrder::Event& event : order_.backward) reached.insert(event.unit);
  for (int64_t unit = builder_.units(); unit-- > 0;) {
    if (reached.contains(unit)) {
      hold_gradients(unit);
      builder_.add(ActionKind::kBackwardWeight, unit, Lane::kCompute);
    }
    builder_.close(Role::kActivations, unit, builder_.micro_batch());
  }
  for (const int64_t unit : order_.reductions) reduce(unit, /*last=*/false);
  finish_reductions(0);
}

void StepWriter::reduce_pass() {
  builder_.begin_pass(Pass::Kind::kReduce, Action::kOnceAStep);
  adds_up_ = false;
  for (const int64_t unit : order_.reductions) {
    hold_gradients(unit);
    reduce(unit, /*last=*/true);
  }
  finish_reductions(0);
}

void StepWriter::hold(bool on) {
  builder_.begin_pass(Pass::Kind::kTransfer, Action::kOnceAStep);
  held_ = on;
  for (int64_t unit = 0; unit < builder_.units(); ++unit) on ? unshard(unit) : reshard(unit);
}

void StepWriter::complete(int64_t unit, bool last) {
  const bool begun = setting_.use_from == UseFrom::kBuckets || begun_.contains(unit);
  if (!begun) begin_backward(unit);  // its gradients need none of its parameters
  completed_.insert(unit);
  reduce_ready(last);
}

/// Reductions keep their order on all ranks: one that is complete waits for those before it.
void StepWriter::reduce_ready(bool last) {
  while (launched_ < order_.reductions.size() && completed_.contains(order_.reductions[launched_]))
    reduce(order_.reductions[launched_++], last);
}

void StepWriter::reduce(int64_t unit, bool last) {
  const UnitBuffers& memory = this->memory(unit);
  if (!reduces(last)) {
    builder_.add(ActionKind::kAccumulate, unit, Lane::kCompute);
    return;
  }
  if (builder_.is_open(Role::kSum, unit) && setting_.copies_sum()) hold_whole_gradients(unit);
  in_flight_.push_back(
      builder_.add(ActionKind::kReduce, unit, Lane::kReduce, reduction_transfers(setting_, memory)));
  if (last && setting_.gathers_sum()) {
    builder_.add(ActionKind::kGatherSum, unit, Lane::kUnshard,
                 {gather_transfer(kFp32Bytes * memory.whole, setting_.shard_ranks())});
  }
  finish_reductions(setting_.beside ? static_cast<size_t>(kReductionsInFlight) : 0);
}

/// Computation waits for reductions in flight, but for the last `left`, whose gradients then lose their
/// memory.
void StepWriter::finish_reductions(size_t left) {
  for (; in_flight_.size() > left; in_flight_.pop_front()) {
    const int64_t unit = builder_.action(in_flight_.front()).unit;
    builder_.wait_for(in_flight_.front());
    builder_.close(Role::kGradients, unit);
    builder_.close(Role::kSum, unit);
  }
}

/// Units in the order of the next forward pass, as far as all ranks know it alike: parameters are gathered
/// behind their updates, and ranks may go through a module in different orders, but reduce in one. The unit
/// that was reduced last comes later, since its sum is still being gathered, behind about as many parameters
/// as it has: gathering takes about as long as updating them.
std::vector<int64_t> StepWriter::update_order() const {
  std::vector<int64_t> order;
  const auto append = [&](int64_t unit) {
    if (std::ranges::find(order, unit) == order.end()) order.push_back(unit);
  };
  if (setting_.use_from != UseFrom::kBuckets && builder_.units() > 0) {
    append(0);
    for (const int64_t unit : order_.reductions | std::views::reverse) append(unit);
  }
  for (int64_t unit = 0; unit < builder_.units(); ++unit) append(unit);
  if (!setting_.beside || !setting_.gathers_sum() || order_.reductions.empty()) return order;
  const int64_t last = order_.reductions.back();
  int64_t meanwhile = 0;
  for (auto place = std::ranges::find(order, last); place + 1 != order.end(); ++place) {
    if (meanwhile >= memory(last).whole) break;
    meanwhile += memory(place[1]).whole;
    std::swap(place[0], place[1]);
  }
  return order;
}

void StepWriter::update_pass() {
  builder_.begin_pass(Pass::Kind::kUpdate, Action::kOnceAStep);
  for (const int64_t unit : update_order()) {
    builder_.add(ActionKind::kUpdate, unit, Lane::kReduce);
    if (setting_.gathers()) reshard(unit);
    const bool is_updated = memory(unit).whole > 0 || memory(unit).frozen_bytes == 0;
    if (setting_.gathers_update() && is_updated)
      builder_.add(ActionKind::kUnshard, unit, Lane::kUnshard,
                   {gather_transfer(memory(unit).whole_bytes, setting_.shard_ranks())});
  }
}

StepProgram StepWriter::take() {
  StepProgram program = builder_.take();
  add_kept_buffers(program, memory_, setting_);
  return program;
}

}  // namespace trireme::plan
