#include <fmt/format.h>
#include <fmt/ranges.h>

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
                    {"ms", one.median_ms()},
                    {"gb_per_s", one.gb_per_s()},
                    {"samples_ms", one.calls_ms}});
  }
  return rows;
}

std::string to_text(const Times& times) {
  using report::Align;
  report::Table table(
      {{"MiB", Align::kRight}, {"collective"}, {"by"}, {"ms", Align::kRight}, {"GB/s", Align::kRight}});
  for (const bench::CollectiveTimes& one : times) {
    table.add_row({std::to_string(one.mib), one.operation, one.by, fmt::format("{:.3f}", one.median_ms()),
                   fmt::format("{:.1f}", one.gb_per_s())});
  }
  return table.to_string() + "GB/s: bytes that one rank receives in the operation, over the median time\n";
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
  if (world->rank() != 0) return 0;
  if (!request.json) {
    fmt::print("{}", to_text(times));
    return 0;
  }
  const Json document = {{"schema", "trireme.bench_comm/2"},
                         {"command", request.command},
                         {"device", world->device().is_cuda() ? kernels::gpus().front().name : "cpu"},
                         {"ranks", world->size()},
                         {"rounds", request.bench_comm.rounds},
                         {"rows", to_json(times)}};
  fmt::print("{}\n", document.dump(2));
  return 0;
}

}  // namespace trireme::cli
