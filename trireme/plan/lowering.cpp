#include "trireme/plan/lowering.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <set>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/plan/simulate.h"

namespace trireme::plan {
namespace {

using Kind = StageAction::Kind;

Kind kind_of(const StagePass& pass) {
  switch (pass.kind) {
    case StagePass::Kind::kForward:
      return Kind::kForward;
    case StagePass::Kind::kBackward:
      return Kind::kBackward;
    case StagePass::Kind::kBackwardInput:
      return Kind::kBackwardInput;
    case StagePass::Kind::kBackwardWeight:
      return Kind::kBackwardWeight;
  }
  throw LogicError("[plan.lower] pass of unknown kind {}", static_cast<int>(pass.kind));
}

/// What a pass makes for, or needs from, a stage on another rank.
struct Edge {
  Message message;
  int64_t stage, micro_batch;  ///< of the pass that needs it
  int64_t peer;
};

bool is_input_gradient(const StagePass& pass) {
  return pass.kind == StagePass::Kind::kBackward || pass.kind == StagePass::Kind::kBackwardInput;
}

std::optional<Edge> made_by(const Schedule& schedule, const StagePass& pass) {
  const bool forward = pass.kind == StagePass::Kind::kForward;
  const int64_t to = forward ? pass.stage + 1 : pass.stage - 1;
  if (!(forward || is_input_gradient(pass)) || to < 0 || to == schedule.stages) return std::nullopt;
  const int64_t here = schedule.rank_of(pass.stage, pass.micro_batch),
                there = schedule.rank_of(to, pass.micro_batch);
  if (here == there) return std::nullopt;
  return Edge{forward ? Message::kActivation : Message::kGradient, to, pass.micro_batch, there};
}

std::optional<Edge> needed_by(const Schedule& schedule, const StagePass& pass) {
  const bool forward = pass.kind == StagePass::Kind::kForward;
  const int64_t from = forward ? pass.stage - 1 : pass.stage + 1;
  if (!(forward || is_input_gradient(pass)) || from < 0 || from == schedule.stages) return std::nullopt;
  const int64_t here = schedule.rank_of(pass.stage, pass.micro_batch),
                there = schedule.rank_of(from, pass.micro_batch);
  if (here == there) return std::nullopt;
  return Edge{forward ? Message::kActivation : Message::kGradient, pass.stage, pass.micro_batch, there};
}

StageAction action_of(Kind kind, const Edge& edge) {
  return {kind, edge.stage, edge.micro_batch, edge.message, edge.peer};
}

/// Passes, sends and takes in their order; buffers come later.
StageProgram without_posts(const Schedule& schedule, int64_t rank) {
  std::map<int64_t, std::deque<StageAction>> incoming;  // by peer, in the order in which it sends
  for (size_t peer = 0; peer < schedule.ranks.size(); ++peer) {
    for (const StagePass& pass : schedule.ranks[peer]) {
      const auto edge = made_by(schedule, pass);
      if (!edge || edge->peer != rank) continue;
      const auto from = static_cast<int64_t>(peer);
      incoming[from].push_back(action_of(Kind::kTake, {edge->message, edge->stage, edge->micro_batch, from}));
    }
  }
  StageProgram program;
  std::set<std::tuple<Message, int64_t, int64_t>> taken;
  for (const StagePass& pass : schedule.ranks[static_cast<size_t>(rank)]) {
    if (const auto need = needed_by(schedule, pass)) {
      std::deque<StageAction>& line = incoming[need->peer];
      // What was sent before it arrives before it.
      while (!taken.contains({need->message, need->stage, need->micro_batch})) {
        const StageAction& take = line.front();
        taken.insert({take.message, take.stage, take.micro_batch});
        program.push_back(take);
        line.pop_front();
      }
    }
    program.push_back({kind_of(pass), pass.stage, pass.micro_batch});
    if (const auto made = made_by(schedule, pass)) program.push_back(action_of(Kind::kSend, *made));
  }
  return program;
}

using Pool = std::pair<int64_t, Message>;  // buffers of a stage for one kind of message

constexpr std::array kMessages = {Message::kActivation, Message::kGradient};

/// Whether it is the last pass of a stage and micro-batch: of a program without backward passes the forward
/// pass.
class LastPass {
 public:
  explicit LastPass(const StageProgram& program)
      : forward_(std::ranges::none_of(program, [](const StageAction& action) {
          return action.kind == Kind::kBackward || action.kind == Kind::kBackwardInput;
        })) {}
  bool operator()(const StageAction& action) const {
    if (forward_) return action.kind == Kind::kForward;
    return action.kind == Kind::kBackward || action.kind == Kind::kBackwardWeight;
  }

 private:
  bool forward_;
};

/// Buffers that are in use at once at most, by pool, if each were posted when it is taken.
std::map<Pool, int64_t> needed_at_once(const StageProgram& program) {
  const LastPass ends_micro_batch(program);
  std::map<Pool, std::set<int64_t>> in_use;
  std::map<Pool, int64_t> most;
  for (const StageAction& action : program) {
    if (action.kind == Kind::kTake) {
      const Pool pool{action.stage, action.message};
      in_use[pool].insert(action.micro_batch);
      most[pool] = std::max(most[pool], static_cast<int64_t>(in_use[pool].size()));
    } else if (ends_micro_batch(action)) {
      for (const Message message : kMessages) in_use[{action.stage, message}].erase(action.micro_batch);
    }
  }
  return most;
}

/// Posts each message as early as the order of its sender and the buffers of its pool allow.
class Poster {
 public:
  Poster(const StageProgram& program, int64_t ahead) {
    std::map<Pool, int64_t> messages;
    for (const StageAction& action : program) {
      if (action.kind != Kind::kTake) continue;
      waiting_[action.peer].push_back(action);
      ++messages[{action.stage, action.message}];
    }
    for (const auto& [pool, count] : needed_at_once(program)) {
      for (int64_t i = 0; i < std::min(count + ahead, messages[pool]); ++i) free_[pool].insert(i);
    }
  }

  void post_what_fits(StageProgram& program) {
    for (auto& [peer, line] : waiting_) {
      while (!line.empty()) {
        StageAction post = line.front();
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
  int64_t buffer_of(const StageAction& take) const {
    return used_.at({take.stage, take.message, take.micro_batch});
  }
  /// After the last pass of a micro-batch; returns whether a buffer came back.
  bool give_back(const StageAction& pass) {
    bool any = false;
    for (const Message message : kMessages) {
      const auto used = used_.find({pass.stage, message, pass.micro_batch});
      if (used == used_.end()) continue;
      free_[{pass.stage, message}].insert(used->second);
      used_.erase(used);
      any = true;
    }
    return any;
  }

 private:
  std::map<int64_t, std::deque<StageAction>> waiting_;  ///< by peer
  std::map<Pool, std::set<int64_t>> free_;
  std::map<std::tuple<int64_t, Message, int64_t>, int64_t> used_;
};

StageProgram with_posts(const Schedule& schedule, int64_t rank, int64_t ahead) {
  TRIREME_CHECK(rank >= 0 && rank < static_cast<int64_t>(schedule.ranks.size()) && ahead >= 0,
                "[plan.lower] rank {} of a schedule for {} ranks, {} buffers ahead", rank,
                schedule.ranks.size(), ahead);
  const StageProgram bare = without_posts(schedule, rank);
  const LastPass ends_micro_batch(bare);
  Poster poster(bare, ahead);
  StageProgram program;
  poster.post_what_fits(program);
  bool gave_back = false;
  for (StageAction action : bare) {
    // Sends come first: others wait for them.
    if (gave_back && action.kind != Kind::kSend) {
      poster.post_what_fits(program);
      gave_back = false;
    }
    if (action.kind == Kind::kTake) action.buffer = poster.buffer_of(action);
    program.push_back(action);
    if (ends_micro_batch(action)) gave_back = poster.give_back(action);
  }
  return program;
}

}  // namespace

StageProgram lower(const Schedule& schedule, int64_t rank, int64_t ahead) {
  simulate(schedule);
  return with_posts(schedule, rank, ahead);
}

StageProgram lower_forward(const Schedule& forwards, int64_t rank, int64_t ahead) {
  return with_posts(forwards, rank, ahead);
}

std::map<std::pair<int64_t, Message>, int64_t> receive_buffers(const StageProgram& program) {
  std::map<Pool, int64_t> counts;
  for (const StageAction& action : program) {
    if (action.kind != Kind::kPost) continue;
    int64_t& count = counts[{action.stage, action.message}];
    count = std::max(count, action.buffer + 1);
  }
  return counts;
}

}  // namespace trireme::plan
