#pragma once
// Schedules made in time: every rank chooses its next pass when it is free. Private to plan/*.cpp.
#include <optional>
#include <set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/plan/pass_times.h"

namespace trireme::plan {

/// The passes that ranks of a kind, each made of `given`, `costs`, its number and `more`, choose as time goes
/// on. Throws ConfigError when one of them cannot go on.
template <typename Rank, typename... More>
Schedule scheduled_in_time(const Schedule& given, const PassCosts& costs, const More&... more) {
  check_lengths(given, costs);
  Schedule schedule = given;
  for (auto& passes : schedule.ranks) passes.clear();
  Progress progress(schedule, costs);
  std::vector<RankClock> clocks(given.ranks.size());
  std::vector<Rank> ranks;
  for (size_t rank = 0; rank < given.ranks.size(); ++rank)
    ranks.emplace_back(given, costs, static_cast<int64_t>(rank), more...);
  std::set<double> times = {0.0};  // at which something may begin
  while (!times.empty()) {
    const double time = *times.begin();
    times.erase(times.begin());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (clocks[rank].free_at() > time) continue;
      const auto pass = ranks[rank].choose(progress, time, clocks[rank].promised());
      if (!pass) continue;
      const double end = clocks[rank].run(*pass, time, duration(*pass, costs), costs);
      progress.end(*pass, end);
      schedule.ranks[rank].push_back(*pass);
      times.insert({end, end + costs.transfer});
    }
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].done()) continue;
    throw ConfigError(
        "[plan.schedule] rank {} cannot continue within a limit of {:g} for activations; raise the limit, or "
        "use more ranks or smaller micro-batches",
        rank, costs.memory_limit);
  }
  return schedule;
}

}  // namespace trireme::plan
