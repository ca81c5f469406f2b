#include "trireme/plan/step_laws.h"

#include <algorithm>
#include <map>
#include <optional>
#include <ranges>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/nf4_format.h"
#include "trireme/plan/cost.h"

namespace trireme::plan {
namespace {

Lane lane_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::kUnshard:
    case ActionKind::kGatherSum:
      return Lane::kUnshard;
    case ActionKind::kReduce:
    case ActionKind::kUpdate:
      return Lane::kReduce;
    case ActionKind::kSend:
      return Lane::kSend;
    case ActionKind::kPost:
    case ActionKind::kRecv:
      return Lane::kRecv;
    default:
      return Lane::kCompute;
  }
}

class StepLaws {
 public:
  explicit StepLaws(const StepProgram& program) : program_(program) {}
  void run();

 private:
  using Place = std::pair<int64_t, int64_t>;  ///< unit and micro-batch

  std::string name_of(int64_t unit) const {
    return unit == Action::kWholeModel ? "the model" : program_.units[static_cast<size_t>(unit)].name;
  }
  const ProgramUnit& unit(int64_t index) const { return program_.units[static_cast<size_t>(index)]; }
  [[noreturn]] void refuse(int64_t at, const std::string& what) const;
  void check_turn(const Pass& pass);
  void check_place(int64_t at, const Pass& pass) const;
  void check_transfers(int64_t at) const;
  void check_gather(int64_t at, const std::vector<int64_t>& wholes, int64_t ranks) const;
  void check_unshard(int64_t at, int64_t updated) const;
  int64_t stage_of(int64_t unit) const;
  bool needs_no_backward(int64_t unit) const;
  int64_t bytes_at(int64_t at, Role role, int64_t unit) const;
  void walk(int64_t at);
  void take(int64_t at);
  void sum_tied(int64_t at);
  void check_reduction(int64_t at);
  void update(int64_t at);
  void check_counts() const;
  void check_order(int64_t micro_batch, const std::vector<int64_t>& units) const;
  void check_messages() const;
  void check_buffers() const;

  const StepProgram& program_;
  std::map<Place, int64_t> forwards_, backwards_, weights_, taken_;
  std::map<int64_t, std::vector<int64_t>> there_;  ///< units by micro-batch, as forward passes reach them
  std::vector<int64_t> back_;                      ///< units that the pass under way has gone back through
  std::optional<int64_t> tied_sum_;                ///< its place
  std::set<int64_t> added_up_;                     ///< units with gradients that no sum has yet
  std::set<int64_t> reduced_, updated_;
  bool is_behind_passes_ = false;           ///< a pass has summed what others have left
  std::optional<int64_t> first_reduction_;  ///< its place
  std::set<int64_t> wire_forms_;            ///< in which gradients of all units so far may travel
  /// Messages whose buffers were posted and that were not received: peer, kind, stage, micro-batch, buffer.
  using Posting = std::tuple<int64_t, Message, int64_t, int64_t, int64_t>;
  static Posting posting_of(const Action& action) {
    return {action.peer, action.message, action.stage, action.micro_batch, action.buffer};
  }
  std::set<Posting> posted_;
  /// By kind, unit, peer, bytes and passes before: how many each micro-batch has.
  std::map<std::tuple<ActionKind, int64_t, int64_t, int64_t, int64_t>, std::map<int64_t, int64_t>> messages_;
};

void StepLaws::refuse(int64_t at, const std::string& what) const {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  throw LogicError("[plan.step_program] action {}, {} of {}{}: {}", at, action.kind, name_of(action.unit),
                   action.micro_batch < 0 ? "" : fmt::format(" in micro-batch {}", action.micro_batch), what);
}

/// What passes have left is summed behind all of them.
void StepLaws::check_turn(const Pass& pass) {
  is_behind_passes_ =
      is_behind_passes_ || pass.kind == Pass::Kind::kSumTied || pass.kind == Pass::Kind::kReduce;
  if (!is_behind_passes_ || !computing(pass.kind)) return;
  throw LogicError(
      "[plan.step_program] the {} pass of micro-batch {} comes behind one that sums what passes have left; "
      "move "
      "that behind all passes",
      pass.kind, pass.micro_batch);
}

void StepLaws::check_place(int64_t at, const Pass& pass) const {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  if (action.lane != lane_of(action.kind)) {
    refuse(at, fmt::format("it is in the lane {}, but {} runs in the lane {}", action.lane, action.kind,
                           lane_of(action.kind)));
  }
  const bool belongs = action.kind == ActionKind::kUpdate ? pass.kind == Pass::Kind::kUpdate
                       : action.kind == ActionKind::kSumTied
                           ? pass.kind == Pass::Kind::kSumTied
                           : !action.computes() || computing(pass.kind) == action.kind;
  if (!belongs)
    refuse(at, fmt::format("it is in a {} pass, but belongs to a {} pass", pass.kind, action.kind));
  if (pass.kind == Pass::Kind::kSumTied && action.kind != ActionKind::kSumTied)
    refuse(at, "it is in a pass that sums gradients of tied parameters, and of nothing else");
  if (action.computes() && action.micro_batch != pass.micro_batch)
    refuse(at, fmt::format("it is in a pass of micro-batch {}", pass.micro_batch));
}

int64_t StepLaws::bytes_at(int64_t at, Role role, int64_t unit) const {
  for (const Buffer& buffer : program_.buffers) {
    if (buffer.role == role && buffer.unit == unit && buffer.has_memory_at(at)) return buffer.bytes;
  }
  return 0;
}

/// The last transfers are gathers of so many whole bytes each.
void StepLaws::check_gather(int64_t at, const std::vector<int64_t>& wholes, int64_t ranks) const {
  if (ranks <= 1) return;
  const std::vector<Transfer> transfers =
      program_.actions[static_cast<size_t>(at)].transfers_along(Along::kData);
  auto last = transfers.end() - std::min(std::ssize(wholes), std::ssize(transfers));
  for (const int64_t whole : wholes) {
    const Transfer wanted{Collective::kAllGather, ranks, wire_bytes(Collective::kAllGather, whole, ranks)};
    if (last != transfers.end() && *last++ == wanted) continue;
    refuse(at,
           fmt::format(
               "this rank has one part in {}, but the action does not end with an all_gather/{} of {} bytes",
               ranks, ranks, wanted.bytes));
  }
}

/// The bytes of what is trained in `whole` bytes of a unit's parameters. What is not in four bits lies with
/// the shard, where there is one.
int64_t own_of_whole(const ProgramUnit& unit, int64_t whole, bool has_shard) {
  if (!unit.nf4) return whole / (unit.numel + unit.frozen) * unit.numel;
  const int64_t elements = unit.numel + (has_shard ? 0 : unit.nf4->rest);
  return elements > 0 ? (whole - nf4_bytes(unit.frozen)) / elements * unit.numel : 0;
}

/// Of a unit of which a rank keeps more than its shard, which says nothing of their number then.
int64_t ranks_of_gather(const Action& action) {
  return action.transfers.empty() ? 1 : action.transfers.back().ranks;
}

/// Parameters that are frozen for good are gathered behind the others, where they are not whole at all times.
void StepLaws::check_unshard(int64_t at, int64_t updated) const {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  const ProgramUnit& unit = this->unit(action.unit);
  const int64_t whole = bytes_at(at, Role::kParameters, action.unit);
  const int64_t slice = bytes_at(at, Role::kSlice, action.unit),
                shard = bytes_at(at, Role::kShard, action.unit);
  if (unit.frozen == 0) return check_gather(at, {whole}, slice > 0 ? whole / slice : unit.numel / updated);
  const int64_t own = own_of_whole(unit, whole, shard > 0);
  std::vector<int64_t> wholes;
  if (own > 0) wholes.push_back(own);
  if (shard > 0) wholes.push_back(whole - own);
  check_gather(at, wholes,
               updated > 0 ? unit.numel / updated
               : unit.nf4  ? ranks_of_gather(action)
                           : whole / shard);
}

void StepLaws::check_transfers(int64_t at) const {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  const bool message = action.kind == ActionKind::kSend || action.kind == ActionKind::kPost ||
                       action.kind == ActionKind::kRecv;
  if (message != action.is_message()) refuse(at, message ? "it has no peer" : "it has a peer");
  if (action.kind == ActionKind::kSend && action.transfers.empty()) refuse(at, "it sends nothing");
  for (const Transfer& transfer : action.transfers) {
    const bool empty = action.unit >= 0 && unit(action.unit).numel + unit(action.unit).frozen == 0;
    if (transfer.ranks < 2 || (transfer.bytes <= 0 && !empty))
      refuse(at, fmt::format("{} bytes travel between {} ranks", transfer.bytes, transfer.ranks));
  }
  if (action.unit == Action::kWholeModel) return;
  const int64_t numel = unit(action.unit).numel;
  const int64_t updated = bytes_at(at, Role::kMaster, action.unit) / kFp32Bytes;
  const bool all_frozen = numel == 0 && bytes_at(at, Role::kShard, action.unit) > 0;
  if (updated <= 0 && !all_frozen) return;  // which an update refuses
  if (action.kind == ActionKind::kUnshard) check_unshard(at, updated);
  if (action.kind == ActionKind::kGatherSum && !action.transfers.empty())
    check_gather(at, {kFp32Bytes * numel}, action.transfers.back().ranks);
}

/// In which forms `elements` gradients may travel in `transfer`: bytes of an element, or kInt8Form.
std::set<int64_t> forms_of(const Transfer& transfer, int64_t elements) {
  constexpr int64_t kInt8Form = 0;
  const auto sends = [&](int64_t bytes) {
    return wire_bytes(transfer.collective, bytes, transfer.ranks) == transfer.bytes;
  };
  std::set<int64_t> forms;
  for (const int64_t bytes : {1, 2, 4, 8}) {
    if (sends(bytes * elements)) forms.insert(bytes);
  }
  const int64_t shard = elements / transfer.ranks, blocks = (shard + kInt8ScaleBlock - 1) / kInt8ScaleBlock;
  if (sends(transfer.ranks * blocks * (kInt8ScaleBlock + kFp32Bytes))) forms.insert(kInt8Form);
  return forms;
}

/// Gradients of all units travel alike: through the same collectives, in the same bytes an element.
void StepLaws::check_reduction(int64_t at) {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  const std::vector<Transfer> transfers = action.transfers_along(Along::kData);
  const int64_t elements = unit(action.unit).numel;
  if (!first_reduction_) {
    first_reduction_ = at;
    if (!transfers.empty()) wire_forms_ = forms_of(transfers.front(), elements);
  }
  const Action& first = program_.actions[static_cast<size_t>(*first_reduction_)];
  const auto kind = [](const Transfer& transfer) { return std::pair{transfer.collective, transfer.ranks}; };
  const std::vector<Transfer> of_first = first.transfers_along(Along::kData);
  if (!std::ranges::equal(transfers, of_first, {}, kind, kind))
    refuse(at, fmt::format("its collectives are not those of action {}", *first_reduction_));
  if (transfers.empty()) return;
  const std::set<int64_t> forms = forms_of(transfers.front(), elements);
  std::erase_if(wire_forms_, [&](int64_t form) { return !forms.contains(form); });
  const int64_t of = unit(first.unit).numel;
  bool alike = !wire_forms_.empty();
  for (size_t i = 1; i < transfers.size(); ++i) {
    alike = alike && static_cast<__int128>(transfers[i].bytes) * of ==
                         static_cast<__int128>(of_first[i].bytes) * elements;
  }
  if (!alike) {
    refuse(at,
           fmt::format("it sends {} bytes of {} elements, which are not the bytes an element of action {}",
                       action.wire_bytes(), elements, *first_reduction_));
  }
}

/// Sums over the ranks of a stage are of sums over copies, of which nothing is left out.
void StepLaws::sum_tied(int64_t at) {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  if (action.unit != Action::kWholeModel || action.micro_batch != Action::kOnceAStep)
    refuse(at, "tied parameters are summed together, once a step");
  if (tied_sum_) refuse(at, "it occurs twice");
  if (std::ranges::none_of(program_.units, &ProgramUnit::tied)) refuse(at, "no unit is tied");
  for (const Transfer& transfer : action.transfers) {
    if (transfer.collective != Collective::kAllReduce || transfer.ranks != 2)
      refuse(at, "two ranks add up two copies, by an all_reduce/2 for each");
  }
  int64_t most = 0;
  for (int64_t each = 0; each < std::ssize(program_.units); ++each) {
    if (!unit(each).tied) continue;
    const int64_t sum = bytes_at(at, Role::kSum, each);
    most += sum > 0 ? sum : bytes_at(at, Role::kGradients, each);
  }
  if (const int64_t bytes = action.wire_bytes(); bytes > most) {
    refuse(at, fmt::format("it sends {} bytes, where the gradients of tied units have {}", bytes, most));
  }
  tied_sum_ = at;
}

void StepLaws::take(int64_t at) {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  if (unit(action.unit).tied && (action.kind == ActionKind::kReduce) != tied_sum_.has_value()) {
    refuse(at, tied_sum_ ? "gradients of tied parameters were summed before"
                         : "it is tied, and nothing has summed the gradients of its copies before");
  }
  const bool reduces = action.kind == ActionKind::kReduce;
  ++taken_[{action.unit, action.micro_batch}];
  if (!reduces) return void(added_up_.insert(action.unit));
  check_reduction(at);
  added_up_.erase(action.unit);
  reduced_.insert(action.unit);
}

void StepLaws::update(int64_t at) {
  updated_.insert(program_.actions[static_cast<size_t>(at)].unit);
  for (int64_t each = 0; each < std::ssize(program_.units); ++each) {
    if (!unit(each).trainable) continue;
    if (!reduced_.contains(each)) refuse(at, fmt::format("{} has not been reduced before", name_of(each)));
    if (added_up_.contains(each))
      refuse(at, fmt::format("gradients of {} were added up after its last reduction", name_of(each)));
  }
}

void StepLaws::walk(int64_t at) {
  const Action& action = program_.actions[static_cast<size_t>(at)];
  const auto passes = [this](const Place& place) {
    const auto forward = forwards_.find(place), back = backwards_.find(place);
    return (forward == forwards_.end() ? 0 : forward->second) + (back == backwards_.end() ? 0 : back->second);
  };
  const Place place{action.unit, action.micro_batch};
  switch (action.kind) {
    case ActionKind::kForward:
      ++forwards_[place];
      there_[action.micro_batch].push_back(action.unit);
      return;
    case ActionKind::kBackward:
      ++weights_[place];
      [[fallthrough]];
    case ActionKind::kBackwardInput:
      ++backwards_[place];
      back_.push_back(action.unit);
      return;
    case ActionKind::kBackwardWeight:
      ++weights_[place];
      return;
    case ActionKind::kAccumulate:
    case ActionKind::kReduce:
      return take(at);
    case ActionKind::kSumTied:
      return sum_tied(at);
    case ActionKind::kUpdate:
      return update(at);
    case ActionKind::kPost:
      if (!posted_.insert(posting_of(action)).second) refuse(at, "it is posted already");
      return;
    case ActionKind::kRecv:
      if (posted_.erase(posting_of(action)) == 0) refuse(at, "its buffer was not posted for it");
      if (backwards_.contains(place)) refuse(at, "the pass that needs it is over");
      [[fallthrough]];
    case ActionKind::kSend:
      ++messages_[{action.kind, action.unit, action.peer, action.wire_bytes(), passes(place)}]
                 [action.micro_batch];
      return;
    default:
      return;
  }
}

/// The stage whose passes use the unit.
int64_t StepLaws::stage_of(int64_t unit) const {
  const auto uses = [unit](const Action& action) { return action.computes() && action.unit == unit; };
  const auto found = std::ranges::find_if(program_.actions, uses);
  return found == program_.actions.end() ? -1 : found->stage;
}

/// Whether backward ends before it reaches the unit: nothing of it is trained, nor of those before it in its
/// stage.
bool StepLaws::needs_no_backward(int64_t unit) const {
  if (unit < 0 || this->unit(unit).frozen == 0) return false;
  const int64_t stage = stage_of(unit);
  for (int64_t before = 0; before <= unit; ++before)
    if (this->unit(before).trainable && stage_of(before) == stage) return false;
  return true;
}

/// Every micro-batch that goes forward through a unit comes back, and its gradients are taken once. Backward
/// may reach several uses of a unit at once.
void StepLaws::check_counts() const {
  const auto count = [](const std::map<Place, int64_t>& of, const Place& place) {
    const auto found = of.find(place);
    return found == of.end() ? 0 : found->second;
  };
  for (const auto& [place, forwards] : forwards_) {
    const auto& [unit, micro_batch] = place;
    const int64_t backwards = count(backwards_, place), weights = count(weights_, place);
    const int64_t uses = unit == Action::kWholeModel ? 1 : this->unit(unit).uses;
    const int64_t least = needs_no_backward(unit) ? 0 : 1;
    if (forwards != uses || backwards < least || backwards > uses || backwards != weights) {
      throw LogicError(
          "[plan.step_program] micro-batch {} goes forward through {} {} times of {}, comes back {} times, "
          "and "
          "adds {} times to its gradients",
          micro_batch, name_of(unit), forwards, uses, backwards, weights);
    }
    for (int64_t each = 0; each < std::ssize(program_.units); ++each) {
      const bool takes = (unit == each || unit == Action::kWholeModel) && this->unit(each).trainable;
      if (!takes || count(taken_, {each, micro_batch}) == 1) continue;
      throw LogicError(
          "[plan.step_program] the gradients of {} in micro-batch {} are neither added up nor reduced",
          name_of(each), micro_batch);
    }
  }
  for (int64_t each = 0; each < std::ssize(program_.units); ++each) {
    if (unit(each).trainable && !reduced_.contains(each))
      throw LogicError("[plan.step_program] the gradients of {} are never reduced", name_of(each));
    if (!updated_.contains(each)) throw LogicError("[plan.step_program] {} is never updated", name_of(each));
  }
}

/// `units` are those of a backward pass. Where units are used several times, only the module knows their
/// order.
void StepLaws::check_order(int64_t micro_batch, const std::vector<int64_t>& units) const {
  const auto there = there_.find(micro_batch);
  if (there == there_.end()) return;
  std::vector<int64_t> forward;
  for (const int64_t unit : there->second) {
    if (unit >= 0 && this->unit(unit).uses > 1) return;
    if (std::ranges::find(units, unit) != units.end()) forward.push_back(unit);
  }
  if (std::ranges::equal(forward, units | std::views::reverse)) return;
  throw LogicError(
      "[plan.step_program] micro-batch {} does not go back through units in the reverse of its forward order",
      micro_batch);
}

void StepLaws::check_messages() const {
  if (!posted_.empty()) {
    throw LogicError(
        "[plan.step_program] a buffer is posted for a message of rank {} in micro-batch {}, which "
        "is not received",
        std::get<0>(*posted_.begin()), std::get<3>(*posted_.begin()));
  }
  const bool has_memory = std::ranges::any_of(
      program_.buffers, [](const Buffer& buffer) { return buffer.role == Role::kBoundary; });
  bool receives = false;
  for (const auto& [key, counts] : messages_) {
    const auto& [kind, unit, peer, bytes, passes] = key;
    receives = receives || kind == ActionKind::kRecv;
    for (const auto& [place, forwards] : forwards_) {
      if (place.first != unit) continue;
      const auto found = counts.find(place.second);
      if (found != counts.end() && found->second == counts.begin()->second) continue;
      throw LogicError(
          "[plan.step_program] behind {} passes through it, {} has {} times {} of {} bytes with peer {} in "
          "micro-batch {}, but {} times in micro-batch {}",
          passes, name_of(unit), found == counts.end() ? 0 : found->second, kind, bytes, peer, place.second,
          counts.begin()->second, counts.begin()->first);
    }
    for (const auto& [micro_batch, times] : counts) {
      if (!forwards_.contains({unit, micro_batch}))
        throw LogicError("[plan.step_program] {} of {} in micro-batch {}, which does not go through it", kind,
                         name_of(unit), micro_batch);
    }
  }
  if (receives != has_memory) {
    throw LogicError("[plan.step_program] {}", receives
                                                   ? "messages are received, but have no memory"
                                                   : "there is memory for messages, but none is received");
  }
}

/// Whole buffers of a role have the same bytes an element in all units, but for matrices in FP8.
void StepLaws::check_buffers() const {
  std::map<Role, std::pair<int64_t, int64_t>> first;  ///< bytes and elements of a role's first buffer
  const auto alike = [&](const Buffer& buffer, int64_t elements) {
    if (elements == 0 && buffer.bytes == 0) return;  // a unit without parameters
    const auto [found, is_first] = first.emplace(buffer.role, std::pair{buffer.bytes, elements});
    const auto& [bytes, of] = found->second;
    const bool same = static_cast<__int128>(bytes) * elements == static_cast<__int128>(buffer.bytes) * of;
    if (same && buffer.bytes > 0) return;
    throw LogicError(
        "[plan.step_program] the {} of {} have {} bytes for {} elements, where those of another unit have {} "
        "for {}",
        buffer.role, name_of(buffer.unit), buffer.bytes, elements, bytes, of);
  };
  const auto exactly = [&](const Buffer& buffer, int64_t bytes) {
    if (buffer.bytes == bytes) return;
    throw LogicError("[plan.step_program] the {} of {} have {} bytes, but must have {}", buffer.role,
                     name_of(buffer.unit), buffer.bytes, bytes);
  };
  for (const Buffer& buffer : program_.buffers) {
    const ProgramUnit& unit = this->unit(buffer.unit);
    const int64_t updated = bytes_at(0, Role::kMaster, buffer.unit) / kFp32Bytes;
    switch (buffer.role) {
      case Role::kParameters:
        if (!unit.fp8 && !unit.nf4) alike(buffer, unit.numel + unit.frozen);
        break;
      case Role::kGradients:
        alike(buffer, unit.numel);
        break;
      case Role::kMoments:
        alike(buffer, updated);
        break;
      case Role::kShard:
        if (!unit.fp8 && !unit.nf4) alike(buffer, unit.numel + unit.frozen);
        break;
      case Role::kSum:
        exactly(buffer, kFp32Bytes * unit.numel);
        break;
      case Role::kActivations:
        if (buffer.bytes != unit.between_halves_bytes) exactly(buffer, unit.activation_bytes);
        break;
      default:
        break;
    }
  }
}

void StepLaws::run() {
  for (const Pass& pass : program_.passes) {
    check_turn(pass);
    for (int64_t at = pass.begin; at < pass.end; ++at) {
      check_place(at, pass);
      check_transfers(at);
      walk(at);
    }
    check_order(pass.micro_batch, std::exchange(back_, {}));
  }
  check_buffers();
  if (backwards_.empty() && updated_.empty()) return;  // it does not train
  check_counts();
  check_messages();
}

}  // namespace

void check_step_laws(const StepProgram& program) {
  StepLaws(program).run();
}

}  // namespace trireme::plan
