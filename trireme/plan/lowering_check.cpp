// The programs of all ranks run against each other, without computing.
#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/plan/lowering.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;
using Item = std::tuple<Message, int64_t, int64_t>;  // with stage and micro-batch of the pass that needs it

Item item_of(const Action& action) {
  return {action.message, action.stage, action.micro_batch};
}

struct RankState {
  size_t next = 0;
  std::set<std::tuple<Kind, int64_t, int64_t>> ran;
  std::set<Item> here;                           ///< taken, or made here for a stage of this rank
  std::set<Item> to_send;                        ///< made here for another rank
  std::map<int64_t, std::deque<Action>> posted;  ///< by peer
  std::map<std::tuple<int64_t, Message, int64_t>, int64_t> buffers;  ///< in use: micro-batch
};

class Check {
 public:
  Check(const Schedule& schedule, const std::vector<StageActions>& programs, Sends sends)
      : schedule_(schedule),
        last_use_(schedule),
        programs_(programs),
        sends_(sends),
        ranks_(programs.size()) {
    TRIREME_CHECK(programs.size() == schedule.ranks.size(),
                  "[plan.check_programs] there are {} programs for a schedule of {} ranks", programs.size(),
                  schedule.ranks.size());
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        while (ranks_[rank].next < programs_[rank].size() && advance(rank)) moved = true;
      }
    }
    check_end();
  }

 private:
  /// False: the action waits for another rank.
  bool advance(size_t rank) {
    const Action& action = programs_[rank][ranks_[rank].next];
    switch (action.kind) {
      case Kind::kSend:
        if (sends_ == Sends::kWhenPosted && !is_posted(rank, action)) return false;
        send(rank, action);
        break;
      case Kind::kPost:
        post(rank, action);
        break;
      case Kind::kRecv:
        if (!take(rank, action)) return false;
        break;
      default:
        pass(rank, action);
    }
    ++ranks_[rank].next;
    return true;
  }

  bool is_posted(size_t rank, const Action& send) {
    const auto& posted = ranks_[static_cast<size_t>(send.peer)].posted[static_cast<int64_t>(rank)];
    return std::ranges::any_of(posted, [&](const Action& post) { return item_of(post) == item_of(send); });
  }

  void send(size_t rank, const Action& action) {
    require(ranks_[rank].to_send.erase(item_of(action)) == 1, rank, action,
            "sends what has not been computed");
    const int64_t to = action.message == Message::kPart ? schedule_.stages - 1 : action.stage;
    require(action.peer == schedule_.rank_of(to, action.micro_batch), rank, action, "goes to the wrong rank");
    in_flight_[{static_cast<int64_t>(rank), action.peer}].push_back(action);
  }

  void post(size_t rank, const Action& action) {
    const auto [place, is_free] = ranks_[rank].buffers.emplace(
        std::tuple{action.stage, action.message, action.buffer}, action.micro_batch);
    require(is_free, rank, action, "uses a buffer that is in use");
    ranks_[rank].posted[action.peer].push_back(action);
  }

  bool take(size_t rank, const Action& action) {
    auto& posted = ranks_[rank].posted[action.peer];
    require(!posted.empty() && item_of(posted.front()) == item_of(action) &&
                posted.front().buffer == action.buffer,
            rank, action, "is not the oldest post");
    auto& line = in_flight_[{action.peer, static_cast<int64_t>(rank)}];
    if (line.empty()) return false;
    if (item_of(line.front()) != item_of(action))
      refuse(rank, action, fmt::format("is matched by '{}'", stage_text(line.front())));
    line.pop_front();
    posted.pop_front();
    ranks_[rank].here.insert(item_of(action));
    return true;
  }

  void pass(size_t rank, const Action& action) {
    RankState& state = ranks_[rank];
    const auto has = [&](Kind kind) { return state.ran.contains({kind, action.stage, action.micro_batch}); };
    if (action.kind == Kind::kBackwardWeight) {
      require(has(Kind::kBackwardInput), rank, action, "runs before the backward pass for the input");
    } else {
      const bool forward = action.kind == Kind::kForward;
      require(forward || has(Kind::kForward), rank, action, "runs before its forward pass");
      const StagePass pass{action.kind, action.stage, action.micro_batch};
      for (const StageEdge& need : needed_by(schedule_, pass))
        require(state.here.erase({need.message, need.stage, action.micro_batch}) == 1, rank, action,
                "has no input");
      // Of forward passes alone parts of the head leave what they make.
      if (last_use_.trains() || !schedule_.is_head_part(action.stage)) hand_on(rank, pass);
    }
    require(state.ran.insert({action.kind, action.stage, action.micro_batch}).second, rank, action,
            "occurs twice");
    for (const auto& [stage, message] : last_use_.of(action)) {
      std::erase_if(state.buffers, [&, stage = stage, message = message](const auto& buffer) {
        return std::get<0>(buffer.first) == stage && std::get<1>(buffer.first) == message &&
               buffer.second == action.micro_batch;
      });
    }
  }

  void hand_on(size_t rank, const StagePass& pass) {
    for (const StageEdge& made : made_by(schedule_, pass)) {
      const bool stays = schedule_.rank_of(made.to, pass.micro_batch) == static_cast<int64_t>(rank);
      (stays ? ranks_[rank].here : ranks_[rank].to_send)
          .insert(Item{made.message, made.stage, pass.micro_batch});
    }
  }

  void check_end() const {
    std::string waiting;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const size_t next = ranks_[rank].next;
      if (next == programs_[rank].size()) continue;
      waiting += fmt::format("{}rank {} at '{}'", waiting.empty() ? "" : ", ", rank,
                             stage_text(programs_[rank][next]));
    }
    if (!waiting.empty()) throw LogicError("[plan.check_programs] the programs deadlock: {}", waiting);
    for (size_t rank = 0; rank < ranks_.size(); ++rank) check_left(rank);
  }

  void check_left(size_t rank) const {
    const RankState& state = ranks_[rank];
    TRIREME_CHECK(state.ran.size() == schedule_.ranks[rank].size(),
                  "[plan.check_programs] rank {} runs {} passes, but the schedule has {}", rank,
                  state.ran.size(), schedule_.ranks[rank].size());
    TRIREME_CHECK(state.to_send.empty() && state.here.empty() && state.buffers.empty(),
                  "[plan.check_programs] rank {} ends with {} messages not sent, {} not used and {} buffers "
                  "still in use",
                  rank, state.to_send.size(), state.here.size(), state.buffers.size());
    for (const auto& [pair, line] : in_flight_) {
      TRIREME_CHECK(line.empty(), "[plan.check_programs] no rank receives '{}' of rank {}",
                    stage_text(line.front()), pair.first);
    }
  }

  static void refuse(size_t rank, const Action& action, const std::string& why) {
    throw LogicError("[plan.check_programs] rank {}: '{}' {}", rank, stage_text(action), why);
  }
  static void require(bool right, size_t rank, const Action& action, const char* why) {
    if (!right) refuse(rank, action, why);
  }

  const Schedule& schedule_;
  LastUse last_use_;
  const std::vector<StageActions>& programs_;
  Sends sends_;
  std::vector<RankState> ranks_;
  std::map<std::pair<int64_t, int64_t>, std::deque<Action>> in_flight_;  ///< by sender and receiver
};

}  // namespace

void check_programs(const Schedule& schedule, const std::vector<StageActions>& programs, Sends sends) {
  Check(schedule, programs, sends).run();
}

}  // namespace trireme::plan
