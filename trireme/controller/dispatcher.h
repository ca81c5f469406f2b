#pragma once
// The process in the middle of a controller. It numbers workers, forms their world, passes each frame of the
// client to all workers in one order, collects how far they are, and routes answers and failures. It knows
// neither operations nor tensors, and bulk bytes do not pass through it.
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/build_info.h"
#include "trireme/base/env.h"
#include "trireme/controller/address.h"
#include "trireme/controller/answer_times.h"
#include "trireme/controller/messages.h"
#include "trireme/launch/running_time.h"

namespace trireme::controller {

struct DispatcherSettings {
  Address address = {.path = {}, .port = kDefaultPort};
  int64_t workers = 1;
  double timeout_s = 300.0;  ///< for all workers to come
  /// Without a sign of life for so long, and for five times the 99th percentile of answers, a worker counts
  /// as stopped. On a machine that starves its workers they answer slowly, and get more time, at most 30 s.
  double silence_s = 2.0;
  bool owned = false;  ///< ends with its client, or with a worker
  int stop_fd = -1;    ///< as stop(), once it can be read
  size_t most_queued = kMostQueuedBytes;
  std::string version = kVersion, build = build_id();
  std::function<void(const std::string&)> say = {};  ///< a line for people: who comes and goes
};

class Dispatcher {
 public:
  /// Listens from here on. Throws ConfigError and EnvironmentError.
  Dispatcher(DispatcherSettings settings, const Environment& environment);
  ~Dispatcher();

  /// With the port that the kernel picked, where none was given.
  const Address& address() const { return listener_.address(); }

  /// Works until stop(), or until the client of an owned one has gone; then all workers have been told to
  /// end. Throws CommError that names workers that did not come in time; of an owned one also a worker that
  /// was lost.
  void run();
  /// Ends run(), from any thread.
  void stop();

 private:
  struct Peer;

  // The loop.
  void turn();
  double patience() const;
  void accept();
  void take(Peer& peer);
  void handle(Peer& peer, const Frame& frame);
  void tick();
  void sweep();

  // Who is there.
  void greet(Peer& peer, const Hello& hello);
  void greet_worker(Peer& peer, const Hello& hello);
  void greet_client(Peer& peer);
  std::string why_not(const Hello& hello) const;
  void form_world();
  void begin_session();
  void end_session();
  void reject(Peer& peer, const std::string& reason);
  void say_refusal(const Peer& peer, const std::string& reason);
  void drop(Peer& peer, const std::string& why);
  void leave(Peer& peer, double within_s);

  // What they say.
  void from_client(Peer& peer, const Frame& frame);
  void from_worker(Peer& peer, const Frame& frame);
  void pass_on(const Frame& frame);
  void take_instructions(const Frame& frame);
  void check_ahead(uint64_t more) const;
  void take_progress(Peer& peer, const Progress& progress);
  void tell_progress();
  Status status() const;

  // What goes wrong.
  void worker_failed(Peer& peer, Failed failed);
  void lose_world(const Failed& cause);
  void take_pong(Peer& peer, uint64_t number);
  double most_silence() const;
  void look_for_silence();
  void look_for_missing();
  void say_goodbye();

  template <typename Message>
  void post(Peer& peer, const Message& message);
  void post_frame(Peer& peer, const Frame& frame);
  void say(const std::string& line) const;
  double now() const { return now_; }

  DispatcherSettings settings_;
  Listener listener_;
  Descriptor stopping_;
  launch::RunningTime time_;
  double now_ = 0.0, started_ = 0.0, form_by_ = 0.0;
  std::list<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> workers_;  ///< by number; null: not there
  Peer* client_ = nullptr;
  bool formed_ = false, in_session_ = false, stop_ = false, ending_ = false;
  bool has_run_ = false;  ///< workers have been given an action of a run
  uint64_t session_ = 0, submitted_ = 0, told_ = 0, pings_ = 0;
  AnswerTimes answers_;  ///< of workers
  double told_at_ = 0.0;
  std::optional<Failed> suspect_;  ///< a worker that has lost a peer; the peer's own word may be on its way
  double judged_at_ = 0.0;
  double refused_since_ = 0.0;  ///< when the minute began in which strangers are counted
  int64_t refused_ = 0;         ///< of them
  std::optional<std::string> fatal_;
};

}  // namespace trireme::controller
