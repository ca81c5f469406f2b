#include "trireme/comm/progress_board.h"

#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sstream>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

using State = ProgressBoard::State;
using Sighting = ProgressBoard::Sighting;

constexpr auto kPoll = std::chrono::milliseconds(50);
constexpr double kQuiet_s = 0.3;  // nothing new for so long: nobody else is about to publish
constexpr double kPatience_s = 2.0;

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string key_of(int64_t rank) {
  return fmt::format("progress/{}", rank);
}

std::string phrase(const Sighting& seen, const Operation& mine) {
  const std::string place = fmt::format("{} #{} of group {}", seen.operation, seen.sequence, seen.group);
  if (seen.state == State::kFailed) return fmt::format("failed in {}", place);
  if (seen.state == State::kInside) return fmt::format("was last seen in {}", place);
  if (seen.group == mine.group && seen.sequence < mine.sequence) {
    return fmt::format("was last seen before {} #{} of group {}", mine.name, mine.sequence, mine.group);
  }
  return fmt::format("was last seen after {}", place);
}

bool is_same(const Sighting& seen, const Operation& mine) {
  return seen.operation == mine.name && seen.sequence == mine.sequence && seen.group == mine.group &&
         (seen.state == State::kInside || seen.state == State::kFailed);
}

std::string join_phrases(std::vector<std::string> phrases, const std::vector<int64_t>& beside) {
  if (!beside.empty()) {
    phrases.push_back(beside.size() == 1 ? fmt::format("rank {} waits in it too", beside.front())
                                         : fmt::format("ranks {} wait in it too", fmt::join(beside, ", ")));
  }
  return fmt::format("{}", fmt::join(phrases, "; "));
}

}  // namespace

std::string to_text(const Sighting& sighting) {
  return fmt::format("{} {} {} {:.3f} {}", static_cast<char>(sighting.state), sighting.sequence,
                     sighting.operation, sighting.since, sighting.group);
}

Sighting parse_sighting(const std::string& text) {
  std::istringstream in(text);
  char state = 0;
  Sighting sighting;
  in >> state >> sighting.sequence >> sighting.operation >> sighting.since;
  const bool known = std::string_view("idfl").find(state) != std::string_view::npos;
  TRIREME_CHECK(in && known && in.get() == ' ', "[comm.progress_board] '{}' is no entry of the board", text);
  std::getline(in, sighting.group);
  sighting.state = static_cast<State>(state);
  return sighting;
}

std::string describe_sighting(int64_t rank, const std::string& text, const Operation& operation, double now) {
  if (text.empty()) return fmt::format("rank {} has not been seen since it joined", rank);
  const Sighting seen = parse_sighting(text);
  if (is_same(seen, operation)) return {};
  if (seen.state == State::kLeft)
    return fmt::format("rank {} left the job {:.0f} s ago", rank, now - seen.since);
  return fmt::format("rank {} {} ({:.0f} s ago)", rank, phrase(seen, operation), now - seen.since);
}

ProgressBoard::ProgressBoard(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                             std::chrono::milliseconds period)
    : store_(store->clone()), rank_(rank), period_(period), thread_([this] { run(); }) {}

ProgressBoard::~ProgressBoard() {
  leave();
}

void ProgressBoard::note(State state, const Operation& operation) {
  const double now = wall_seconds();
  const std::lock_guard lock(mutex_);
  current_.state = state;
  current_.sequence = operation.sequence;
  current_.operation = operation.name;
  current_.group = operation.group;
  current_.since = now;
  changed_ = true;
}

bool ProgressBoard::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void ProgressBoard::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, period_, [this] { return stopping_; })) {
    if (!changed_) continue;
    lock.unlock();
    publish();
    lock.lock();
  }
}

bool ProgressBoard::store_lost() const {
  const std::lock_guard lock(mutex_);
  return store_lost_;
}

void ProgressBoard::mark_store_lost() {
  const std::lock_guard lock(mutex_);
  store_lost_ = true;
}

void ProgressBoard::publish() {
  const std::lock_guard in_order(publish_mutex_);
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (store_lost_) return;
    text = to_text(current_);
    changed_ = false;
  }
  try {
    store_->set(key_of(rank_), text);
  } catch (const std::exception&) {
    mark_store_lost();
  }
}

void ProgressBoard::leave() {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    if (!failed_) {
      current_.state = State::kLeft;
      current_.since = wall_seconds();
    }
    if (current_.operation.empty()) current_.operation = "join";
  }
  wake_.notify_all();
  thread_.join();
  publish();
}

/// Refreshes `texts` as far as the store can be reached. Returns whether one has changed.
bool ProgressBoard::read(const std::vector<int64_t>& ranks, std::vector<std::string>& texts) {
  bool news = false;
  try {
    for (size_t i = 0; i < ranks.size(); ++i) {
      const std::string key = key_of(ranks[i]);
      if (ranks[i] == rank_ || !store_->check({key})) continue;
      std::string text = store_->get_to_str(key);
      news = news || text != texts[i];
      texts[i] = std::move(text);
    }
  } catch (const std::exception&) {
    mark_store_lost();
  }
  return news;
}

std::vector<std::string> ProgressBoard::read_when_settled(const std::vector<int64_t>& ranks) {
  std::vector<std::string> texts(ranks.size());
  const double started = monotonic_seconds();
  double now = started, last_news = started;
  while (!store_lost() && now - started < kPatience_s && now - last_news < kQuiet_s) {
    if (read(ranks, texts)) last_news = now;
    std::this_thread::sleep_for(kPoll);
    now = monotonic_seconds();
  }
  return texts;
}

std::string ProgressBoard::report_failure(const Operation& operation, const std::vector<int64_t>& ranks) {
  note(State::kFailed, operation);
  {
    const std::lock_guard lock(mutex_);
    failed_ = true;
  }
  publish();
  const std::vector<std::string> texts = read_when_settled(ranks);
  std::vector<std::string> phrases;
  std::vector<int64_t> beside;
  if (store_lost()) phrases.push_back("the store is lost, so the process that hosts it has probably died");
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank_ || (texts[i].empty() && store_lost())) continue;
    std::string about = describe_sighting(ranks[i], texts[i], operation, wall_seconds());
    about.empty() ? beside.push_back(ranks[i]) : phrases.push_back(std::move(about));
  }
  return join_phrases(std::move(phrases), beside);
}

}  // namespace trireme::comm
