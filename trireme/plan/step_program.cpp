#include "trireme/plan/step_program.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <ranges>
#include <set>

#include "trireme/base/error.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::plan {
namespace {

using Event = UseOrder::Event;

/// Of a unit's whole gradient as it travels. Hooks that start late send it as it is until then.
int64_t gradient_bytes(const EngineSetting& setting, const UnitBuffers& memory) {
  switch (setting.hook) {
    case CommHook::kFp16:
      return 2 * memory.whole;
    case CommHook::kInt8: {
      const int64_t blocks = (memory.shard + kInt8ScaleBlock - 1) / kInt8ScaleBlock;
      return setting.shard_ranks() * blocks * (kInt8ScaleBlock + kFp32Bytes);
    }
    default:
      return setting.wire_bytes * memory.whole;
  }
}

/// Writes a program action by action and knows what has memory meanwhile.
class Writer {
 public:
  Writer(const std::vector<ProgramUnit>& units, const EngineSetting& setting, const UseOrder& order)
      : setting_(setting), order_(order), in_use_(units.size(), false) {
    program_.units = units;
    for (const ProgramUnit& unit : units) memory_.emplace_back(unit.numel, setting, unit.fp8);
    if (order_.reductions.empty()) order_.reductions = completions();
  }

  void forward_pass(int64_t micro_batch);
  void backward_pass(int64_t micro_batch, bool last);
  void update_pass();

  // Of engines whose micro-batches are under way at the same time.
  void backward_input_pass(int64_t micro_batch);
  void backward_weight_pass(int64_t micro_batch);
  void reduce_pass();
  /// Units are gathered now and stay whole, or are freed again.
  void hold(bool on);
  StepProgram take();

 private:
  struct Key {
    Role role;
    int64_t unit, micro_batch;
    auto operator<=>(const Key&) const = default;
  };

  int64_t next() const { return static_cast<int64_t>(program_.actions.size()); }
  bool is_root(int64_t unit) const { return unit == 0 && setting_.use_from != UseFrom::kBuckets; }
  const UnitBuffers& memory(int64_t unit) const { return memory_[static_cast<size_t>(unit)]; }
  bool is_trainable(int64_t unit) const { return program_.units[static_cast<size_t>(unit)].trainable; }
  bool reduces(bool last) const { return last || !setting_.reduces_once; }

  void begin_pass(Pass::Kind kind, int64_t micro_batch);
  void add(ActionKind kind, int64_t unit, Lane lane, std::vector<Transfer> transfers = {});
  void open(Role role, int64_t unit, int64_t bytes, int64_t micro_batch = Action::kOnceAStep);
  void close(Role role, int64_t unit, int64_t micro_batch = Action::kOnceAStep);
  bool is_open(Role role, int64_t unit) const { return open_.contains({role, unit, Action::kOnceAStep}); }
  void keep(Role role, int64_t unit, int64_t bytes, std::optional<Role> part_of = {});
  void add_kept_buffers();
  bool copies_sum() const;
  bool keeps_gradients(const UnitBuffers& memory) const;
  void add_reduced(int64_t unit);

  void unshard(int64_t unit);
  void unshard_ahead(const std::vector<int64_t>& uses, size_t place);
  void reshard(int64_t unit);
  void reshard_after_forward(int64_t unit);
  void compute_forward(int64_t unit);
  void begin_backward(int64_t unit, ActionKind kind = ActionKind::kBackward);
  template <typename Complete>
  void walk_backward(ActionKind kind, const Complete& complete);
  void hold_gradients(int64_t unit);
  void hold_whole_gradients(int64_t unit);
  void complete(int64_t unit, bool last);
  void reduce_ready(bool last);
  void reduce(int64_t unit, bool last);
  std::vector<Transfer> reduction(const UnitBuffers& memory) const;
  void finish_reductions(size_t left);
  std::vector<int64_t> completions() const;
  std::vector<int64_t> backward_uses() const;
  std::vector<int64_t> update_order() const;
  std::vector<Transfer> gather(int64_t bytes, int64_t ranks) const;

  StepProgram program_;
  const EngineSetting& setting_;
  UseOrder order_;
  std::vector<UnitBuffers> memory_;
  std::vector<bool> in_use_;
  std::map<Key, size_t> open_;            ///< buffers that have memory, not kept ones
  std::map<int64_t, int64_t> reduced_;    ///< unit -> action that reduced it last
  std::map<int64_t, int64_t> first_use_;  ///< unit -> its first action that computes
  std::set<int64_t> exchanged_;           ///< units gathered since the last update
  std::set<int64_t> begun_, completed_;   ///< units, in this backward pass
  size_t launched_ = 0;                   ///< of order_.reductions, in this backward pass
  std::deque<int64_t> in_flight_;
  int64_t micro_batch_ = Action::kOnceAStep;
  bool adds_up_ = false;  ///< other micro-batches of the step follow the one under way
  bool held_ = false;
};

std::vector<int64_t> Writer::completions() const {
  std::vector<int64_t> units;
  for (const Event& event : order_.backward) {
    if (event.kind == Event::Kind::kComplete && is_trainable(event.unit)) units.push_back(event.unit);
  }
  return units;
}

std::vector<int64_t> Writer::backward_uses() const {
  std::vector<int64_t> units;
  for (const Event& event : order_.backward) {
    if (event.kind == Event::Kind::kBegin) units.push_back(event.unit);
  }
  return units;
}

void Writer::begin_pass(Pass::Kind kind, int64_t micro_batch) {
  if (!program_.passes.empty()) program_.passes.back().end = next();
  program_.passes.push_back({kind, micro_batch, next(), next()});
  micro_batch_ = micro_batch;
}

void Writer::add(ActionKind kind, int64_t unit, Lane lane, std::vector<Transfer> transfers) {
  std::erase_if(transfers, [](const Transfer& transfer) { return transfer.ranks == 1; });
  program_.actions.push_back({kind, unit, micro_batch_, lane, std::move(transfers)});
}

/// From the next action on.
void Writer::open(Role role, int64_t unit, int64_t bytes, int64_t micro_batch) {
  open_.emplace(Key{role, unit, micro_batch}, program_.buffers.size());
  program_.buffers.push_back({role, unit, micro_batch, bytes, {}, next(), next()});
}

/// After the last action.
void Writer::close(Role role, int64_t unit, int64_t micro_batch) {
  const auto found = open_.find({role, unit, micro_batch});
  if (found == open_.end()) return;
  program_.buffers[found->second].to = next() - 1;
  open_.erase(found);
}

void Writer::keep(Role role, int64_t unit, int64_t bytes, std::optional<Role> part_of) {
  program_.buffers.push_back({role, unit, Action::kOnceAStep, bytes, part_of});
}

std::vector<Transfer> Writer::gather(int64_t bytes, int64_t ranks) const {
  return {{Collective::kAllGather, ranks, plan::wire_bytes(Collective::kAllGather, bytes, ranks)}};
}

void Writer::unshard(int64_t unit) {
  if (!memory(unit).parameters_come_and_go || is_open(Role::kParameters, unit)) return;
  const int64_t bytes = memory(unit).whole_bytes;
  open(Role::kParameters, unit, bytes);
  const int64_t ranks =
      is_open(Role::kSlice, unit) ? setting_.policy.reshard_after_forward : setting_.shard_ranks();
  std::vector<Transfer> transfers = gather(bytes, ranks);
  if (memory(unit).in_fp8 && exchanged_.insert(unit).second)
    transfers.insert(transfers.begin(), gather(memory(unit).exchanged_bytes, setting_.shard_ranks()).front());
  add(ActionKind::kUnshard, unit, Lane::kUnshard, std::move(transfers));
}

/// Those of `uses` that follow `place`, as far ahead as the setting says.
void Writer::unshard_ahead(const std::vector<int64_t>& uses, size_t place) {
  if (!setting_.beside) return;
  const size_t end = std::min(uses.size(), place + 1 + static_cast<size_t>(setting_.prefetch));
  for (size_t at = place + 1; at < end; ++at) unshard(uses[at]);
}

void Writer::reshard(int64_t unit) {
  if (held_ || !is_open(Role::kParameters, unit)) return;
  add(ActionKind::kReshard, unit, Lane::kCompute);
  close(Role::kParameters, unit);
  close(Role::kSlice, unit);
}

void Writer::reshard_after_forward(int64_t unit) {
  const int64_t together = setting_.policy.reshard_after_forward;
  if (held_ || !is_open(Role::kParameters, unit) || together == 1) return;
  if (together != Policy::kSameRanks && !is_open(Role::kSlice, unit))
    open(Role::kSlice, unit, memory(unit).whole_bytes / together);
  add(ActionKind::kReshard, unit, Lane::kCompute);
  close(Role::kParameters, unit);
}

void Writer::compute_forward(int64_t unit) {
  first_use_.emplace(unit, next());
  if (micro_batch_ != Action::kOnceAStep && unit != Action::kWholeModel) {
    if (const int64_t bytes = program_.units[static_cast<size_t>(unit)].activation_bytes; bytes > 0)
      open(Role::kActivations, unit, bytes, micro_batch_);
  }
  add(ActionKind::kForward, unit, Lane::kCompute);
}

/// With kOnceAStep a pass alone, without gradients: units are freed as soon as they were used. Else the last
/// one stays for the backward pass, which begins with it.
void Writer::forward_pass(int64_t micro_batch) {
  const bool trains = micro_batch != Action::kOnceAStep;
  begin_pass(Pass::Kind::kForward, micro_batch);
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

void Writer::hold_gradients(int64_t unit) {
  if (!is_trainable(unit) || is_open(Role::kSum, unit)) return;
  if (adds_up_ && memory(unit).sums_micro_batches_apart)
    return open(Role::kSum, unit, kFp32Bytes * memory(unit).whole);
  hold_whole_gradients(unit);
}

void Writer::hold_whole_gradients(int64_t unit) {
  if (memory(unit).gradients_stay || is_open(Role::kGradients, unit)) return;
  open(Role::kGradients, unit, setting_.compute_bytes * memory(unit).whole);
}

void Writer::begin_backward(int64_t unit, ActionKind kind) {
  hold_gradients(unit);
  begun_.insert(unit);
  add(kind, unit, Lane::kCompute);
  close(Role::kActivations, unit, micro_batch_);
  const int64_t bytes = program_.units[static_cast<size_t>(unit)].between_halves_bytes;
  if (kind == ActionKind::kBackwardInput && bytes > 0) open(Role::kActivations, unit, bytes, micro_batch_);
}

/// Units are gathered, computed and freed in the order of a backward pass; `complete` hears of each whose
/// gradients are.
template <typename Complete>
void Writer::walk_backward(ActionKind kind, const Complete& complete) {
  const std::vector<int64_t> uses = backward_uses();
  size_t place = 0;
  for (const Event& event : order_.backward) {
    switch (event.kind) {
      case Event::Kind::kBegin:
        unshard(event.unit);
        unshard_ahead(uses, place++);
        begin_backward(event.unit, kind);
        break;
      case Event::Kind::kComplete:
        complete(event.unit);
        break;
      case Event::Kind::kEnd:
        if (!is_root(event.unit)) reshard(event.unit);
        break;
    }
  }
}

void Writer::backward_pass(int64_t micro_batch, bool last) {
  begin_pass(Pass::Kind::kBackward, micro_batch);
  adds_up_ = !last;
  completed_.clear();
  begun_.clear();
  launched_ = 0;
  if (setting_.use_from == UseFrom::kBuckets) {
    for (int64_t unit = 0; unit < std::ssize(program_.units); ++unit) hold_gradients(unit);
    add(ActionKind::kBackward, Action::kWholeModel, Lane::kCompute);
  } else if (setting_.use_from == UseFrom::kRunUnit) {
    hold_gradients(0);
  }
  walk_backward(ActionKind::kBackward, [&](int64_t unit) { complete(unit, last); });
  for (const int64_t unit : order_.reductions) completed_.insert(unit);
  reduce_ready(last);
  finish_reductions(0);
  for (int64_t unit = 1; unit < std::ssize(program_.units); ++unit) reshard(unit);
}

/// What its weights need stays.
void Writer::backward_input_pass(int64_t micro_batch) {
  begin_pass(Pass::Kind::kBackwardInput, micro_batch);
  adds_up_ = true;
  begun_.clear();
  hold_gradients(0);
  walk_backward(ActionKind::kBackwardInput, [&](int64_t unit) {
    if (!begun_.contains(unit)) begin_backward(unit, ActionKind::kBackwardInput);
  });
  for (int64_t unit = 1; unit < std::ssize(program_.units); ++unit) reshard(unit);
}

/// Products of activations and gradients of outputs: no parameters.
void Writer::backward_weight_pass(int64_t micro_batch) {
  begin_pass(Pass::Kind::kBackwardWeight, micro_batch);
  adds_up_ = true;
  for (int64_t unit = std::ssize(program_.units); unit-- > 0;) {
    hold_gradients(unit);
    add(ActionKind::kBackwardWeight, unit, Lane::kCompute);
    close(Role::kActivations, unit, micro_batch_);
  }
  for (const int64_t unit : order_.reductions) reduce(unit, /*last=*/false);
}

void Writer::reduce_pass() {
  begin_pass(Pass::Kind::kReduce, Action::kOnceAStep);
  adds_up_ = false;
  for (const int64_t unit : order_.reductions) {
    hold_gradients(unit);
    reduce(unit, /*last=*/true);
  }
  finish_reductions(0);
}

void Writer::hold(bool on) {
  begin_pass(Pass::Kind::kTransfer, Action::kOnceAStep);
  held_ = on;
  for (int64_t unit = 0; unit < std::ssize(program_.units); ++unit) on ? unshard(unit) : reshard(unit);
}

void Writer::complete(int64_t unit, bool last) {
  const bool begun = setting_.use_from == UseFrom::kBuckets || begun_.contains(unit);
  if (!begun) begin_backward(unit);  // its gradients need none of its parameters
  completed_.insert(unit);
  reduce_ready(last);
}

/// Reductions keep their order on all ranks: one that is complete waits for those before it.
void Writer::reduce_ready(bool last) {
  while (launched_ < order_.reductions.size() && completed_.contains(order_.reductions[launched_]))
    reduce(order_.reductions[launched_++], last);
}

std::vector<Transfer> Writer::reduction(const UnitBuffers& memory) const {
  if (setting_.reduces_locally()) return {};
  const int64_t shards = setting_.shard_ranks(), replicas = setting_.replicas();
  const auto sent = [](Collective collective, int64_t ranks, int64_t bytes) {
    return Transfer{collective, ranks, plan::wire_bytes(collective, bytes, ranks)};
  };
  if (setting_.reduction == Reduction::kBackend && setting_.hook == CommHook::kNone) {
    Transfer scatter = sent(Collective::kReduceScatter, shards, setting_.wire_bytes * memory.whole);
    // torch's Gloo reduces all of it on every rank.
    if (setting_.device == Device::kCpu) scatter.bytes *= 2;
    return {scatter, sent(Collective::kAllReduce, replicas, setting_.wire_bytes * memory.shard)};
  }
  // fp32 numbers of a shard travel between replicas after they were summed.
  const int64_t shard = kFp32Bytes * memory.shard;
  return {sent(Collective::kAllToAll, shards, gradient_bytes(setting_, memory)),
          sent(Collective::kAllToAll, replicas, shard), sent(Collective::kAllGather, replicas, shard)};
}

void Writer::reduce(int64_t unit, bool last) {
  const UnitBuffers& memory = this->memory(unit);
  if (!reduces(last)) return add(ActionKind::kAccumulate, unit, Lane::kCompute);
  if (is_open(Role::kSum, unit) && copies_sum()) hold_whole_gradients(unit);
  reduced_[unit] = next();
  add(ActionKind::kReduce, unit, Lane::kReduce, reduction(memory));
  if (last && setting_.gathers_sum()) {
    add(ActionKind::kGatherSum, unit, Lane::kUnshard,
        gather(kFp32Bytes * memory.whole, setting_.shard_ranks()));
  }
  in_flight_.push_back(unit);
  finish_reductions(setting_.beside ? static_cast<size_t>(kReductionsInFlight) : 0);
}

/// Computation waits for reductions in flight, but for the last `left`, whose gradients then lose their
/// memory.
void Writer::finish_reductions(size_t left) {
  while (in_flight_.size() > left) {
    close(Role::kGradients, in_flight_.front());
    close(Role::kSum, in_flight_.front());
    in_flight_.pop_front();
  }
}

/// Units in the order of the next forward pass, as far as all ranks know it alike: parameters are gathered
/// behind their updates, and ranks may go through a module in different orders, but reduce in one. The unit
/// that was reduced last comes later, since its sum is still being gathered, behind about as many parameters
/// as it has: gathering takes about as long as updating them.
std::vector<int64_t> Writer::update_order() const {
  std::vector<int64_t> order;
  const auto append = [&](int64_t unit) {
    if (std::ranges::find(order, unit) == order.end()) order.push_back(unit);
  };
  if (setting_.use_from != UseFrom::kBuckets) {
    append(0);
    for (const int64_t unit : order_.reductions | std::views::reverse) append(unit);
  }
  for (int64_t unit = 0; unit < std::ssize(program_.units); ++unit) append(unit);
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

void Writer::update_pass() {
  begin_pass(Pass::Kind::kUpdate, Action::kOnceAStep);
  for (const int64_t unit : update_order()) {
    add(ActionKind::kUpdate, unit, Lane::kReduce);
    if (setting_.gathers()) reshard(unit);
    if (setting_.gathers_update())
      add(ActionKind::kUnshard, unit, Lane::kUnshard,
          gather(memory(unit).whole_bytes, setting_.shard_ranks()));
  }
}

void Writer::add_reduced(int64_t unit) {
  const UnitBuffers& memory = this->memory(unit);
  const int64_t bytes = kFp32Bytes * memory.updated;
  if (memory.reduced_in_gradients) return keep(Role::kReduced, unit, bytes, Role::kGradients);
  if (!memory.reduced_comes_and_goes || !reduced_.contains(unit)) return keep(Role::kReduced, unit, bytes);
  const auto use = first_use_.find(setting_.use_from == UseFrom::kBuckets ? Action::kWholeModel : unit);
  const int64_t first =
      std::ranges::find_if(
          program_.actions,
          [&](const Action& action) { return action.kind == ActionKind::kReduce && action.unit == unit; }) -
      program_.actions.begin();
  Buffer& buffer = program_.buffers.emplace_back(Buffer{Role::kReduced,
                                                        unit,
                                                        Action::kOnceAStep,
                                                        bytes,
                                                        {},
                                                        first,
                                                        use == first_use_.end() ? next() - 1 : use->second});
  if (buffer.to == buffer.from) buffer.to = next() - 1;
}

/// Whether fp32 sums become gradients of the dtype of computation again, in which they travel.
bool Writer::copies_sum() const {
  return setting_.wire_as_computed && !setting_.reduces_locally();
}

/// Whole gradients that no pass uses get no memory: the fp32 sum is used as it is.
bool Writer::keeps_gradients(const UnitBuffers& memory) const {
  const bool only_sum = memory.sums_micro_batches_apart && !copies_sum() && setting_.accumulation > 1;
  return memory.gradients_stay && !only_sum;
}

void Writer::add_kept_buffers() {
  for (int64_t unit = 0; unit < std::ssize(program_.units); ++unit) {
    const UnitBuffers& memory = this->memory(unit);
    const int64_t compute = setting_.compute_bytes;
    if (!memory.parameters_come_and_go) keep(Role::kParameters, unit, memory.whole_bytes);
    if (memory.keeps_shard) keep(Role::kShard, unit, memory.shard_bytes);
    keep(Role::kMaster, unit, kFp32Bytes * memory.updated,
         memory.master_in_parameters ? std::optional(Role::kParameters)
         : memory.master_is_shard    ? std::optional(Role::kShard)
                                     : std::nullopt);
    keep(Role::kMoments, unit, memory.updated / FlatLayout::kAlignment * setting_.moments);
    if (keeps_gradients(memory)) keep(Role::kGradients, unit, compute * memory.whole);
    add_reduced(unit);
  }
}

StepProgram Writer::take() {
  if (!program_.passes.empty()) program_.passes.back().end = next();
  while (!open_.empty()) {
    const Key key = open_.begin()->first;
    close(key.role, key.unit, key.micro_batch);
  }
  add_kept_buffers();
  return std::move(program_);
}

}  // namespace

int64_t Action::wire_bytes() const {
  return std::accumulate(transfers.begin(), transfers.end(), int64_t{0},
                         [](int64_t sum, const Transfer& transfer) { return sum + transfer.bytes; });
}

bool Buffer::has_memory_at(int64_t action) const {
  if (is_kept()) return true;
  return from <= to ? from <= action && action <= to : from <= action || action <= to;
}

int64_t StepProgram::wire_bytes() const {
  return std::accumulate(actions.begin(), actions.end(), int64_t{0},
                         [](int64_t sum, const Action& action) { return sum + action.wire_bytes(); });
}

int64_t StepProgram::wire_bytes(int64_t micro_batches) const {
  int64_t middle = 0, there = 0;
  for (const Pass& pass : passes) {
    there = std::max(there, pass.micro_batch + 1);
    if (pass.micro_batch != 1) continue;
    for (int64_t at = pass.begin; at < pass.end; ++at)
      middle += actions[static_cast<size_t>(at)].wire_bytes();
  }
  const int64_t repeated = std::max<int64_t>(0, micro_batches - std::max(there, kMicroBatchesShown));
  int64_t sum = 0;
  const bool beyond =
      __builtin_mul_overflow(repeated, middle, &sum) || __builtin_add_overflow(sum, wire_bytes(), &sum);
  return beyond ? std::numeric_limits<int64_t>::max() : sum;
}

std::optional<int64_t> sent_bytes(const StepProgram& program, const EngineSetting& setting,
                                  int64_t micro_batches) {
  const int64_t ranks = setting.shard_ranks();
  if (!hook_obstacle(setting.policy, setting.hook).empty()) return std::nullopt;
  if (starts_late(setting.hook) && ranks > 1) return std::nullopt;
  int64_t sent = program.wire_bytes(micro_batches);
  for (const ProgramUnit& unit : program.units) {
    if (!setting.reduces_locally()) break;
    const int64_t bytes = kFp32Bytes * unit.numel;
    sent +=
        wire_bytes(Collective::kAllToAll, bytes, ranks) + wire_bytes(Collective::kAllGather, bytes, ranks);
  }
  return sent;
}

int64_t HeldBytes::total() const {
  int64_t sum = 0;
  for (const int64_t bytes : by_role) {
    if (__builtin_add_overflow(sum, bytes, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

std::vector<ProgramUnit> program_units(const std::vector<UnitSpec>& units, const EngineSetting& setting,
                                       const std::vector<int64_t>& activation_bytes) {
  std::vector<ProgramUnit> result;
  for (const UnitSpec& unit : units) {
    const size_t place = result.size();
    result.push_back({.name = unit.name,
                      .numel = flat_layout(unit, setting.mesh.dp_size()).numel(),
                      .activation_bytes = place < activation_bytes.size() ? activation_bytes[place] : 0,
                      .fp8 = fp8_unit(unit)});
  }
  return result;
}

UseOrder declared_order(const std::vector<ProgramUnit>& units, UseFrom use_from) {
  UseOrder order;
  if (use_from == UseFrom::kBuckets) {
    for (int64_t unit = 0; unit < std::ssize(units); ++unit)
      order.backward.push_back({Event::Kind::kComplete, unit});
    return order;
  }
  for (int64_t unit = 0; unit < std::ssize(units); ++unit) order.forward.push_back(unit);
  for (int64_t unit = std::ssize(units); unit-- > 0;) {
    if (unit > 0) order.backward.push_back({Event::Kind::kBegin, unit});
    order.backward.push_back({Event::Kind::kComplete, unit});
    if (unit > 0) order.backward.push_back({Event::Kind::kEnd, unit});
  }
  return order;
}

StepProgram step_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                         const UseOrder& order) {
  Writer writer(units, setting, order);
  for (int64_t micro_batch = 0; micro_batch < setting.accumulation; ++micro_batch) {
    writer.forward_pass(micro_batch);
    writer.backward_pass(micro_batch, micro_batch + 1 == setting.accumulation);
  }
  writer.update_pass();
  return writer.take();
}

StepProgram step_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                         const UseOrder& order, const std::vector<EnginePass>& passes, bool held) {
  Writer writer(units, setting, order);
  if (held) writer.hold(true);
  for (const EnginePass& pass : passes) {
    switch (pass.kind) {
      case Pass::Kind::kForward:
        writer.forward_pass(pass.micro_batch);
        break;
      case Pass::Kind::kBackward:
        writer.backward_pass(pass.micro_batch, pass.last);
        break;
      case Pass::Kind::kBackwardInput:
        writer.backward_input_pass(pass.micro_batch);
        break;
      case Pass::Kind::kBackwardWeight:
        writer.backward_weight_pass(pass.micro_batch);
        break;
      case Pass::Kind::kReduce:
        writer.reduce_pass();
        break;
      case Pass::Kind::kUpdate:
      case Pass::Kind::kTransfer:
        throw LogicError("[plan.step_program] a pass of kind {} is not one of an engine", pass.kind);
    }
  }
  if (held) writer.hold(false);
  writer.update_pass();
  return writer.take();
}

StepProgram inference_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                              const UseOrder& order) {
  Writer writer(units, setting, order);
  writer.forward_pass(Action::kOnceAStep);
  return writer.take();
}

}  // namespace trireme::plan
