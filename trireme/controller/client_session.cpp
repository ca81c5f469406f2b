#include "trireme/controller/client_session.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stop_token>
#include <thread>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/controller/greeting.h"

namespace trireme::controller {
namespace {

/// A server that waits as long for workers names those that did not come.
constexpr double kServerSaysFirst_s = 5.0;

constexpr size_t kSendBytes = 32 << 10;
constexpr uint32_t kSendInstructions = 4096;
constexpr size_t kMostBytesUnderWay = 32 << 20;

/// Says something if it is still there after some time.
class Notice {
 public:
  Notice(double seconds, std::string text)
      : thread_([seconds, text = std::move(text)](const std::stop_token& stop) {
          std::mutex mutex;
          std::condition_variable_any stopped;
          std::unique_lock lock(mutex);
          const auto is_stopped = [&stop] { return stop.stop_requested(); };
          if (!stopped.wait_for(lock, stop, std::chrono::duration<double>(seconds), is_stopped))
            log_info("{}", text);
        }) {}

 private:
  std::jthread thread_;
};

}  // namespace

ClientSession::ClientSession(ClientSettings settings, Environment environment)
    : settings_(std::move(settings)), environment_(std::move(environment)) {
  const auto deadline = after_seconds(settings_.timeout_s);
  Connection connection = connect_to(settings_.address, environment_, "the server", deadline);
  Hello hello{
      .role = Role::kClient, .version = settings_.version, .build = settings_.build, .pid = ::getpid()};
  hello.host = this_host();
  send(connection, hello);
  message_of<Welcome>(next_of_greeting(connection, deadline));
  {
    const Notice notice(
        settings_.patience_s,
        fmt::format(
            "[controller.client] waiting for workers at {}, for at most {:g} s; 'trireme ps' shows who "
            "is there, and 'trireme worker' adds one",
            settings_.address.text(), settings_.timeout_s));
    const auto behind_server = after_seconds(settings_.timeout_s + kServerSaysFirst_s);
    session_ = message_of<Session>(next_of_greeting(connection, behind_server));
  }
  line_ = std::make_unique<Line>(
      std::move(connection), settings_.silence_s, [this](const Frame& frame) { take(frame); },
      [this](const std::string& why) { fail(why); });
}

ClientSession::~ClientSession() {
  try {
    flush();
    line_->send(Bye{.reason = "done"});
  } catch (const Error&) {
    // It has failed already, and said so to whoever waited.
  }
  line_->close();
}

void ClientSession::take(const Frame& frame) {
  if (is<Progress>(frame)) return take_progress(message_of<Progress>(frame));
  if (is<Failed>(frame)) take_failed(message_of<Failed>(frame));
  if (is<Reject>(frame)) throw CommError("{}", message_of<Reject>(frame).reason);
  if (is<Bye>(frame))
    throw CommError("[controller.client] the session ends: {}", message_of<Bye>(frame).reason);
  auto answer = message_of<Answer>(frame);
  const std::lock_guard lock(mutex_);
  const auto found = requests_.find(answer.request);
  if (found == requests_.end()) return;  // nobody waits any more
  found->second.set_value(std::move(answer));
  requests_.erase(found);
}

void ClientSession::take_failed(const Failed& failed) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_code_ = failed.code;
  }
  throw CommError("{}", failed.text);
}

void ClientSession::take_progress(const Progress& progress) {
  {
    const std::lock_guard lock(mutex_);
    executed_ = std::max(executed_, progress.executed);
    slowest_ = progress.worker;
    for (; !under_way_.empty() && under_way_.front().first <= executed_; under_way_.pop_front())
      bytes_under_way_ -= under_way_.front().second;
  }
  changed_.notify_all();
}

void ClientSession::fail(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = why;
    for (auto& [id, promise] : requests_)
      promise.set_exception(std::make_exception_ptr(CommError("{}", why)));
    requests_.clear();
  }
  changed_.notify_all();
}

void ClientSession::check() const {
  if (failure_) throw CommError("{}", *failure_);
}

std::optional<std::string> ClientSession::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::optional<int64_t> ClientSession::failure_code() {
  const std::lock_guard lock(mutex_);
  return failure_code_;
}

std::string ClientSession::how_far() const {
  const std::string slowest =
      slowest_ < 0 ? "the workers have" : fmt::format("worker {}, the slowest, has", slowest_);
  return fmt::format("{} executed {} of {} instructions", slowest, executed_, sent_);
}

void ClientSession::define_scope(uint32_t id, const std::string& name, const std::vector<uint32_t>& workers) {
  for (const uint32_t worker : workers) {
    if (worker < session_.workers.size()) continue;
    throw ConfigError("[controller.client] scope {} has worker {} of {}; they count from 0", name, worker,
                      session_.workers.size());
  }
  Lock lock(mutex_);
  send_buffer(lock);
  line_->send(Scope{.id = id, .name = name, .workers = workers});
}

void ClientSession::declare(std::string text) {
  Lock lock(mutex_);
  send_buffer(lock);
  line_->send(Declaration{.text = std::move(text)});
}

uint64_t ClientSession::submit(std::string_view bytes, uint32_t count) {
  if (bytes.size() > kMostInstructions || count == 0 || count > kMostAhead / 2) {
    throw LogicError(
        "[controller.client] {} instructions of {} bytes at once; 1 to {} of at most {} bytes may be", count,
        bytes.size(), kMostAhead / 2, kMostInstructions);
  }
  Lock lock(mutex_);
  check();
  if (buffer_.size() + bytes.size() > kSendBytes || buffered_ + count > kSendInstructions) send_buffer(lock);
  buffer_.append(bytes);
  buffered_ += count;
  return sent_ + buffered_ - count;
}

void ClientSession::flush() {
  Lock lock(mutex_);
  send_buffer(lock);
}

void ClientSession::send_buffer(Lock& lock) {
  check();
  const auto may_send = [&] {
    return failure_ ||
           (sent_ + buffered_ - executed_ <= kMostAhead && bytes_under_way_ <= kMostBytesUnderWay);
  };
  if (!changed_.wait_until(lock, after_seconds(settings_.timeout_s), may_send)) {
    throw CommError("[controller.client] no more instructions were taken for {:g} s: {}; see 'trireme ps'",
                    settings_.timeout_s, how_far());
  }
  check();
  if (buffered_ == 0) return;
  const Instructions instructions{.first = sent_, .count = buffered_, .bytes = std::move(buffer_)};
  buffer_.clear();
  sent_ += std::exchange(buffered_, 0);
  under_way_.emplace_back(sent_, instructions.bytes.size());
  bytes_under_way_ += instructions.bytes.size();
  line_->send(instructions);
}

void ClientSession::act(uint64_t request, std::string_view text) {
  if (text.size() > kMostText) {
    throw ConfigError("[controller.client] an action of {} bytes; at most {} may be sent", text.size(),
                      kMostText);
  }
  Lock lock(mutex_);
  begin_action(lock, text.size());
  line_->send(RunAction{.request = request, .text = std::string(text)});
}

/// Begins an action, which counts as one instruction and follows all that was submitted.
void ClientSession::begin_action(Lock& lock, size_t bytes) {
  send_buffer(lock);
  under_way_.emplace_back(++sent_, bytes);
  bytes_under_way_ += bytes;
}

void ClientSession::define_step(uint32_t number, std::string_view bytes) {
  Lock lock(mutex_);
  send_buffer(lock);
  do {
    const std::string_view piece = bytes.substr(0, kMostChunk);
    bytes.remove_prefix(piece.size());
    line_->send(Step{.number = number, .is_last = bytes.empty(), .bytes = std::string(piece)});
  } while (!bytes.empty());
}

uint64_t ClientSession::replay(uint32_t number, const std::vector<int64_t>& arguments) {
  Lock lock(mutex_);
  begin_action(lock, arguments.size() * sizeof(int64_t));
  line_->send(Replay{.number = number, .arguments = arguments});
  return sent_ - 1;
}

uint64_t ClientSession::executed() {
  const std::lock_guard lock(mutex_);
  return executed_;
}

void ClientSession::wait_executed(uint64_t end) {
  Lock lock(mutex_);
  send_buffer(lock);
  const auto over = [&] { return failure_ || executed_ >= end; };
  if (changed_.wait_until(lock, after_seconds(settings_.timeout_s), over)) return check();
  throw CommError("[controller.client] instruction {} was not executed within {:g} s: {}; see 'trireme ps'",
                  end, settings_.timeout_s, how_far());
}

void ClientSession::wait_executed_at_last(uint64_t end) {
  Lock lock(mutex_);
  send_buffer(lock);
  changed_.wait(lock, [&] { return failure_ || executed_ >= end; });
  check();
}

ClientSession::Request ClientSession::request() {
  const std::lock_guard lock(mutex_);
  check();
  Request made;
  made.session_ = this;
  made.id_ = next_request_++;
  made.answer_ = requests_[made.id_].get_future();
  return made;
}

bool ClientSession::Request::ready() const {
  return answer_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

bool ClientSession::Request::wait(double seconds) {
  if (!ready()) session_->flush();
  return answer_.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
}

Answer ClientSession::Request::get() {
  if (!ready()) session_->flush();
  const double limit_s = session_->settings_.timeout_s;
  if (answer_.wait_for(std::chrono::duration<double>(limit_s)) == std::future_status::ready)
    return answer_.get();
  const std::lock_guard lock(session_->mutex_);
  throw CommError("[controller.client] no answer to request {} within {:g} s: {}; see 'trireme ps'", id_,
                  limit_s, session_->how_far());
}

DataConnection ClientSession::data_connection(int64_t worker) const {
  if (worker < 0 || worker >= static_cast<int64_t>(session_.workers.size())) {
    throw ConfigError("[controller.client] there is no worker {}; they are 0 to {}", worker,
                      session_.workers.size() - 1);
  }
  return {session_.workers[static_cast<size_t>(worker)], session_.session, environment_, settings_.build,
          settings_.timeout_s};
}

}  // namespace trireme::controller
