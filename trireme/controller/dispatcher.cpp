#include "trireme/controller/dispatcher.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/hex.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/controller/data_address.h"
#include "trireme/controller/hmac.h"
#include "trireme/launch/poll_set.h"

namespace trireme::controller {
namespace {

constexpr double kHandshake_s = 10.0;
constexpr double kSettle_s =
    0.5;  ///< after a worker has lost a peer: the peer's end may be seen a little later
constexpr double kLeave_s = 2.0;  ///< for a peer to read its last message and close
constexpr double kWorkersEnd_s = 5.0;
constexpr double kRunEnd_s = 120.0;  ///< for workers that save a run before they end
constexpr double kLookEvery_s = 0.1;
constexpr double kMostSilence_s = 30.0, kSlowAnswers = 5.0;
constexpr double kTellEvery_s = 1e-3;
constexpr uint64_t kTellAfter = 1000;  ///< instructions
constexpr uint64_t kFewLeft = 8;       ///< instructions, whose end the client may wait for
constexpr size_t kMostPeers = 1024, kMostStrangers = 64;
constexpr double kCountRefusals_s = 60.0;
constexpr int64_t kMostRefusals = 20;  ///< of strangers in that time that are said
constexpr int64_t kLostPeer = static_cast<int64_t>(ExitCode::kCommunication);

}  // namespace

/// A connected process, known or not yet.
struct Dispatcher::Peer {
  Connection connection;
  Gate gate;
  double came = 0.0, heard = 0.0, pinged = 0.0;
  std::deque<std::pair<uint64_t, double>> asked =
      {};  ///< pings that a worker has not answered, and when they left
  std::optional<Hello> hello = {};
  int64_t number = -1;    ///< of a worker
  uint64_t executed = 0;  ///< of this session
  bool failed = false;    ///< has said why it ends
  bool gone = false;      ///< is taken out at the end of the turn
  std::optional<double> leaves_by = {};

  bool is(Role role) const { return hello && hello->role == role && !leaves_by && !gone; }
  /// "worker 3 (pid 77 on node1)".
  std::string name() const {
    if (!hello) return "a process that has not said who it is";
    const std::string who = number >= 0 ? fmt::format("worker {}", number) : role_name(hello->role);
    return fmt::format("{} (pid {} on {})", who, hello->pid, hello->host);
  }
};

Dispatcher::Dispatcher(DispatcherSettings settings, const Environment& environment)
    : settings_(std::move(settings)),
      listener_(settings_.address, environment),
      stopping_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (settings_.workers < 1 || settings_.workers > static_cast<int64_t>(kMostWorkers)) {
    throw ConfigError("[controller.serve] {} workers; a server has 1 to {}", settings_.workers, kMostWorkers);
  }
  if (!stopping_)
    throw EnvironmentError("[controller.serve] cannot create an eventfd: {}", errno_text(errno));
  workers_.resize(static_cast<size_t>(settings_.workers), nullptr);
}

Dispatcher::~Dispatcher() = default;

void Dispatcher::stop() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stopping_.get(), &one, sizeof one);
}

void Dispatcher::say(const std::string& line) const {
  if (settings_.say) settings_.say(line);
}

void Dispatcher::run() {
  now_ = started_ = time_.seconds();
  form_by_ = now_ + settings_.timeout_s;
  while (!stop_ && !fatal_) turn();
  say_goodbye();
  if (fatal_) throw CommError("{}", *fatal_);
}

void Dispatcher::turn() {
  launch::PollSet poll;
  if (!ending_) {
    poll.watch(stopping_.get(), POLLIN, [this] { stop_ = true; });
    poll.watch(settings_.stop_fd, POLLIN, [this] { stop_ = true; });
    poll.watch(listener_.fd(), POLLIN, [this] { accept(); });
  }
  for (const auto& peer : peers_) {
    if (peer->gone) continue;
    poll.watch(peer->connection.fd(), peer->connection.events(), [this, one = peer.get()] { take(*one); });
  }
  const double limit = patience();
  time_.wait_for(limit);
  poll.wait(limit);
  now_ = time_.seconds();
  tick();
  sweep();
}

double Dispatcher::patience() const {
  const auto is_ahead = [this](const Peer* worker) { return worker != nullptr && worker->executed > told_; };
  const bool has_news = in_session_ && std::ranges::all_of(workers_, is_ahead);
  return has_news ? kTellEvery_s : kLookEvery_s;
}

void Dispatcher::accept() {
  std::optional<Connection> connection = listener_.accept("a new connection");
  if (!connection || peers_.size() >= kMostPeers) return;
  const auto is_stranger = [](const auto& peer) { return !peer->hello && !peer->gone; };
  if (std::ranges::count_if(peers_, is_stranger) >= static_cast<int64_t>(kMostStrangers))
    drop(**std::ranges::find_if(peers_, is_stranger), "too many connections wait");
  peers_.push_back(std::make_unique<Peer>(Peer{.connection = std::move(*connection),
                                               .gate = Gate(listener_.token()),
                                               .came = now_,
                                               .heard = now_,
                                               .pinged = now_}));
  Peer& peer = *peers_.back();
  peer.connection.set_most_queued(settings_.most_queued);
  if (!peer.gate.open()) peer.connection.set_most_body(kMostBytesOfStrangers);
  try {
    peer.gate.greet(peer.connection);
  } catch (const CommError& error) {
    drop(peer, error.what());
  }
}

void Dispatcher::take(Peer& peer) {
  if (peer.gone) return;
  peer.connection.pump();
  try {
    const bool open = peer.connection.read_some();
    peer.heard = now_;
    while (!peer.gone) {
      const auto frame = peer.connection.next();
      if (!frame) break;
      if (!peer.leaves_by) handle(peer, *frame);
    }
    if (!open) drop(peer, "its connection closed");
  } catch (const Error& error) {
    const bool is_worker = peer.is(Role::kWorker);
    if (!peer.leaves_by && !is_worker) return reject(peer, error.what());
    drop(peer, error.what());
  }
}

void Dispatcher::handle(Peer& peer, const Frame& frame) {
  if (!peer.gate.open()) {
    peer.gate.take(peer.connection, frame);
    return peer.connection.set_most_body(kMostBodyBytes);
  }
  if (!peer.hello) return greet(peer, message_of<Hello>(frame));
  if (is<Pong>(frame)) return take_pong(peer, message_of<Pong>(frame).number);
  if (is<StatusRequest>(frame)) return post(peer, status());
  if (is<Bye>(frame)) {
    peer.failed = peer.failed || peer.hello->role != Role::kWorker;
    return drop(peer, "it left: " + message_of<Bye>(frame).reason);
  }
  if (peer.hello->role == Role::kClient) return from_client(peer, frame);
  if (peer.hello->role == Role::kWorker) return from_worker(peer, frame);
  throw CommError("[controller.serve] {} from an observer, which may only ask for the status",
                  message_name(frame.type));
}

template <typename Message>
void Dispatcher::post(Peer& peer, const Message& message) {
  post_frame(peer, {.type = static_cast<uint16_t>(Message::kType), .body = body_of(message)});
}

void Dispatcher::post_frame(Peer& peer, const Frame& frame) {
  if (peer.gone) return;
  try {
    peer.connection.send(frame.type, frame.body);
  } catch (const CommError& error) {
    drop(peer, error.what());
  }
}

void Dispatcher::greet(Peer& peer, const Hello& hello) {
  peer.connection.set_peer(fmt::format("the {} with pid {}", role_name(hello.role), hello.pid));
  const std::string refusal = why_not(hello);
  if (!refusal.empty()) return reject(peer, refusal);
  peer.hello = hello;
  if (hello.role == Role::kWorker) return greet_worker(peer, hello);
  if (hello.role == Role::kClient) return greet_client(peer);
  post(peer, Welcome{.session = session_, .number = -1, .count = settings_.workers});
}

/// Empty, or why it may not come in. An observer may be of another build, so that it can show what is there.
std::string Dispatcher::why_not(const Hello& hello) const {
  if (hello.role == Role::kObserver) return "";
  if (hello.version != settings_.version || hello.build != settings_.build) {
    return fmt::format(
        "[controller.serve] the {} is Trireme {} (build {}), this server {} (build {}); start both from "
        "one build",
        role_name(hello.role), hello.version, hello.build, settings_.version, settings_.build);
  }
  if (hello.role == Role::kClient) {
    return client_ == nullptr ? ""
                              : fmt::format(
                                    "[controller.serve] {} is connected already, one at a time may be; wait "
                                    "until it has gone, or start another server",
                                    client_->name());
  }
  if (std::ranges::find(workers_, nullptr) == workers_.end()) {
    return fmt::format("[controller.serve] all {} workers are there; start the server with a larger -n",
                       workers_.size());
  }
  if (hello.wanted_number >= settings_.workers) {
    return fmt::format("[controller.serve] there is no worker {}: the server was started with -n {}",
                       hello.wanted_number, settings_.workers);
  }
  if (hello.wanted_number < 0 || workers_[static_cast<size_t>(hello.wanted_number)] == nullptr) return "";
  return fmt::format("[controller.serve] {} is there already; give this one another number, or none",
                     workers_[static_cast<size_t>(hello.wanted_number)]->name());
}

void Dispatcher::greet_worker(Peer& peer, const Hello& hello) {
  const auto free = std::ranges::find(workers_, nullptr) - workers_.begin();
  peer.number = hello.wanted_number >= 0 ? hello.wanted_number : static_cast<int64_t>(free);
  workers_[static_cast<size_t>(peer.number)] = &peer;
  peer.connection.set_peer(peer.name());
  const auto here = static_cast<int64_t>(workers_.size()) - std::ranges::count(workers_, nullptr);
  say(fmt::format("{} is there, on {}: {} of {}", peer.name(), hello.devices, here, workers_.size()));
  post(peer, Welcome{.session = 0, .number = peer.number, .count = settings_.workers});
  if (std::ranges::find(workers_, nullptr) == workers_.end()) form_world();
}

void Dispatcher::greet_client(Peer& peer) {
  client_ = &peer;
  say(fmt::format("{} is connected", peer.name()));
  post(peer, Welcome{.session = session_ + 1, .number = -1, .count = settings_.workers});
  if (formed_ && client_ != nullptr) begin_session();
}

void Dispatcher::form_world() {
  const Hello first = *workers_.front()->hello;
  const std::string key = random_bytes(8), job = to_hex(key.data(), key.size());
  formed_ = true;
  for (Peer* const worker : std::vector<Peer*>(workers_)) {
    if (!formed_) return;  // one of them could not be told
    post(*worker, World{.size = settings_.workers,
                        .rank = worker->number,
                        .address = first.rendezvous_address,
                        .port = first.rendezvous_port,
                        .job_key = job});
  }
  if (formed_ && client_ != nullptr) begin_session();
}

void Dispatcher::begin_session() {
  ++session_;
  submitted_ = told_ = 0;
  in_session_ = true;
  Session session{.session = session_, .workers = {}};
  for (Peer* const worker : workers_) {
    const Hello& hello = *worker->hello;
    worker->executed = 0;
    session.workers.push_back({.number = worker->number,
                               .pid = hello.pid,
                               .host = hello.host,
                               .data_address = hello.data_address,
                               .devices = hello.devices});
  }
  const SessionBegin begin{.session = session_};
  pass_on({.type = static_cast<uint16_t>(SessionBegin::kType), .body = body_of(begin)});
  if (client_ != nullptr) post(*client_, session);
}

void Dispatcher::end_session() {
  if (!std::exchange(in_session_, false)) return;
  const SessionEnd end{.session = session_};
  pass_on({.type = static_cast<uint16_t>(SessionEnd::kType), .body = body_of(end)});
}

void Dispatcher::reject(Peer& peer, const std::string& reason) {
  post(peer, Reject{.reason = as_reason(reason)});
  leave(peer, kLeave_s);
  if (&peer == client_) {
    client_ = nullptr;
    end_session();
    stop_ = stop_ || settings_.owned;
  }
  say_refusal(peer, reason);
}

/// Strangers may come all day long; what is said of them must not fill a disk.
void Dispatcher::say_refusal(const Peer& peer, const std::string& reason) {
  if (peer.hello) return say(fmt::format("refused {}: {}", peer.name(), reason));
  if (now_ - refused_since_ > kCountRefusals_s) {
    refused_since_ = now_;
    refused_ = 0;
  }
  if (++refused_ > kMostRefusals) return;
  say(fmt::format("refused {}: {}", peer.connection.peer(), reason));
  if (refused_ == kMostRefusals)
    say(fmt::format("more strangers are refused without a word, for {:.0f} s", kCountRefusals_s));
}

/// It gets what is queued, and time to close its side: one that closes first could take the message from it.
void Dispatcher::leave(Peer& peer, double within_s) {
  if (!peer.leaves_by) peer.leaves_by = now_ + within_s;
}

void Dispatcher::drop(Peer& peer, const std::string& why) {
  if (peer.gone) return;
  const bool was_known = peer.hello && !peer.leaves_by;
  peer.gone = true;
  peer.connection.shut_down();
  if (!was_known) return;
  if (&peer == client_) {
    client_ = nullptr;
    say(fmt::format("{} has gone: {}", peer.name(), why));
    end_session();
    stop_ = stop_ || settings_.owned;
  }
  if (peer.number < 0 || peer.failed) return;
  worker_failed(peer, {.worker = peer.number, .code = kLostPeer, .text = why});
}

void Dispatcher::from_client(Peer& peer, const Frame& frame) {
  if (!in_session_)
    throw CommError("[controller.serve] {} before all workers are there", message_name(frame.type));
  if (is<Instructions>(frame)) return take_instructions(frame);
  if (is<RunAction>(frame)) {
    message_of<RunAction>(frame);
    ++submitted_;
    has_run_ = true;
    return pass_on(frame);
  }
  if (is<Step>(frame)) {
    message_of<Step>(frame);
    return pass_on(frame);
  }
  if (is<Declaration>(frame)) {
    message_of<Declaration>(frame);
    return pass_on(frame);
  }
  if (is<Replay>(frame)) {
    message_of<Replay>(frame);
    check_ahead(1);
    ++submitted_;
    return pass_on(frame);
  }
  if (!is<Scope>(frame))
    throw CommError("[controller.serve] {} from {}", message_name(frame.type), peer.name());
  for (const uint32_t worker : message_of<Scope>(frame).workers) {
    if (worker >= workers_.size())
      throw CommError("[controller.serve] a scope has worker {} of {}; they count from 0", worker,
                      workers_.size());
  }
  pass_on(frame);
}

void Dispatcher::take_instructions(const Frame& frame) {
  const auto instructions = message_of<Instructions>(frame);
  if (instructions.first != submitted_ || instructions.count == 0) {
    throw CommError("[controller.serve] {} instructions from number {} on came where {} was due",
                    instructions.count, instructions.first, submitted_);
  }
  check_ahead(instructions.count);
  submitted_ += instructions.count;
  pass_on(frame);
}

/// Throws where so many instructions more would be too many.
void Dispatcher::check_ahead(uint64_t more) const {
  const uint64_t ahead = submitted_ + more - std::ranges::min(workers_, {}, &Peer::executed)->executed;
  if (ahead > kMostAhead)
    throw CommError("[controller.serve] the client is {} instructions ahead of the workers, {} are allowed",
                    ahead, kMostAhead);
}

/// All workers get the same frames in the same order, or their world is lost.
void Dispatcher::pass_on(const Frame& frame) {
  for (Peer* const worker : std::vector<Peer*>(workers_)) {
    if (formed_ && worker != nullptr) post_frame(*worker, frame);
  }
}

void Dispatcher::from_worker(Peer& peer, const Frame& frame) {
  if (is<Progress>(frame)) return take_progress(peer, message_of<Progress>(frame));
  if (is<Failed>(frame)) return worker_failed(peer, message_of<Failed>(frame));
  auto answer = message_of<Answer>(frame);
  if (!in_session_ || answer.session != session_ || client_ == nullptr) return;  // its client has gone
  answer.worker = peer.number;
  post(*client_, answer);
}

void Dispatcher::take_progress(Peer& peer, const Progress& progress) {
  if (!in_session_ || progress.session != session_) return;
  if (progress.executed > submitted_) {
    throw CommError("[controller.serve] {} says that it has executed {} of {} instructions", peer.name(),
                    progress.executed, submitted_);
  }
  peer.executed = std::max(peer.executed, progress.executed);
}

void Dispatcher::tell_progress() {
  if (!in_session_ || client_ == nullptr) return;
  const Peer& last = **std::ranges::min_element(workers_, {}, &Peer::executed);
  const bool may_wait = last.executed - told_ < kTellAfter && submitted_ - last.executed > kFewLeft;
  if (last.executed == told_ || (may_wait && now_ - told_at_ < kTellEvery_s)) return;
  told_ = last.executed;
  told_at_ = now_;
  post(*client_, Progress{.session = session_, .executed = told_, .worker = last.number});
}

void Dispatcher::tick() {
  tell_progress();
  look_for_silence();
  if (suspect_ && now_ >= judged_at_) lose_world(*suspect_);
  look_for_missing();
  for (const auto& peer : peers_) {
    const bool is_late = !peer->hello && now_ - peer->came > kHandshake_s;
    if (is_late || (peer->leaves_by && now_ > *peer->leaves_by)) drop(*peer, "it took too long");
  }
}

void Dispatcher::sweep() {
  // One that said why it ends, and is not judged yet, keeps its place.
  const auto is_placed = [this](const auto& peer) {
    return std::ranges::find(workers_, peer.get()) != workers_.end();
  };
  std::erase_if(peers_, [&](const auto& peer) { return peer->gone && !is_placed(peer); });
}

Status Dispatcher::status() const {
  const auto ms = [](double seconds) { return static_cast<int64_t>(1e3 * seconds); };
  Status status{.version = settings_.version, .build = settings_.build, .client_host = {}, .workers = {}};
  status.pid = ::getpid();
  status.wanted_workers = settings_.workers;
  status.uptime_ms = ms(now_ - started_);
  status.session = session_;
  status.submitted = submitted_;
  if (client_ != nullptr) {
    status.client_pid = client_->hello->pid;
    status.client_host = client_->hello->host;
  }
  for (const Peer* const worker : workers_) {
    if (worker == nullptr) continue;
    const Hello& hello = *worker->hello;
    status.workers.push_back(
        {.worker = {worker->number, hello.pid, hello.host, without_secret(hello.data_address), hello.devices},
         .cores = hello.cores,
         .executed = worker->executed,
         .queued_bytes = worker->connection.queued(),
         .last_seen_ms = ms(now_ - worker->heard)});
  }
  return status;
}

/// A worker that says it has lost a peer is not the culprit if another one's end is seen soon.
void Dispatcher::worker_failed(Peer& peer, Failed failed) {
  const bool has_said = !peer.gone;
  peer.failed = true;
  failed.worker = peer.number;
  failed.text =
      as_reason(fmt::format("{} {}: {}", peer.name(), has_said ? "failed" : "is lost", failed.text));
  if (!formed_ && !settings_.owned) {
    workers_[static_cast<size_t>(peer.number)] = nullptr;
    say(failed.text);
    return has_said ? leave(peer, kLeave_s) : void();
  }
  if (!has_said || failed.code != kLostPeer || !formed_) return lose_world(failed);
  if (suspect_) return;
  suspect_ = failed;
  judged_at_ = now_ + kSettle_s;
}

void Dispatcher::lose_world(const Failed& cause) {
  suspect_.reset();
  formed_ = in_session_ = false;
  form_by_ = now_ + settings_.timeout_s;
  client_ = nullptr;
  std::ranges::fill(workers_, nullptr);
  std::vector<Peer*> told;
  for (const auto& peer : peers_) {
    if (!peer->hello || peer->gone || peer->leaves_by) continue;
    told.push_back(peer.get());
    if (peer->hello->role != Role::kObserver) leave(*peer, kLeave_s);
  }
  for (Peer* const peer : told) post(*peer, cause);
  say(cause.text);
  if (settings_.owned) fatal_ = cause.text;
}

/// Pings are answered in their order.
void Dispatcher::take_pong(Peer& peer, uint64_t number) {
  for (; !peer.asked.empty() && peer.asked.front().first <= number; peer.asked.pop_front())
    if (peer.asked.front().first == number) answers_.add(now_ - peer.asked.front().second);
}

double Dispatcher::most_silence() const {
  const double slow = std::min(kMostSilence_s, kSlowAnswers * answers_.percentile_99());
  return std::max(settings_.silence_s, slow);
}

void Dispatcher::look_for_silence() {
  for (Peer* const worker : std::vector<Peer*>(workers_)) {
    if (worker == nullptr || worker->gone) continue;
    const double silent_s = now_ - worker->heard;
    if (silent_s >= most_silence()) {
      const std::string text = fmt::format(
          "[controller.serve] {} has not answered for {:.1f} s: it is stopped, or its machine hangs",
          worker->name(), silent_s);
      return lose_world({.worker = worker->number, .code = kLostPeer, .text = text});
    }
  }
  for (const auto& peer : peers_) {
    if (!peer->hello || peer->gone || peer->leaves_by || now_ - peer->pinged < settings_.silence_s / 4)
      continue;
    peer->pinged = now_;
    post(*peer, Ping{.number = ++pings_});
    if (peer->is(Role::kWorker)) peer->asked.emplace_back(pings_, now_);
  }
}

void Dispatcher::look_for_missing() {
  if (fatal_ || ending_ || now_ < form_by_) return;
  if (formed_) {  // whoever started it never connected
    stop_ = stop_ || (settings_.owned && client_ == nullptr);
    return;
  }
  std::vector<std::string> missing;
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i] == nullptr) missing.push_back(std::to_string(i));
  }
  const std::string text = fmt::format(
      "[controller.serve] {} {} of {} did not come within {:g} s; look at what they "
      "printed, or raise --timeout",
      missing.size() == 1 ? "worker" : "workers", join(missing, ", "), workers_.size(), settings_.timeout_s);
  lose_world({.worker = -1, .code = kLostPeer, .text = text});
  fatal_ = text;
}

/// Tells everybody to end, and waits until they have closed their connections.
void Dispatcher::say_goodbye() {
  ending_ = true;
  end_session();
  const double patience_s = has_run_ ? kRunEnd_s : kWorkersEnd_s;
  for (const auto& peer : peers_) {
    if (peer->hello && !peer->leaves_by) post(*peer, Bye{.reason = "the server ends"});
    leave(*peer, patience_s);
  }
  client_ = nullptr;
  in_session_ = formed_ = false;
  std::ranges::fill(workers_, nullptr);
  sweep();
  for (const double limit = now_ + patience_s; !peers_.empty() && now_ < limit;) turn();
  for (const auto& peer : peers_) say(fmt::format("{} has not closed its connection", peer->name()));
}

}  // namespace trireme::controller
