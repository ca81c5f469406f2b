#pragma once
// The worker's side of a controller, without tensors: it joins, learns its number and where the ranks meet,
// gets work in the client's order, and says how far it is. A thread of its own receives and answers pings, so
// a worker that computes for long is not taken for a stopped one.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "trireme/base/build_info.h"
#include "trireme/base/env.h"
#include "trireme/controller/data_listener.h"
#include "trireme/controller/line.h"
#include "trireme/launch/listen.h"
#include "trireme/plan/world.h"

namespace trireme::controller {

struct WorkerSettings {
  Address address = {.path = {}, .port = kDefaultPort};
  int64_t wanted_number = -1;   ///< -1: any
  std::string devices = "cpu";  ///< for people
  int64_t cores = 0;
  double timeout_s = 300.0;         ///< for all other workers to come
  double silence_s = 10.0;          ///< of the dispatcher, which pings
  uint64_t most_bulk = 8ULL << 30;  ///< bytes put by the client and not taken yet
  std::string version = kVersion, build = build_id();
  /// Called once, by the receiving thread, when a peer or the dispatcher is lost: work under way that waits
  /// for peers should be given up.
  std::function<void(const std::string&)> lost = {};
};

/// An item that next() gives, in the client's order; Bye: end in order.
using WorkItem =
    std::variant<SessionBegin, SessionEnd, Scope, Declaration, RunAction, Instructions, Step, Replay, Bye>;

class WorkerLink {
 public:
  /// Joins, and waits until all workers are there. Throws CommError: no server, another build, no place,
  /// missing workers.
  WorkerLink(WorkerSettings settings, const Environment& environment);
  ~WorkerLink();

  int64_t number() const { return world_.rank; }
  /// The world of all workers, whose rank 0 listens already. The descriptor is this link's.
  const plan::WorldSpec& world() const { return world_; }

  /// The next item; none: `timeout_s` has passed. Throws CommError once a peer or the dispatcher is lost.
  std::optional<WorkItem> next(double timeout_s);

  /// The instructions below number `executed` of this session are done. Sent at most every millisecond or
  /// 1,000 instructions, and before next() waits; `at_once`: now.
  void progress(uint64_t executed, bool at_once = false);
  /// Answers a request of this session's client with at most kMostAnswer bytes.
  void answer(uint64_t request, std::string_view bytes);
  /// Says why this worker ends, with its exit code.
  void failed(int64_t code, const std::string& text);

  /// Waits for the bytes that the client puts under `id`. Throws CommError at the deadline.
  std::string take_bulk(uint64_t id, double timeout_s);
  /// The client may take these bytes, once.
  void offer_bulk(uint64_t id, std::string bytes);

 private:
  std::string listen(const Connection& connection, const Environment& environment);
  void take(const Frame& frame);
  void queue(WorkItem item, size_t bytes);
  void fail(const std::string& why);
  void begin_or_end(const WorkItem& item);
  void tell_progress();

  WorkerSettings settings_;
  launch::ListenSocket meeting_;
  std::unique_ptr<DataListener> data_;
  plan::WorldSpec world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<WorkItem, size_t>> items_;
  size_t queued_bytes_ = 0;
  std::optional<std::string> failure_;
  uint64_t session_ = 0;  ///< of the item that next() gave last; of the working thread, as what follows
  uint64_t executed_ = 0, told_ = 0;
  double told_at_ = 0.0;
  std::unique_ptr<Line> line_;
};

}  // namespace trireme::controller
