#pragma once
// The client's side of a controller: instructions go out in order, buffered and within credits; answers,
// progress and failures come in on a thread of their own. All functions may be called from any thread, and
// throw CommError, naming worker and cause, once the session has failed.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/build_info.h"
#include "trireme/base/env.h"
#include "trireme/controller/data_connection.h"
#include "trireme/controller/line.h"

namespace trireme::controller {

struct ClientSettings {
  Address address = {.path = {}, .port = kDefaultPort};
  double timeout_s = 300.0;  ///< of each wait: for the workers, for credits, for answers
  double silence_s = 10.0;   ///< of the dispatcher, which pings
  double patience_s = 3.0;   ///< for the workers, before a line says that they are waited for
  std::string version = kVersion, build = build_id();
};

class ClientSession {
 public:
  /// Connects, and waits until all workers are there. Throws CommError: no server, another client, another
  /// build, missing workers.
  ClientSession(ClientSettings settings, Environment environment);
  /// Sends what is buffered, and leaves.
  ~ClientSession();

  uint64_t session() const { return session_.session; }
  const std::vector<WorkerInfo>& workers() const { return session_.workers; }

  /// Names a set of workers; instructions that are submitted from now on may use it.
  void define_scope(uint32_t id, const std::string& name, const std::vector<uint32_t>& workers);
  /// Gives workers what they alone read, of at most kMostText bytes, before instructions that follow.
  void declare(std::string text);
  /// Takes `count` instructions; returns the number of the first. Waits when too many are under way.
  uint64_t submit(std::string_view bytes, uint32_t count);
  /// Sends what is buffered.
  void flush();
  /// Sends an action of a run, of at most kMostText bytes, before the instructions that follow.
  void act(uint64_t request, std::string_view text);

  /// Sends a recorded step, which takes the place of the one that had the number before.
  void define_step(uint32_t number, std::string_view bytes);
  /// A recorded step is made; returns its number as submit() does. What was submitted before goes first.
  uint64_t replay(uint32_t number, const std::vector<int64_t>& arguments);

  /// Instructions that every worker has executed.
  uint64_t executed();
  /// Waits until the instructions below number `end` are executed by all workers.
  void wait_executed(uint64_t end);
  /// Likewise, however long it takes: one instruction may be a long step, and workers that are lost or
  /// stopped end the session.
  void wait_executed_at_last(uint64_t end);

  /// An answer that a worker will send.
  class Request {
   public:
    /// To be named in the instruction that is answered.
    uint64_t id() const { return id_; }
    bool ready() const;
    /// Sends what is buffered, and waits for so long; returns ready(), which a failed session is, too.
    bool wait(double seconds);
    /// Sends what is buffered and waits.
    Answer get();

   private:
    friend class ClientSession;
    ClientSession* session_ = nullptr;
    uint64_t id_ = 0;
    std::future<Answer> answer_;
  };
  Request request();

  /// For bulk bytes, of one thread at a time.
  DataConnection data_connection(int64_t worker) const;

  /// Why the session is over; none while it is not.
  std::optional<std::string> failure();
  /// The exit code of the worker that has failed; none where nothing of that kind ended the session.
  std::optional<int64_t> failure_code();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void take(const Frame& frame);
  void fail(const std::string& why);
  void check() const;
  void send_buffer(Lock& lock);
  void begin_action(Lock& lock, size_t bytes);
  void take_progress(const Progress& progress);
  [[noreturn]] void take_failed(const Failed& failed);
  std::string how_far() const;

  ClientSettings settings_;
  Environment environment_;
  Session session_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string buffer_;
  uint32_t buffered_ = 0;  ///< instructions
  uint64_t sent_ = 0, executed_ = 0, next_request_ = 1;
  int64_t slowest_ = -1;
  size_t bytes_under_way_ = 0;
  std::deque<std::pair<uint64_t, size_t>> under_way_;  ///< end of what was sent in one frame, and its bytes
  std::map<uint64_t, std::promise<Answer>> requests_;
  std::optional<std::string> failure_;
  std::optional<int64_t> failure_code_;
  std::unique_ptr<Line> line_;
};

}  // namespace trireme::controller
