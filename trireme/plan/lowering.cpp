#include "trireme/plan/lowering.h"

#include <algorithm>
#include <deque>
#include <set>
#include <tuple>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/plan/simulate.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

Action action_of(Kind kind, const StageEdge& edge, int64_t micro_batch, int64_t peer) {
  return {
      .kind = kind, .micro_batch = micro_batch, .stage = edge.stage, .message = edge.message, .peer = peer};
}

/// Messages that a rank takes, by peer, in the order in which that sends them.
using Incoming = std::map<int64_t, std::deque<Action>>;

/// What a pass makes. Of forward passes alone parts of the head leave what they make.
std::vector<StageEdge> edges_of(const Schedule& schedule, const StagePass& pass, bool trains) {
  if (!trains && schedule.is_head_part(pass.stage)) return {};
  return made_by(schedule, pass);
}

/// Of all ranks.
std::vector<Incoming> messages_of(const Schedule& schedule) {
  const bool trains = LastUse(schedule).trains();
  std::vector<Incoming> incoming(schedule.ranks.size());
  for (size_t peer = 0; peer < schedule.ranks.size(); ++peer) {
    const auto from = static_cast<int64_t>(peer);
    for (const StagePass& pass : schedule.ranks[peer]) {
      for (const StageEdge& edge : edges_of(schedule, pass, trains)) {
        const int64_t to = schedule.rank_of(edge.to, pass.micro_batch);
        if (to == from) continue;
        incoming[static_cast<size_t>(to)][from].push_back(
            action_of(Kind::kRecv, edge, pass.micro_batch, from));
      }
    }
  }
  return incoming;
}

/// Passes, sends and takes in their order; buffers come later.
StageActions without_posts(const Schedule& schedule, int64_t rank, Incoming incoming) {
  const bool trains = LastUse(schedule).trains();
  StageActions program;
  std::set<std::tuple<Message, int64_t, int64_t>> taken;
  for (const StagePass& pass : schedule.ranks[static_cast<size_t>(rank)]) {
    for (const StageEdge& need : needed_by(schedule, pass)) {
      const int64_t peer = schedule.rank_of(need.from, pass.micro_batch);
      if (peer == rank) continue;
      std::deque<Action>& line = incoming[peer];
      // What was sent before it arrives before it.
      while (!taken.contains({need.message, need.stage, pass.micro_batch})) {
        const Action& take = line.front();
        taken.insert({take.message, take.stage, take.micro_batch});
        program.push_back(take);
        line.pop_front();
      }
    }
    program.push_back({.kind = pass.kind, .micro_batch = pass.micro_batch, .stage = pass.stage});
    for (const StageEdge& made : edges_of(schedule, pass, trains)) {
      const int64_t peer = schedule.rank_of(made.to, pass.micro_batch);
      if (peer != rank) program.push_back(action_of(Kind::kSend, made, pass.micro_batch, peer));
    }
  }
  return program;
}

/// Buffers that are in use at once at most, by pool, if each were posted when it is taken.
std::map<Pool, int64_t> needed_at_once(const Schedule& schedule, const StageActions& program) {
  const LastUse last_use(schedule);
  std::map<Pool, std::set<int64_t>> in_use;
  std::map<Pool, int64_t> most;
  for (const Action& action : program) {
    if (action.kind == Kind::kRecv) {
      const Pool pool{action.stage, action.message};
      in_use[pool].insert(action.micro_batch);
      most[pool] = std::max(most[pool], static_cast<int64_t>(in_use[pool].size()));
    } else {
      for (const auto& pool : last_use.of(action)) in_use[pool].erase(action.micro_batch);
    }
  }
  return most;
}

/// Posts each message as early as the order of its sender and the buffers of its pool allow.
class Poster {
 public:
  Poster(const Schedule& schedule, const StageActions& program, int64_t ahead) {
    std::map<Pool, int64_t> messages;
    for (const Action& action : program) {
      if (action.kind != Kind::kRecv) continue;
      waiting_[action.peer].push_back(action);
      ++messages[{action.stage, action.message}];
    }
    for (const auto& [pool, count] : needed_at_once(schedule, program)) {
      for (int64_t i = 0; i < std::min(count + ahead, messages[pool]); ++i) free_[pool].insert(i);
    }
  }

  void post_what_fits(StageActions& program) {
    for (auto& [peer, line] : waiting_) {
      while (!line.empty()) {
        Action post = line.front();
        std::set<int64_t>& free = free_[{post.stage, post.message}];
        if (free.empty()) break;
        post.kind = Kind::kPost;
        post.buffer = *free.begin();
        free.erase(free.begin());
        used_[{post.stage, post.message, post.micro_batch}] = post.buffer;
        program.push_back(post);
        line.pop_front();
      }
    }
  }
  int64_t buffer_of(const Action& take) const {
    return used_.at({take.stage, take.message, take.micro_batch});
  }
  /// Those of a micro-batch; returns whether there were any.
  bool give_back(const std::vector<Pool>& pools, int64_t micro_batch) {
    bool any = false;
    for (const Pool& pool : pools) {
      const auto used = used_.find({pool.first, pool.second, micro_batch});
      if (used == used_.end()) continue;
      free_[pool].insert(used->second);
      used_.erase(used);
      any = true;
    }
    return any;
  }

 private:
  std::map<int64_t, std::deque<Action>> waiting_;  ///< by peer
  std::map<Pool, std::set<int64_t>> free_;
  std::map<std::tuple<int64_t, Message, int64_t>, int64_t> used_;
};

StageActions with_posts(const Schedule& schedule, int64_t rank, int64_t ahead, Incoming incoming) {
  const StageActions bare = without_posts(schedule, rank, std::move(incoming));
  const LastUse last_use(schedule);
  Poster poster(schedule, bare, ahead);
  StageActions program;
  poster.post_what_fits(program);
  bool gave_back = false;
  for (Action action : bare) {
    // Sends come first: others wait for them.
    if (gave_back && action.kind != Kind::kSend) {
      poster.post_what_fits(program);
      gave_back = false;
    }
    if (action.kind == Kind::kRecv) action.buffer = poster.buffer_of(action);
    program.push_back(action);
    if (action.peer < 0 && poster.give_back(last_use.of(action), action.micro_batch)) gave_back = true;
  }
  return program;
}

/// `rank`'s alone.
StageActions with_posts(const Schedule& schedule, int64_t rank, int64_t ahead) {
  TRIREME_CHECK(
      rank >= 0 && rank < static_cast<int64_t>(schedule.ranks.size()) && ahead >= 0,
      "[plan.lower] there is no program for rank {} of a schedule for {} ranks with {} buffers ahead", rank,
      schedule.ranks.size(), ahead);
  return with_posts(schedule, rank, ahead, std::move(messages_of(schedule)[static_cast<size_t>(rank)]));
}

}  // namespace

std::vector<StageEdge> made_by(const Schedule& schedule, const StagePass& pass) {
  const int64_t stage = pass.stage, last = schedule.stages - 1;
  const bool forward = pass.kind == Kind::kForward;
  if (pass.kind == Kind::kBackwardWeight) return {};
  if (schedule.is_head_part(stage)) {
    if (forward) return {{Message::kPart, stage, stage, last}};
    return {};
  }
  std::vector<StageEdge> edges;
  // The stage before waits, and nobody for the gradients of the head's weight.
  if (!forward && stage > 0) edges.push_back({Message::kGradient, stage - 1, stage, stage - 1});
  if (stage == last) {
    for (int64_t part = schedule.stages; part < schedule.all_stages(); ++part)
      edges.push_back({forward ? Message::kHidden : Message::kTotals, part, last, part});
  } else if (forward) {
    edges.push_back({Message::kActivation, stage + 1, stage, stage + 1});
  }
  return edges;
}

std::vector<StageEdge> needed_by(const Schedule& schedule, const StagePass& pass) {
  const int64_t stage = pass.stage, last = schedule.stages - 1;
  const bool forward = pass.kind == Kind::kForward;
  if (pass.kind == Kind::kBackwardWeight) return {};
  if (schedule.is_head_part(stage))
    return {{forward ? Message::kHidden : Message::kTotals, stage, last, stage}};
  if (forward && stage == 0) return {};
  if (forward) return {{Message::kActivation, stage, stage - 1, stage}};
  if (stage < last) return {{Message::kGradient, stage, stage + 1, stage}};
  std::vector<StageEdge> parts;
  for (int64_t part = schedule.stages; part < schedule.all_stages(); ++part)
    parts.push_back({Message::kPart, part, part, last});
  return parts;
}

LastUse::LastUse(const Schedule& schedule) : schedule_(schedule) {
  trains_ = std::ranges::any_of(schedule.ranks, [](const std::vector<StagePass>& passes) {
    return std::ranges::any_of(passes, [](const StagePass& pass) { return pass.kind != Kind::kForward; });
  });
}

std::vector<Pool> LastUse::of(const Action& pass) const {
  std::vector<Pool> pools;
  const bool ends = trains_ ? pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardWeight
                            : pass.kind == Kind::kForward;
  for (size_t i = 0; ends && i < kNames<Message>.size(); ++i) {
    if (const auto message = static_cast<Message>(i); message != Message::kPart)
      pools.emplace_back(pass.stage, message);
  }
  const bool is_input = pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardInput;
  for (int64_t part = schedule_.stages;
       is_input && pass.stage + 1 == schedule_.stages && part < schedule_.all_stages(); ++part)
    pools.emplace_back(part, Message::kPart);
  return pools;
}

StageActions lower(const Schedule& schedule, int64_t rank, int64_t ahead) {
  simulate(schedule);
  return with_posts(schedule, rank, ahead);
}

std::vector<StageActions> lower_all(const Schedule& schedule, int64_t ahead) {
  simulate(schedule);
  std::vector<Incoming> incoming = messages_of(schedule);
  std::vector<StageActions> programs;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank)
    programs.push_back(with_posts(schedule, static_cast<int64_t>(rank), ahead, std::move(incoming[rank])));
  return programs;
}

StageActions lower_forward(const Schedule& forwards, int64_t rank, int64_t ahead) {
  return with_posts(forwards, rank, ahead);
}

std::map<Pool, int64_t> receive_buffers(const StageActions& program) {
  std::map<Pool, int64_t> counts;
  for (const Action& action : program) {
    if (action.kind != Kind::kPost) continue;
    int64_t& count = counts[{action.stage, action.message}];
    count = std::max(count, action.buffer + 1);
  }
  return counts;
}

}  // namespace trireme::plan
