#include "trireme/comm/progress_board.h"

#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <sstream>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/flight_record.h"
#include "trireme/comm/cause.h"
#include "trireme/comm/meeting.h"

namespace trireme::comm {
namespace {

using State = ProgressBoard::State;
using Sighting = ProgressBoard::Sighting;

constexpr const char* kFailures = "progress/failures";
constexpr auto kLookEvery = std::chrono::milliseconds(100);
constexpr int kQuietLooks = 3;  // nothing new at so many: nobody else is about to publish
constexpr double kPatience_s = 2.0;

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string key_of(int64_t rank) {
  return fmt::format("progress/{}", rank);
}

std::string phrase(const Sighting& seen, const Operation& mine) {
  const std::string place = in_words({seen.operation, seen.sequence, seen.group}, seen.subject);
  if (seen.state == State::kFailed) return fmt::format("failed in {}", place);
  if (seen.state == State::kInside) return fmt::format("was last seen in {}", place);
  if (seen.group == mine.group && seen.sequence < mine.sequence) {
    return fmt::format("was last seen before {} #{} of group {}", mine.name, mine.sequence, mine.group);
  }
  return fmt::format("was last seen after {}", place);
}

bool is_inside(const Sighting& seen) {
  return seen.state == State::kInside || seen.state == State::kFailed;
}

bool is_same(const Sighting& seen, const Operation& mine, std::string_view subject) {
  return seen.operation == mine.name && seen.sequence == mine.sequence && seen.group == mine.group &&
         seen.subject == subject && is_inside(seen);
}

std::string join_phrases(std::vector<std::string> phrases, const std::vector<int64_t>& beside) {
  if (!beside.empty()) {
    phrases.push_back(beside.size() == 1
                          ? fmt::format("rank {} is waiting in it too", beside.front())
                          : fmt::format("ranks {} are waiting in it too", fmt::join(beside, ", ")));
  }
  return fmt::format("{}", fmt::join(phrases, "; "));
}

}  // namespace

std::string in_words(const Operation& operation, std::string_view subject) {
  return fmt::format("{} #{}{}{} of group {}", operation.name, operation.sequence,
                     subject.empty() ? "" : " for ", subject, operation.group);
}

std::string to_text(const Sighting& sighting) {
  return fmt::format("{} {} {} {:.3f} {}{}{}", static_cast<char>(sighting.state), sighting.sequence,
                     sighting.operation, sighting.since, sighting.group, sighting.subject.empty() ? "" : "\t",
                     sighting.subject);
}

std::optional<Sighting> parse_sighting(const std::string& text) {
  std::istringstream in(text);
  char state = 0;
  Sighting sighting;
  in >> state >> sighting.sequence >> sighting.operation >> sighting.since;
  const bool known = std::string_view("idfl").find(state) != std::string_view::npos;
  if (!in || !known || in.get() != ' ') return std::nullopt;
  std::getline(in, sighting.group, '\t');
  std::getline(in, sighting.subject);
  sighting.state = static_cast<State>(state);
  return sighting;
}

std::string describe_sighting(int64_t rank, const std::string& text, const Operation& operation, double now,
                              std::string_view subject, int64_t passed) {
  if (text.empty() && passed > 0) {
    return fmt::format(
        "rank {} has not published where it is, which ranks do once a second; this rank completed #{} of "
        "group {} "
        "with it",
        rank, passed, operation.group);
  }
  if (text.empty()) return fmt::format("rank {} has not been seen since it joined", rank);
  const std::optional<Sighting> seen = parse_sighting(text);
  if (!seen) return fmt::format("rank {} left an unreadable progress entry", rank);
  if (is_same(*seen, operation, subject)) return {};
  if (seen->state == State::kLeft)
    return fmt::format("rank {} left the job {:.0f} s ago", rank, now - seen->since);
  return fmt::format("rank {} {} ({:.0f} s ago)", rank, phrase(*seen, operation), now - seen->since);
}

void ProgressBoard::enter(c10d::Store& store, int64_t rank) {
  store.set(key_of(rank), std::string());
}

ProgressBoard::ProgressBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank)
    : ProgressBoard(std::move(store), rank, Options()) {}

ProgressBoard::ProgressBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, Options options)
    : store_(std::move(store)), rank_(rank), options_(std::move(options)), thread_([this] { run(); }) {}

ProgressBoard::~ProgressBoard() {
  leave();
}

void ProgressBoard::note(State state, const Operation& operation, std::string_view subject) {
  const double now = wall_seconds();
  const std::lock_guard lock(mutex_);
  current_.state = state;
  current_.sequence = operation.sequence;
  current_.operation = operation.name;
  current_.group = operation.group;
  current_.subject = subject;
  current_.since = now;
  changed_ = true;
  if (const auto group = groups_.find(operation.group); group != groups_.end() && state == State::kDone)
    group->second.passed = operation.sequence;
  if (options_.record) {
    options_.record->note(static_cast<char>(state), operation.name, operation.sequence, operation.group,
                          subject, now);
  }
}

void ProgressBoard::note_group(std::string_view name, const std::vector<int64_t>& ranks) {
  const std::lock_guard lock(mutex_);
  groups_.insert_or_assign(std::string(name), OwnGroup{.ranks = ranks});
  if (options_.record) options_.record->note_group(name, ranks);
}

bool ProgressBoard::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void ProgressBoard::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, options_.period, [this] { return stopping_; })) {
    const bool changed = changed_;
    lock.unlock();
    if (changed) publish();
    if (options_.listens) listen();
    lock.lock();
  }
}

/// Learns of the failures that other ranks have published.
void ProgressBoard::listen() {
  if (store_lost()) return;
  try {
    if (!store_->check({kFailures})) return;
    std::map<int64_t, std::string> failures = parse_entries(store_->get_to_str(kFailures));
    const std::lock_guard lock(mutex_);
    heard_ = std::move(failures);
  } catch (const std::exception& error) {
    mark_store_lost(error);
  }
}

std::string ProgressBoard::heard_about(const std::vector<int64_t>& ranks) const {
  const std::lock_guard lock(mutex_);
  for (const int64_t rank : ranks) {
    const auto found = heard_.find(rank);
    if (rank != rank_ && found != heard_.end()) return fmt::format("rank {} {}", rank, found->second);
  }
  return {};
}

bool ProgressBoard::store_lost() const {
  const std::lock_guard lock(mutex_);
  return store_lost_;
}

void ProgressBoard::mark_store_lost(const std::exception& error) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(store_lost_, true)) lost_because_ = cause_of(error);
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
  } catch (const std::exception& error) {
    mark_store_lost(error);
  }
}

void ProgressBoard::publish_failure(const Operation& operation, std::string_view subject) {
  publish();
  if (store_lost()) return;
  const std::string entry = to_entry(rank_, "failed in " + in_words(operation, subject));
  try {
    store_->append(kFailures, std::vector<uint8_t>(entry.begin(), entry.end()));
  } catch (const std::exception& error) {
    mark_store_lost(error);
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

/// Refreshes `texts`, unless the store is lost. Returns whether one has changed.
bool ProgressBoard::read(const std::vector<int64_t>& ranks, std::vector<std::string>& texts) {
  std::vector<std::string> keys;
  for (const int64_t rank : ranks) keys.push_back(key_of(rank));
  bool news = false;
  try {
    const std::vector<std::vector<uint8_t>> values = store_->multiGet(keys);
    for (size_t i = 0; i < texts.size(); ++i) {
      std::string text(values.at(i).begin(), values.at(i).end());
      news = news || text != texts[i];
      texts[i] = std::move(text);
    }
  } catch (const std::exception& error) {
    mark_store_lost(error);
  }
  return news;
}

/// Counts looks rather than seconds: while this host was suspended, nobody could write news.
std::vector<std::string> ProgressBoard::read_when_settled(const std::vector<int64_t>& ranks) {
  std::vector<std::string> texts(ranks.size());
  const double end = monotonic_seconds() + kPatience_s;
  for (int quiet = 0; !store_lost() && quiet < kQuietLooks && monotonic_seconds() < end;) {
    quiet = read(ranks, texts) ? 0 : quiet + 1;
    std::this_thread::sleep_for(kLookEvery);
  }
  return texts;
}

ProgressBoard::Report ProgressBoard::report_failure(const Operation& operation,
                                                    const std::vector<int64_t>& ranks,
                                                    std::string_view subject) noexcept {
  try {
    note(State::kFailed, operation, subject);
    {
      const std::lock_guard lock(mutex_);
      failed_ = true;
    }
    if (options_.hurry) options_.hurry();
    publish_failure(operation, subject);
    return collect_report(operation, ranks, subject);
  } catch (const std::exception& error) {
    return {.text = fmt::format("the progress of the other ranks could not be read ({})", error.what())};
  }
}

/// A rank that was last seen in an operation which this rank has passed has been silent since.
ProgressBoard::Cause ProgressBoard::cause_at(int64_t rank, const std::optional<Sighting>& seen,
                                             const Operation& operation,
                                             const std::vector<int64_t>& ranks) const {
  if (!seen || !is_inside(*seen)) return Cause::kMissing;
  if (seen->group == operation.group)
    return seen->sequence < operation.sequence ? Cause::kMissing : Cause::kDiverged;
  const auto is_among = [](const std::vector<int64_t>& all) {
    return [&all](int64_t one) { return std::ranges::find(all, one) != all.end(); };
  };
  const std::lock_guard lock(mutex_);
  const auto own = groups_.find(seen->group);
  // Groups of other ranks may have the name of one of this rank.
  if (own == groups_.end() || !is_among(own->second.ranks)(rank)) return Cause::kElsewhere;
  if (seen->state == State::kInside && seen->sequence <= own->second.passed) return Cause::kMissing;
  return std::ranges::all_of(own->second.ranks, is_among(ranks)) ? Cause::kDiverged : Cause::kElsewhere;
}

int64_t ProgressBoard::passed_in(std::string_view group) const {
  const std::lock_guard lock(mutex_);
  const auto own = groups_.find(group);
  return own == groups_.end() ? 0 : own->second.passed;
}

ProgressBoard::Report ProgressBoard::collect_report(const Operation& operation,
                                                    const std::vector<int64_t>& ranks,
                                                    std::string_view subject) {
  const std::vector<std::string> texts = read_when_settled(ranks);
  std::vector<std::string> phrases;
  std::vector<int64_t> beside;
  const bool lost = store_lost();
  const int64_t passed = passed_in(operation.group);
  bool missing = lost, elsewhere = false;
  if (lost) {
    const std::lock_guard lock(mutex_);
    phrases.push_back(fmt::format("the store is lost ({}), so {} has exited, hangs, or is unreachable",
                                  lost_because_, options_.host));
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank_ || (texts[i].empty() && lost)) continue;
    std::string about = describe_sighting(ranks[i], texts[i], operation, wall_seconds(), subject, passed);
    about.empty() ? beside.push_back(ranks[i]) : phrases.push_back(std::move(about));
    const Cause cause = cause_at(ranks[i], parse_sighting(texts[i]), operation, ranks);
    missing = missing || cause == Cause::kMissing;
    elsewhere = elsewhere || cause == Cause::kElsewhere;
  }
  Cause cause = elsewhere ? Cause::kElsewhere : Cause::kDiverged;
  if (missing || phrases.empty()) cause = Cause::kMissing;
  return {join_phrases(std::move(phrases), beside), cause};
}

}  // namespace trireme::comm
