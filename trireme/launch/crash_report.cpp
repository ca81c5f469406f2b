#include "trireme/launch/crash_report.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::launch {
namespace {

const Flight* flight_of(const JobEnd& end, int64_t rank) {
  const bool known = rank >= 0 && rank < static_cast<int64_t>(end.flights.size());
  return known ? &end.flights[static_cast<size_t>(rank)] : nullptr;
}

/// The number of the last operation of `group` that the rank has begun; 0: none that is known.
int64_t begun(const Flight& flight, const std::string& group) {
  int64_t last = 0;
  for (const FlightEntry& entry : flight.entries) {
    if (entry.group == group) last = std::max(last, entry.sequence);
  }
  return last;
}

const FlightEntry* waiting_in(const Flight* flight) {
  if (flight == nullptr || flight->entries.empty() || flight->entries.back().state == 'd') return nullptr;
  return &flight->entries.back();
}

std::string name_of(const FlightEntry& entry) {
  return fmt::format("{} #{}{}{} of group {}", entry.operation, entry.sequence,
                     entry.subject.empty() ? "" : " for ", entry.subject, entry.group);
}

std::string numbers(const std::vector<int64_t>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string ending(const RankExit& exit) {
  if (exit.stuck == 0 || exit.hung_s > 0) return describe(exit);
  return fmt::format("rank {} (pid {}) did not stop when told to and was killed ({})", exit.rank, exit.pid,
                     state_in_words(exit.stuck));
}

std::string what_it_did(const FlightEntry& entry, const std::vector<int64_t>& missed, double now) {
  const double age = std::max(0.0, now - entry.since);
  if (entry.state == 'd') return fmt::format("had finished {} {:.1f} s earlier", name_of(entry), age);
  const std::string whom = missed.empty() ? "" : ", waiting for " + numbers(missed);
  return entry.state == 'f' ? fmt::format("gave up on {} {:.1f} s earlier{}", name_of(entry), age, whom)
                            : fmt::format("was in {} for {:.1f} s{}", name_of(entry), age, whom);
}

std::string earlier(const Flight& flight) {
  std::vector<std::string> names;
  for (size_t i = flight.entries.size() - 1; i-- > 0;) names.push_back(name_of(flight.entries[i]));
  return names.empty() ? "" : "    before that: " + join(names, "; ") + "\n";
}

std::string about_rank(const JobEnd& end, const RankExit& exit, double now) {
  std::string text = "  " + ending(exit) + "\n";
  const Flight* const flight = flight_of(end, exit.rank);
  if (flight == nullptr) return text;
  if (flight->entries.empty()) {
    return text + (flight->joined ? "    it had not communicated yet\n"
                                  : "    it had not joined the other ranks yet, or it is the only rank\n");
  }
  return text + "    it " + what_it_did(flight->entries.back(), missed_by(end, exit.rank), now) + "\n" +
         earlier(*flight);
}

}  // namespace

std::vector<int64_t> missed_by(const JobEnd& end, int64_t rank) {
  std::vector<int64_t> missed;
  const Flight* const mine = flight_of(end, rank);
  const FlightEntry* const entry = waiting_in(mine);
  if (entry == nullptr) return missed;
  const auto group = mine->groups.find(entry->group);
  if (group == mine->groups.end()) return missed;
  for (const int64_t other : group->second) {
    const Flight* const flight = flight_of(end, other);
    if (other != rank && flight != nullptr && begun(*flight, entry->group) < entry->sequence)
      missed.push_back(other);
  }
  return missed;
}

int64_t first_to_fail(const JobEnd& end) {
  TRIREME_CHECK(end.cause, "[launch.first_to_fail] there are no failures to take the first of");
  if (!lost_a_peer(*end.cause)) return end.cause->rank;
  const std::vector<int64_t> missed = missed_by(end, end.cause->rank);
  std::vector<int64_t> stuck;
  for (const RankExit& exit : end.exits) {
    if (exit.stuck != 0) stuck.push_back(exit.rank);
  }
  // A rank may also stand still inside of what the others wait in.
  const auto found = std::ranges::find_first_of(stuck, missed);
  if (found != stuck.end()) return *found;
  return stuck.empty() ? end.cause->rank : stuck.front();
}

std::string cause_in_words(const JobEnd& end) {
  TRIREME_CHECK(end.cause, "[launch.cause_in_words] there is no failure to name the cause of");
  const RankExit& cause = *end.cause;
  std::string text = describe(cause);
  if (!lost_a_peer(cause)) return text;
  if (const std::vector<int64_t> missed = missed_by(end, cause.rank); !missed.empty()) {
    text += fmt::format(": it was waiting for {} in {}", numbers(missed),
                        name_of(*waiting_in(flight_of(end, cause.rank))));
  }
  for (const RankExit& exit : end.exits) {
    if (exit.stuck != 0) text += "; " + ending(exit);
  }
  return text;
}

std::string crash_report(const JobEnd& end, double now) {
  std::string text = cause_in_words(end) + "\n\nWhat each rank was doing last:\n";
  std::vector<RankExit> exits = end.exits;
  std::ranges::sort(exits, {}, &RankExit::rank);
  for (const RankExit& exit : exits) text += about_rank(end, exit, now);
  return text;
}

}  // namespace trireme::launch
