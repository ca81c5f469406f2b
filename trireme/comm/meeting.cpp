#include "trireme/comm/meeting.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <mutex>
#include <string_view>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/log.h"
#include "trireme/comm/cause.h"

namespace trireme::comm {
namespace {

using Bytes = std::vector<uint8_t>;
using Entries = std::map<int64_t, std::string>;

constexpr double kReportEvery_s = 10.0;
constexpr double kLookEvery_s = 5.0;  ///< a host of the store that is frozen is found by a call that is late

std::string log_key(const Meeting& meeting) {
  return meeting.place + "/entries";
}

std::string complete_key(const Meeting& meeting) {
  return meeting.place + "/complete";
}

Entries entries(c10d::Store& store, const Meeting& meeting) {
  return parse_entries(store.get_to_str(log_key(meeting)));
}

std::vector<int64_t> missing_ranks(const Meeting& meeting, const Entries& arrived) {
  std::vector<int64_t> missing;
  for (const int64_t rank : meeting.ranks) {
    if (!arrived.contains(rank)) missing.push_back(rank);
  }
  return missing;
}

std::string names_of(const std::vector<int64_t>& missing, const Meeting& meeting) {
  return fmt::format("{} {} of {}", missing.size() == 1 ? "rank" : "ranks", fmt::join(missing, ", "),
                     meeting.ranks.size());
}

/// The rank that comes last opens the meeting for all. A rank that came twice counts once.
void arrive(c10d::Store& store, const Meeting& meeting, const std::string& text) {
  const std::string entry = to_entry(meeting.rank, text);
  store.append(log_key(meeting), Bytes(entry.begin(), entry.end()));
  const int64_t arrivals = store.add(meeting.place + "/arrivals", 1);
  if (arrivals < static_cast<int64_t>(meeting.ranks.size())) return;
  if (missing_ranks(meeting, entries(store, meeting)).empty()) store.set(complete_key(meeting), Bytes{1});
}

[[noreturn]] void throw_missing(const Meeting& meeting, const std::vector<int64_t>& missing, double waited_s,
                                const char* ended) {
  throw CommError(
      "[{}] rank {} waited {:.1f} s {} for {}, which did not arrive{}; look at their logs, and raise "
      "the timeout if they are only slow",
      meeting.op, meeting.rank, waited_s, meeting.where, names_of(missing, meeting), ended);
}

/// Where a reason was given to end_meeting().
void throw_reason(c10d::Store& store, const Meeting& meeting) {
  const std::string reason = store.get_to_str(complete_key(meeting));
  if (reason.size() > 1) throw CommError("[{}] {}", meeting.op, reason);
}

/// Returns what the ranks have left there.
Entries wait_until_complete(c10d::Store& store, const Meeting& meeting) {
  const double started = monotonic_seconds();
  for (double next_report = kReportEvery_s;;) {
    beat();  // this wait has a deadline of its own
    const double left = meeting.timeout_s - (monotonic_seconds() - started);
    const bool ended = wait_for_keys(store, {complete_key(meeting)}, std::clamp(left, 0.0, kLookEvery_s));
    Entries arrived = entries(store, meeting);
    const std::vector<int64_t> missing = missing_ranks(meeting, arrived);
    if (missing.empty()) return arrived;  // otherwise the last one came just now
    const double waited = monotonic_seconds() - started;
    if (ended) throw_reason(store, meeting);
    if (ended) throw_missing(meeting, missing, waited, " before the host of the store gave up");
    if (waited >= meeting.timeout_s) throw_missing(meeting, missing, waited, "");
    if (waited < next_report) continue;
    next_report = waited + kReportEvery_s;
    log_info("waiting {} for {} ({:.0f} s)", meeting.where, names_of(missing, meeting), waited);
  }
}

[[noreturn]] void throw_store_lost(const Meeting& meeting, const c10::Error& error) {
  throw StoreLost(
      "[{}] rank {} lost the connection to the store while waiting for the other ranks {} ({}); check that "
      "the rank or agent that hosts the store is still running and that its host is reachable",
      meeting.op, meeting.rank, meeting.where, cause_of(error));
}

/// One meeting for each key that this rank sets.
class ExchangeStore final : public c10d::Store {
 public:
  ExchangeStore(c10::intrusive_ptr<c10d::Store> store, Meeting meeting)
      : Store(std::chrono::milliseconds(std::llround(meeting.timeout_s * 1000.0))),
        store_(std::move(store)),
        meeting_(std::move(meeting)),
        place_(meeting_.place) {}

  c10::intrusive_ptr<c10d::Store> clone() override { return store_->clone(); }

  using Store::set;
  void set(const std::string& key, const Bytes& value) override {
    const std::lock_guard lock(mutex_);
    complete();
    meeting_.place = fmt::format("{}/{}", place_, round_++);
    comm::arrive(*store_, meeting_, fmt::format("{}\n{}", key, std::string(value.begin(), value.end())));
    under_way_ = true;
  }
  Bytes get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    if (!values_.contains(key)) complete();
    const auto found = values_.find(key);
    return found == values_.end() ? store_->get(key) : found->second;
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    std::vector<Bytes> values;
    for (const std::string& key : keys) values.push_back(get(key));
    return values;
  }
  bool check(const std::vector<std::string>& keys) override {
    const std::lock_guard lock(mutex_);
    const auto known = [this](const std::string& key) { return values_.contains(key); };
    return std::ranges::all_of(keys, known) || store_->check(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    const std::lock_guard lock(mutex_);
    complete();
    std::vector<std::string> others;
    for (const std::string& key : keys) {
      if (!values_.contains(key)) others.push_back(key);
    }
    if (!others.empty()) store_->wait(others, timeout);
  }
  int64_t add(const std::string& key, int64_t value) override { return store_->add(key, value); }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  bool hasExtendedApi() const override { return true; }

 private:
  /// Ends the meeting under way, if there is one, and learns its values.
  void complete() {
    if (!std::exchange(under_way_, false)) return;
    for (const auto& [rank, text] : wait_until_complete(*store_, meeting_)) {
      const size_t key_end = text.find('\n');
      if (key_end == std::string::npos) continue;
      values_[text.substr(0, key_end)] =
          Bytes(text.begin() + static_cast<std::ptrdiff_t>(key_end) + 1, text.end());
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  Meeting meeting_;
  std::string place_;
  std::mutex mutex_;
  int64_t round_ = 0;
  bool under_way_ = false;
  std::map<std::string, Bytes> values_;
};

}  // namespace

std::string to_entry(int64_t rank, const std::string& text) {
  return fmt::format("{} {}\n{}", rank, text.size(), text);
}

std::map<int64_t, std::string> parse_entries(const std::string& log) {
  std::map<int64_t, std::string> texts;
  std::string_view rest = log;
  while (!rest.empty()) {
    const char* const end = rest.data() + rest.size();
    int64_t rank = 0;
    size_t size = 0;
    const auto after_rank = std::from_chars(rest.data(), end, rank);
    if (after_rank.ec != std::errc() || after_rank.ptr == end || *after_rank.ptr != ' ') break;
    const auto after_size = std::from_chars(after_rank.ptr + 1, end, size);
    if (after_size.ec != std::errc() || after_size.ptr == end || *after_size.ptr != '\n') break;
    const char* const text = after_size.ptr + 1;
    if (size > static_cast<size_t>(end - text)) break;
    texts[rank] = std::string(text, size);
    rest = std::string_view(text + size, static_cast<size_t>(end - text) - size);
  }
  return texts;
}

bool wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, double timeout_s) {
  // Zero would mean "for ever" to the store.
  const auto timeout = std::chrono::milliseconds(std::max<int64_t>(1, std::llround(timeout_s * 1000.0)));
  try {
    store.wait(keys, timeout);
    return true;
  } catch (const c10::DistStoreError&) {
    return false;
  }
}

std::vector<std::string> meet(c10d::Store& store, const Meeting& meeting, const std::string& text) {
  try {
    arrive(store, meeting, text);
    Entries arrived = wait_until_complete(store, meeting);
    std::vector<std::string> texts;
    for (const int64_t rank : meeting.ranks) texts.push_back(std::move(arrived[rank]));
    return texts;
  } catch (const c10::Error& error) {
    throw_store_lost(meeting, error);
  }
}

void end_meeting(c10d::Store& store, const Meeting& meeting, const std::string& reason) noexcept {
  try {
    // The first reason stands: a rank that hears it ends the meeting, too.
    store.compareSet(complete_key(meeting), {},
                     reason.empty() ? Bytes{1} : Bytes(reason.begin(), reason.end()));
  } catch (const std::exception&) {
    // Whoever waits has lost the store, and says so.
  }
}

c10::intrusive_ptr<c10d::Store> exchange_through_meetings(c10::intrusive_ptr<c10d::Store> store,
                                                          Meeting meeting) {
  return c10::make_intrusive<ExchangeStore>(std::move(store), std::move(meeting));
}

}  // namespace trireme::comm
