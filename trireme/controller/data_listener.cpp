#include "trireme/controller/data_listener.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "trireme/base/error.h"
#include "trireme/base/hex.h"
#include "trireme/base/text.h"
#include "trireme/controller/data_connection.h"
#include "trireme/controller/hmac.h"
#include "trireme/controller/messages.h"

namespace trireme::controller {
namespace {

constexpr double kVisitorLooksEvery_s = 0.2, kDataGreeting_s = 10.0, kPiece_s = 60.0;
constexpr int64_t kMostVisitors = 32, kMostUnknownVisitors = 16;

Address data_socket(const Environment& environment) {
  const std::string word = random_bytes(6);
  return {.path = fmt::format("{}/data-{}-{}", runtime_folder(environment), ::getpid(),
                              to_hex(word.data(), word.size()))};
}

}  // namespace

DataListener::DataListener(const Environment& environment, std::string build, uint64_t most_bytes)
    : listener_(data_socket(environment), environment),
      build_(std::move(build)),
      most_bytes_(most_bytes),
      thread_([this] { accept_all(); }) {}

DataListener::DataListener(const std::string& host, std::string build, uint64_t most_bytes)
    : secret_(random_bytes(kTokenBytes)),
      listener_(address_of(host, 0), tls_by_secret(secret_)),
      build_(std::move(build)),
      most_bytes_(most_bytes),
      thread_([this] { accept_all(); }) {}

DataListener::~DataListener() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (Visitor& visitor : visitors_) visitor.connection.shut_down();
  for (Visitor& visitor : visitors_) visitor.thread.join();
}

void DataListener::accept_all() {
  while (true) {
    const bool somebody = wait_for(listener_.fd(), POLLIN, after_seconds(kVisitorLooksEvery_s));
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return;
    }
    collect_visitors();
    std::optional<Connection> connection = somebody ? listener_.accept("a client") : std::nullopt;
    if (!connection || !make_room()) continue;
    Visitor& visitor = visitors_.emplace_back(std::move(*connection));
    visitor.thread = std::thread([this, &visitor] { serve(visitor); });
  }
}

void DataListener::collect_visitors() {
  for (auto visitor = visitors_.begin(); visitor != visitors_.end();) {
    bool over = false;
    {
      const std::lock_guard lock(mutex_);
      over = visitor->over;
    }
    if (over) visitor->thread.join();
    visitor = over ? visitors_.erase(visitor) : std::next(visitor);
  }
}

/// Those who connect and say nothing make room for the next one; whether there is any.
bool DataListener::make_room() {
  const std::lock_guard lock(mutex_);
  const auto is_there = [](const Visitor& visitor) { return !visitor.over && !visitor.leaves; };
  const auto is_stranger = [&](const Visitor& visitor) { return !visitor.known && is_there(visitor); };
  if (std::ranges::count_if(visitors_, is_stranger) >= kMostUnknownVisitors) {
    Visitor& first = *std::ranges::find_if(visitors_, is_stranger);
    first.leaves = true;
    first.connection.shut_down();
  }
  return std::ranges::count_if(visitors_, is_there) < kMostVisitors;
}

void DataListener::serve(Visitor& visitor) {
  Connection& connection = visitor.connection;
  try {
    const uint64_t session = greet(connection);
    {
      const std::lock_guard lock(mutex_);
      visitor.known = true;
    }
    std::string partial;
    while (true) {
      const Frame frame = connection.receive(after_seconds(kDataIdle_s));
      if (is<Bye>(frame)) break;
      if (is<Data>(frame)) {
        store_piece(connection, {session, 0}, frame, partial);
        continue;
      }
      const auto wanted = message_of<Take>(frame);
      give(connection, {session, wanted.id}, 1e-3 * static_cast<double>(wanted.timeout_ms));
    }
  } catch (const std::exception& error) {
    connection.send(static_cast<uint16_t>(Reject::kType), body_of(Reject{.reason = as_reason(error.what())}));
    connection.pump();
  }
  connection.shut_down();
  const std::lock_guard lock(mutex_);
  visitor.over = true;
}

uint64_t DataListener::greet(Connection& connection) {
  const auto hello = message_of<Hello>(connection.receive(after_seconds(kDataGreeting_s)));
  if (hello.build != build_) {
    throw CommError(
        "[controller.data] the client is of build {}, this worker of build {}; start both from one build",
        hello.build, build_);
  }
  send(connection, Welcome{.session = hello.session, .number = -1, .count = 0});
  return hello.session;
}

void DataListener::store_piece(Connection& connection, Key key, const Frame& frame, std::string& partial) {
  const Piece piece = piece_of(frame);
  key.second = piece.id;
  if (piece.offset != partial.size()) {
    throw CommError("[controller.data] bytes {} to {} of {} came after {}", piece.offset,
                    piece.offset + piece.bytes.size(), piece.total, partial.size());
  }
  if (piece.offset == 0) {
    const std::lock_guard lock(mutex_);
    if (piece.total > most_bytes_ - std::min(held_bytes_, most_bytes_)) {
      throw CommError(
          "[controller.data] the client puts {}, and this worker holds {} of at most {}; let instructions "
          "use what is there first",
          format_bytes(static_cast<double>(piece.total)), format_bytes(static_cast<double>(held_bytes_)),
          format_bytes(static_cast<double>(most_bytes_)));
    }
    partial.reserve(piece.total);
  }
  partial.append(piece.bytes);
  if (partial.size() < piece.total) return;
  keep(put_, key, std::exchange(partial, {}));
  send(connection, DataDone{.id = piece.id});
}

void DataListener::give(Connection& connection, Key key, double timeout_s) {
  send_pieces(connection, key.second, wait(offered_, key, timeout_s, "this worker did not offer"), kPiece_s);
}

void DataListener::keep(Bytes& bytes, Key key, std::string value) {
  {
    const std::lock_guard lock(mutex_);
    held_bytes_ += value.size();
    const auto [place, is_new] = bytes.emplace(key, std::string());
    held_bytes_ -= place->second.size();
    place->second = std::move(value);
  }
  changed_.notify_all();
}

std::string DataListener::wait(Bytes& bytes, Key key, double timeout_s, const char* what) {
  std::unique_lock lock(mutex_);
  const bool there =
      changed_.wait_until(lock, after_seconds(timeout_s), [&] { return closing_ || bytes.contains(key); });
  if (!there || closing_) {
    throw CommError("[controller.data] {} bytes {} within {:g} s; check that both sides name the same number",
                    what, key.second, timeout_s);
  }
  std::string value = std::move(bytes.extract(key).mapped());
  held_bytes_ -= value.size();
  return value;
}

std::string DataListener::take(uint64_t session, uint64_t id, double timeout_s) {
  return wait(put_, {session, id}, timeout_s, "the client did not put");
}

void DataListener::offer(uint64_t session, uint64_t id, std::string bytes) {
  keep(offered_, {session, id}, std::move(bytes));
}

void DataListener::forget(uint64_t session) {
  const std::lock_guard lock(mutex_);
  for (Bytes* const bytes : {&put_, &offered_}) {
    std::erase_if(*bytes, [&](const auto& entry) {
      const bool old = entry.first.first <= session;
      held_bytes_ -= old ? entry.second.size() : 0;
      return old;
    });
  }
}

}  // namespace trireme::controller
