#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/streams.h"
#include "trireme/bench/collectives.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using Times = std::vector<bench::CollectiveTimes>;

Json to_json(const Times& times) {
  Json rows = Json::array();
  for (const bench::CollectiveTimes& one : times) {
    rows.push_back({{"operation", one.operation},
                    {"by", one.by},
                    {"mib", one.mib},
                    {"wire_bytes", one.wire_bytes},
                    {"in_place", one.in_place},
                    {"ms", one.median_ms()},
                    {"gb_per_s", one.gb_per_s()},
                    {"tensor_gb_per_s", one.tensor_gb_per_s()},
                    {"wrong", one.wrong},
                    {"samples_ms", one.calls_ms}});
  }
  return rows;
}

Json to_json(const std::vector<bench::PairTimes>& pairs) {
  Json rows = Json::array();
  for (const bench::PairTimes& one : pairs)
    rows.push_back(
        {{"from", one.from}, {"to", one.to}, {"latency_us", one.latency_us}, {"gb_per_s", one.gb_per_s}});
  return rows;
}

using report::Align;

/// Time, both bandwidths and wrong elements of one form of a collective; none: our group does not have it.
std::vector<std::string> cells_of(const bench::CollectiveTimes* one) {
  if (one == nullptr) return std::vector<std::string>(4, "n/a");
  return {fmt::format("{:.3f}", one->median_ms()), fmt::format("{:.1f}", one->tensor_gb_per_s()),
          fmt::format("{:.1f}", one->gb_per_s()), std::to_string(one->wrong)};
}

/// A line for each way of a collective, which stands out of place and in place beside each other.
std::string to_text(const Times& times) {
  std::vector<report::Column> columns = {{"MiB", Align::kRight}, {"collective"}, {"by"}};
  for (int form = 0; form < 2; ++form)
    for (const char* title : {"ms", "algbw", "busbw", "wrong"}) columns.push_back({title, Align::kRight});
  report::Table table(std::move(columns));
  for (auto one = times.begin(); one != times.end();) {
    const bench::CollectiveTimes& way = *one;
    std::array<const bench::CollectiveTimes*, 2> forms = {};  // out of place, in place
    for (; one != times.end() && one->is_same_way(way); ++one) forms[one->in_place ? 1 : 0] = &*one;
    std::vector<std::string> cells = {std::to_string(way.mib), way.operation, way.by};
    for (const auto* form : forms) std::ranges::move(cells_of(form), std::back_inserter(cells));
    table.add_row(std::move(cells));
  }
  const std::string rows = table.to_string();
  // Each form's name ends above its last column.
  const size_t first = rows.find("wrong") + 5, second = rows.find('\n') - first;
  return fmt::format("{:>{}}{:>{}}\n{}", "out of place", first, "in place", second, rows) +
         "algbw: GB/s of the whole tensor; busbw: of the bytes that one rank receives, nccl-tests' bus "
         "bandwidth;\nwrong: elements of all ranks; n/a: not a form of our collective for bf16 tensors\n";
}

/// A row for each sender, a column for each receiver.
std::string to_matrix(const std::vector<bench::PairTimes>& pairs, int64_t ranks, const std::string& title,
                      double bench::PairTimes::*value) {
  std::vector<report::Column> columns = {{title}};
  for (int64_t to = 0; to < ranks; ++to) columns.push_back({fmt::format("to {}", to), Align::kRight});
  report::Table table(std::move(columns));
  for (int64_t from = 0; from < ranks; ++from) {
    std::vector<std::string> cells = {fmt::format("from {}", from)};
    for (int64_t to = 0; to < ranks; ++to) {
      const auto pair = std::ranges::find_if(
          pairs, [&](const bench::PairTimes& one) { return one.from == from && one.to == to; });
      cells.push_back(pair == pairs.end() ? "-" : fmt::format("{:.1f}", (*pair).*value));
    }
    table.add_row(std::move(cells));
  }
  return table.to_string();
}

}  // namespace

int worker_bench_comm(const Request& request, const Environment& environment) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  const auto device = plan::parse<plan::Device>(request.bench_comm.device);
  TRIREME_CHECK(device, "[cli.bench] the request has no valid device: '{}'", request.bench_comm.device);
  const auto world = comm::World::join(spec, comm::take_device(*device, spec), 300.0);
  const int64_t rounds = request.bench_comm.rounds;
  const auto say_round = [&](int64_t round) {
    if (world->rank() == 0) write_stderr(fmt::format("bench: round {} of {} is done\n", round, rounds));
  };
  if (world->rank() == 0) {
    write_stderr(fmt::format("bench: {} rounds of collectives of {} MiB on {} ranks\n", rounds,
                             fmt::join(request.bench_comm.mib, ", "), world->size()));
  }
  const Times times = bench::time_collectives(world, request.bench_comm.mib, rounds, say_round);
  std::vector<bench::PairTimes> pairs;
  if (request.bench_comm.pairs)
    pairs = bench::time_pairs(world, std::ranges::max(request.bench_comm.mib), rounds);
  const bool right = std::ranges::all_of(times, [](const auto& one) { return one.wrong == 0; });
  const int code = static_cast<int>(right ? ExitCode::kOk : ExitCode::kComparison);
  if (world->rank() != 0) return code;
  if (!request.json) {
    fmt::print("{}", to_text(times));
    if (!pairs.empty())
      fmt::print("\n{}\n{}", to_matrix(pairs, world->size(), "GB/s", &bench::PairTimes::gb_per_s),
                 to_matrix(pairs, world->size(), "us, 4 bytes", &bench::PairTimes::latency_us));
    return code;
  }
  const Json document = {{"schema", "trireme.bench_comm/3"},
                         {"command", request.command},
                         {"device", world->device().is_cuda() ? kernels::gpus().front().name : "cpu"},
                         {"ranks", world->size()},
                         {"rounds", request.bench_comm.rounds},
                         {"rows", to_json(times)},
                         {"pairs", to_json(pairs)}};
  fmt::print("{}\n", document.dump(2));
  return code;
}

}  // namespace trireme::cli
