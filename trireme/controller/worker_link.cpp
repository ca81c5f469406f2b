#include "trireme/controller/worker_link.h"

#include <unistd.h>

#include <algorithm>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/controller/greeting.h"

namespace trireme::controller {
namespace {

constexpr double kProgressEvery_s = 1e-3;
constexpr uint64_t kProgressAfter = 1000;  ///< instructions
/// Twice what a client may have under way; what goes beyond breaks the protocol.
constexpr size_t kMostWorkBytes = kMostQueuedBytes;

plan::WorldSpec world_of(const World& world, int64_t listen_fd) {
  plan::WorldSpec spec{.launcher = "trireme", .rank = world.rank, .world_size = world.size};
  spec.local_rank = world.rank;
  spec.local_world_size = world.size;
  spec.master_addr = world.address;
  spec.master_port = world.port;
  spec.job_key = world.job_key;
  spec.listen_fd = world.rank == 0 ? listen_fd : -1;
  return spec;
}

}  // namespace

WorkerLink::WorkerLink(WorkerSettings settings, const Environment& environment)
    : settings_(std::move(settings)) {
  const auto deadline = after_seconds(settings_.timeout_s);
  Connection connection = connect_to(settings_.address, environment, "the server", deadline);
  const std::string host = listen(connection, environment);
  Hello hello{
      .role = Role::kWorker, .version = settings_.version, .build = settings_.build, .pid = ::getpid()};
  hello.host = this_host();
  hello.data_address = data_->address().text();
  hello.devices = settings_.devices.substr(0, kMostName);
  hello.cores = settings_.cores;
  hello.wanted_number = settings_.wanted_number;
  hello.rendezvous_address = host;
  hello.rendezvous_port = meeting_.port;
  send(connection, hello);
  message_of<Welcome>(next_of_greeting(connection, deadline));
  world_ = world_of(message_of<World>(next_of_greeting(connection, deadline)), meeting_.fd.get());
  if (world_.rank != 0) meeting_.fd.close();
  line_ = std::make_unique<Line>(
      std::move(connection), settings_.silence_s, [this](const Frame& frame) { take(frame); },
      [this](const std::string& why) { fail(why); });
}

/// Other hosts reach this one by the address by which it reaches the server.
std::string WorkerLink::listen(const Connection& connection, const Environment& environment) {
  const bool is_beyond = settings_.address.is_beyond();
  const std::string host = is_beyond ? own_host(connection) : kThisHost;
  if (is_beyond && host == kThisHost) {
    throw ConfigError(
        "[controller.worker] {} is a name of this host alone (a forwarded port?), where clients and other "
        "workers "
        "cannot reach this one; give the server's address in the network that they share",
        settings_.address.text());
  }
  meeting_ = is_beyond ? launch::listen_at(host) : launch::listen_on_loopback();
  data_ = is_beyond ? std::make_unique<DataListener>(host, settings_.build, settings_.most_bulk)
                    : std::make_unique<DataListener>(environment, settings_.build, settings_.most_bulk);
  return host;
}

WorkerLink::~WorkerLink() {
  try {
    tell_progress();
    line_->send(Bye{.reason = "done"});
  } catch (const Error&) {
    // The dispatcher sees the end of the connection.
  }
  line_->close();
}

void WorkerLink::take(const Frame& frame) {
  const size_t bytes = frame.body.size();
  if (is<Instructions>(frame)) return queue(message_of<Instructions>(frame), bytes);
  if (is<Replay>(frame)) return queue(message_of<Replay>(frame), bytes);
  if (is<Step>(frame)) return queue(message_of<Step>(frame), bytes);
  if (is<Scope>(frame)) return queue(message_of<Scope>(frame), bytes);
  if (is<Declaration>(frame)) return queue(message_of<Declaration>(frame), bytes);
  if (is<RunAction>(frame)) return queue(message_of<RunAction>(frame), bytes);
  if (is<SessionBegin>(frame)) return queue(message_of<SessionBegin>(frame), bytes);
  if (is<SessionEnd>(frame)) return queue(message_of<SessionEnd>(frame), bytes);
  if (is<Bye>(frame)) return queue(message_of<Bye>(frame), bytes);
  throw CommError("{}", message_of<Failed>(frame).text);
}

void WorkerLink::queue(WorkItem item, size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    queued_bytes_ += bytes;
    if (queued_bytes_ > kMostWorkBytes) {
      throw CommError("[controller.worker] {} of work wait for worker {}, {} may; it is too far behind",
                      format_bytes(static_cast<double>(queued_bytes_)), world_.rank,
                      format_bytes(static_cast<double>(kMostWorkBytes)));
    }
    items_.emplace_back(std::move(item), bytes);
  }
  changed_.notify_all();
}

void WorkerLink::fail(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = why;
  }
  changed_.notify_all();
  if (settings_.lost) settings_.lost(why);
}

std::optional<WorkItem> WorkerLink::next(double timeout_s) {
  std::unique_lock lock(mutex_);
  if (items_.empty() && !failure_) {
    lock.unlock();
    tell_progress();
    lock.lock();
  }
  const auto is_due = [&] { return failure_ || !items_.empty(); };
  if (!changed_.wait_until(lock, after_seconds(timeout_s), is_due)) return std::nullopt;
  // What came before the end in order is still done; after a failure there is no one to do it for.
  const bool ends_in_order = !items_.empty() && std::holds_alternative<Bye>(items_.back().first);
  if (failure_ && !ends_in_order) throw CommError("{}", *failure_);
  auto [item, bytes] = std::move(items_.front());
  items_.pop_front();
  queued_bytes_ -= bytes;
  lock.unlock();
  begin_or_end(item);
  return std::move(item);
}

void WorkerLink::begin_or_end(const WorkItem& item) {
  if (const auto* const begin = std::get_if<SessionBegin>(&item)) {
    session_ = begin->session;
    executed_ = told_ = 0;
  }
  if (const auto* const end = std::get_if<SessionEnd>(&item)) data_->forget(end->session);
}

void WorkerLink::progress(uint64_t executed, bool at_once) {
  executed_ = executed;
  const bool is_due =
      executed_ - told_ >= kProgressAfter || monotonic_seconds() - told_at_ >= kProgressEvery_s;
  if (is_due || at_once) tell_progress();
}

void WorkerLink::tell_progress() {
  if (executed_ == told_) return;
  told_ = executed_;
  told_at_ = monotonic_seconds();
  line_->send(Progress{.session = session_, .executed = executed_, .worker = world_.rank});
}

void WorkerLink::answer(uint64_t request, std::string_view bytes) {
  TRIREME_CHECK(bytes.size() <= kMostAnswer,
                "[controller.worker] an answer of {} bytes, {} fit; offer it as bulk bytes", bytes.size(),
                kMostAnswer);
  line_->send(
      Answer{.session = session_, .request = request, .worker = world_.rank, .bytes = std::string(bytes)});
}

void WorkerLink::failed(int64_t code, const std::string& text) {
  line_->send(Failed{.worker = world_.rank, .code = code, .text = as_reason(text)});
}

std::string WorkerLink::take_bulk(uint64_t id, double timeout_s) {
  return data_->take(session_, id, timeout_s);
}

void WorkerLink::offer_bulk(uint64_t id, std::string bytes) {
  data_->offer(session_, id, std::move(bytes));
}

}  // namespace trireme::controller
