#include "trireme/comm/meeting.h"

#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/cause.h"

namespace trireme::comm {
namespace {

constexpr double kReportEvery_s = 10.0;

std::vector<std::string> keys_of(const Meeting& meeting) {
  std::vector<std::string> keys;
  for (const int64_t rank : meeting.ranks) keys.push_back(fmt::format("{}/{}", meeting.place, rank));
  return keys;
}

std::string missing_ranks(c10d::Store& store, const Meeting& meeting, const std::vector<std::string>& keys) {
  std::vector<int64_t> missing;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!store.check({keys[i]})) missing.push_back(meeting.ranks[i]);
  }
  return fmt::format("{} {} of {}", missing.size() == 1 ? "rank" : "ranks", fmt::join(missing, ", "),
                     keys.size());
}

void wait_for_all(c10d::Store& store, const Meeting& meeting, const std::vector<std::string>& keys) {
  const double started = monotonic_seconds();
  for (;;) {
    const double left = meeting.timeout_s - (monotonic_seconds() - started);
    if (wait_for_keys(store, keys, std::clamp(left, 0.0, kReportEvery_s))) return;
    const std::string missing = missing_ranks(store, meeting, keys);
    const double waited = monotonic_seconds() - started;
    if (waited >= meeting.timeout_s) {
      throw CommError(
          "[{}] rank {} waited {:.1f} s {} for {}, which did not arrive; look at their logs, and raise "
          "the timeout if they are only slow",
          meeting.op, meeting.rank, waited, meeting.where, missing);
    }
    log_info("waiting {} for {} ({:.0f} s)", meeting.where, missing, waited);
  }
}

}  // namespace

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
  const std::vector<std::string> keys = keys_of(meeting);
  try {
    store.set(fmt::format("{}/{}", meeting.place, meeting.rank), text);
    wait_for_all(store, meeting, keys);
    std::vector<std::string> texts;
    for (const auto& bytes : store.multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
    return texts;
  } catch (const c10::Error& error) {
    throw CommError(
        "[{}] rank {} lost the store {} while it waited for the others ({}); has the rank or the agent "
        "that hosts it died?",
        meeting.op, meeting.rank, meeting.where, cause_of(error));
  }
}

}  // namespace trireme::comm
