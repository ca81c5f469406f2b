#include "trireme/cli/status_view.h"

#include <fmt/format.h>

#include <algorithm>

#include "trireme/base/text.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

/// "waits for 3 of 4 workers", "pid 77 on node1 has submitted 1,234 instructions", "no client".
std::string state_of(const controller::Status& status) {
  const int64_t missing = status.wanted_workers - static_cast<int64_t>(status.workers.size());
  if (missing > 0) return fmt::format("waits for {} of {} workers", missing, status.wanted_workers);
  if (status.client_pid == 0) return "no client";
  return fmt::format("client: pid {} on {}, which has submitted {} instructions", status.client_pid,
                     status.client_host, with_commas(static_cast<int64_t>(status.submitted)));
}

std::string rate_text(double rate) {
  return with_commas(static_cast<int64_t>(rate + 0.5)) + "/s";
}

}  // namespace

std::string status_text(const std::string& address, const controller::Status& status,
                        const std::vector<double>& rates, int64_t columns) {
  std::string text =
      fmt::format("{}: pid {}, Trireme {}, up {}; {}\n", address, status.pid, status.version,
                  format_duration(1e-3 * static_cast<double>(status.uptime_ms)), state_of(status));
  if (status.workers.empty()) return text;
  using report::Align;
  std::vector<report::Column> titles = {
      {"worker", Align::kRight}, {"pid", Align::kRight}, {"host"}, {"devices"}, {"executed", Align::kRight}};
  if (!rates.empty()) titles.push_back({"rate", Align::kRight});
  titles.insert(titles.end(),
                {{"behind", Align::kRight}, {"queued", Align::kRight}, {"heard", Align::kRight}});
  report::Table table(std::move(titles));
  for (size_t i = 0; i < status.workers.size(); ++i) {
    const controller::WorkerStatus& one = status.workers[i];
    const uint64_t behind = status.submitted - std::min(status.submitted, one.executed);
    std::vector<std::string> cells = {std::to_string(one.worker.number), std::to_string(one.worker.pid),
                                      one.worker.host, one.worker.devices,
                                      with_commas(static_cast<int64_t>(one.executed))};
    if (!rates.empty()) cells.push_back(rate_text(rates.at(i)));
    cells.push_back(with_commas(static_cast<int64_t>(behind)));
    cells.push_back(format_bytes(static_cast<double>(one.queued_bytes)));
    cells.push_back(fmt::format("{} ms ago", one.last_seen_ms));
    table.add_row(std::move(cells));
  }
  return text + table.to_string(columns);
}

std::vector<double> rates_between(const controller::Status& before, const controller::Status& now,
                                  double seconds) {
  std::vector<double> rates;
  for (const controller::WorkerStatus& one : now.workers) {
    const auto same = std::ranges::find(before.workers, one.worker, &controller::WorkerStatus::worker);
    const bool goes_on = same != before.workers.end() && now.session == before.session && seconds > 0.0 &&
                         one.executed >= same->executed;
    rates.push_back(goes_on ? static_cast<double>(one.executed - same->executed) / seconds : 0.0);
  }
  return rates;
}

}  // namespace trireme::cli
