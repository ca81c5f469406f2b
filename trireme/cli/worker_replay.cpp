// trireme-worker replay: a rank of a controller's program that is run again without its client.
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/cli/request.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/agree.h"
#include "trireme/comm/world.h"
#include "trireme/controller/worker_replay.h"
#include "trireme/plan/program_bytes.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const controller::ReplayOutcome& outcome) {
  Json fetched = Json::array();
  for (const controller::ReplayedValue& one : outcome.fetched)
    fetched.push_back({{"number", one.number}, {"elements", one.elements}, {"first", one.first}});
  return {{"seconds", outcome.seconds}, {"hash", hex64(outcome.hash)}, {"fetched", fetched}};
}

/// What the ranks have to say of a run, by rank.
std::vector<Json> of_all_ranks(comm::World& world, const Json& mine) {
  std::vector<int64_t> ranks(static_cast<size_t>(world.size()));
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int64_t>(i);
  const std::shared_ptr<comm::Group> all = world.make_group("results of a replay", ranks);
  std::vector<Json> said;
  for (const int64_t rank : ranks)
    said.push_back(Json::parse(comm::text_of(*all, rank, rank == world.rank() ? mine.dump() : "")));
  return said;
}

void print(const Json& document) {
  constexpr size_t kMostFetches = 100;
  fmt::print("program   {}: {} instructions for {} workers on {}, inputs are {}\n",
             document["file"].get<std::string>(), document["instructions"].get<int64_t>(),
             document["workers"].get<int64_t>(), document["device"].get<std::string>(),
             document["values"].get<std::string>());
  size_t shown = 0;
  for (const Json& one : document["fetched"]) {
    if (++shown > kMostFetches) break;
    const auto elements = one["elements"].get<int64_t>();
    fmt::print("fetch {:<4}{:.9g}{}\n", one["number"].get<int64_t>(),
               fmt::join(one["first"].get<std::vector<double>>(), " "),
               elements > 4 ? fmt::format(" ... of {} elements", elements) : "");
  }
  if (shown > kMostFetches)
    fmt::print("          and {} more, which --json has\n", document["fetched"].size() - kMostFetches);
  fmt::print("time      {:.3f} s, {:.0f} instructions/s\n", document["seconds"].get<double>(),
             document["instructions"].get<double>() / document["seconds"].get<double>());
  std::vector<std::string> bytes;
  for (const Json& one : document["most_bytes"]) bytes.push_back(format_bytes(one.get<double>()));
  fmt::print("tensors   at most {} on workers 0, 1, ...\n", join(bytes, ", "));
  fmt::print("hash      {} on all workers\n", document["hash"].get<std::string>());
}

}  // namespace

int worker_replay(const Request& request, const Environment& environment) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  const ReplayOptions& options = request.replay;
  const auto device = plan::parse<plan::Device>(options.device);
  TRIREME_CHECK(device, "[cli.replay] the request has no valid device: '{}'", options.device);
  const auto world = comm::World::join(spec, comm::take_device(*device, spec), 300.0);
  const plan::Program program = plan::load_program(options.file);
  const Json mine = to_json(controller::replay_program(*world, program,
                                                       {.name = options.file,
                                                        .random_values = options.values != "zeros",
                                                        .seed = options.seed,
                                                        .is_explicit = options.is_explicit}));
  const std::vector<Json> said = of_all_ranks(*world, mine);
  if (world->rank() != 0) return 0;
  std::vector<Json> fetched;
  double seconds = 0.0;
  for (const Json& one : said) {
    seconds = std::max(seconds, one["seconds"].get<double>());
    for (const Json& value : one["fetched"]) fetched.push_back(value);
    if (one["hash"] != mine["hash"])
      throw LogicError("[cli.replay] workers have placed other programs: hashes {} and {}",
                       mine["hash"].get<std::string>(), one["hash"].get<std::string>());
  }
  std::ranges::sort(fetched, {}, [](const Json& one) { return one["number"].get<int64_t>(); });
  const Json document = {{"schema", "trireme.replay/1"},
                         {"command", request.command},
                         {"file", options.file},
                         {"device", world->device().is_cuda() ? "cuda" : "cpu"},
                         {"workers", world->size()},
                         {"instructions", program.instructions.size()},
                         {"values", options.values},
                         {"fetched", fetched},
                         {"seconds", seconds},
                         {"most_bytes", plan::program_bytes(program, world->size(), options.file)},
                         {"hash", mine["hash"]}};
  request.json ? fmt::print("{}\n", document.dump(2)) : print(document);
  return 0;
}

}  // namespace trireme::cli
