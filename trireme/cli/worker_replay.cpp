// trireme-worker replay: a rank of a controller's program that is run again without its client.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/cli/request.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/agree.h"
#include "trireme/comm/world.h"
#include "trireme/controller/worker_replay.h"
#include "trireme/plan/program_bytes.h"
#include "trireme/report/timeline.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

/// JSON has no word for NaN and infinities, which are texts here.
Json number_or_text(double value) {
  return std::isfinite(value) ? Json(value) : Json(fmt::format("{}", value));
}

std::string in_words(const Json& value) {
  return value.is_string() ? value.get<std::string>() : fmt::format("{:.9g}", value.get<double>());
}

Json to_json(const controller::ReplayOutcome& outcome) {
  Json fetched = Json::array();
  for (const controller::ReplayedValue& one : outcome.fetched) {
    Json first = Json::array();
    for (const double value : one.first) first.push_back(number_or_text(value));
    fetched.push_back({{"number", one.number}, {"elements", one.elements}, {"first", first}});
  }
  Json times = Json::array();
  for (const controller::ReplayedTime& one : outcome.times)
    times.push_back({static_cast<double>(one.instruction), one.begin, one.end});
  return {
      {"seconds", outcome.seconds}, {"hash", hex64(outcome.hash)}, {"fetched", fetched}, {"times", times}};
}

/// The words of a legend, by the kind of an instruction.
const std::vector<std::string> kReplayKinds = {"operations", "messages", "backward", "updates", "values"};

size_t kind_of(const plan::Instruction& one) {
  switch (one.kind) {
    case plan::InstructionKind::kOp:
      return one.op == plan::Op::kSgd || one.op == plan::Op::kAdamw ? 3 : 0;
    case plan::InstructionKind::kCross:
      return 1;
    case plan::InstructionKind::kBackward:
    case plan::InstructionKind::kWeights:
    case plan::InstructionKind::kGradient:
      return 2;
    default:
      return 4;
  }
}

/// Instructions of each worker, as they were run.
class ReplayTimeline {
 public:
  ReplayTimeline(const plan::Program& program, const std::vector<Json>& said) : program_(program) {
    for (const Json& one : said) rows_.push_back(one["times"].get<std::vector<std::vector<double>>>());
    double first = std::numeric_limits<double>::max();
    for (const auto& row : rows_) first = row.empty() ? first : std::min(first, row.front()[1]);
    for (auto& row : rows_)
      for (auto& time : row) time = {time[0], time[1] - first, time[2] - first};
  }

  /// The shares of the workers' time that instructions of each kind have, waits for others included.
  Json shares() const {
    std::vector<double> seconds(kReplayKinds.size());
    double whole = 0.0;
    for (const auto& row : rows_) {
      for (const auto& time : row) seconds[kind_of(instruction(time))] += time[2] - time[1];
      whole += row.empty() ? 0.0 : row.back()[2];
    }
    Json shares = Json::object();
    for (size_t kind = 0; kind < seconds.size(); ++kind)
      shares[kReplayKinds[kind]] = whole > 0.0 ? seconds[kind] / whole : 0.0;
    return shares;
  }

  void write(const std::string& folder) const {
    std::filesystem::create_directories(folder);
    write_file_atomic(folder + "/timeline.svg", report::draw_svg(picture()));
    write_file_atomic(folder + "/trace.json", trace());
  }

 private:
  const plan::Instruction& instruction(const std::vector<double>& time) const {
    return program_.instructions.at(static_cast<size_t>(time[0]));
  }

  /// Neighbours of one kind are one bar.
  report::Timeline picture() const {
    constexpr double kGap_s = 5e-5, kMs = 1e3;
    report::Timeline timeline{.title = fmt::format("{} instructions", program_.instructions.size()),
                              .kinds = kReplayKinds,
                              .rows = {},
                              .unit = "ms"};
    for (size_t worker = 0; worker < rows_.size(); ++worker) {
      report::TimelineRow row{.name = fmt::format("worker {}", worker), .bars = {}, .note = {}};
      for (const auto& time : rows_[worker]) {
        const size_t kind = kind_of(instruction(time));
        const bool joins = !row.bars.empty() && row.bars.back().kind == kind &&
                           kMs * (time[1] - kGap_s) <= row.bars.back().end;
        if (joins) {
          row.bars.back().end = kMs * time[2];
        } else {
          row.bars.push_back({.begin = kMs * time[1], .end = kMs * time[2], .label = {}, .kind = kind});
        }
      }
      timeline.rows.push_back(std::move(row));
    }
    return timeline;
  }

  std::string trace() const {
    constexpr double kMicroseconds = 1e6;
    Json events = Json::array();
    for (size_t worker = 0; worker < rows_.size(); ++worker) {
      events.push_back({{"name", "thread_name"},
                        {"ph", "M"},
                        {"pid", 0},
                        {"tid", worker},
                        {"args", {{"name", fmt::format("worker {}", worker)}}}});
      for (const auto& time : rows_[worker])
        events.push_back({{"name", to_text(instruction(time), program_.signals)},
                          {"cat", kReplayKinds[kind_of(instruction(time))]},
                          {"ph", "X"},
                          {"pid", 0},
                          {"tid", worker},
                          {"ts", kMicroseconds * time[1]},
                          {"dur", kMicroseconds * (time[2] - time[1])}});
    }
    return Json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
  }

  const plan::Program& program_;
  std::vector<std::vector<std::vector<double>>> rows_;  ///< by worker: instruction, begin and end in seconds
};

/// The outcomes of all ranks, by rank.
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
    std::vector<std::string> first;
    for (const Json& value : one["first"]) first.push_back(in_words(value));
    fmt::print("fetch {:<4}{}{}\n", one["number"].get<int64_t>(), join(first, " "),
               elements > 4 ? fmt::format(" ... of {} elements", elements) : "");
  }
  if (shown > kMostFetches)
    fmt::print("          and {} more, which --json has\n", document["fetched"].size() - kMostFetches);
  fmt::print("time      {:.3f} s, {:.0f} instructions/s\n", document["seconds"].get<double>(),
             document["instructions"].get<double>() / document["seconds"].get<double>());
  std::vector<std::string> bytes;
  for (const Json& one : document["most_bytes"]) bytes.push_back(format_bytes(one.get<double>()));
  fmt::print("tensors   at most {} on workers 0, 1, ...\n", join(bytes, ", "));
  if (document.contains("shares")) {
    std::vector<std::string> shares;
    for (const auto& [kind, share] : document["shares"].items())
      shares.push_back(fmt::format("{} {:.0f}%", kind, 100.0 * share.get<double>()));
    fmt::print("workers   {}, waits for others included\n", join(shares, ", "));
  }
  fmt::print("hash      {} on all workers\n", document["hash"].get<std::string>());
}

}  // namespace

int worker_replay(const Request& request, const Environment& environment) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  const ReplayOptions& options = request.replay;
  const auto device = plan::parse<plan::Device>(options.device);
  TRIREME_CHECK(device, "[cli.replay] the request has no valid device: '{}'", options.device);
  const auto world = comm::World::join(spec, comm::take_device(*device, spec), 300.0);
  plan::Program program = plan::load_program(options.file);
  plan::number_workers(program);
  const Json mine = to_json(controller::replay_program(*world, program,
                                                       {.name = options.file,
                                                        .random_values = options.values != "zeros",
                                                        .seed = options.seed,
                                                        .is_explicit = options.is_explicit,
                                                        .timed = !options.timeline.empty()},
                                                       environment));
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
  Json document = {{"schema", "trireme.replay/1"},
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
  if (!options.timeline.empty()) {
    const ReplayTimeline timeline(program, said);
    timeline.write(options.timeline);
    document["shares"] = timeline.shares();
  }
  request.json ? fmt::print("{}\n", document.dump(2)) : print(document);
  return 0;
}

}  // namespace trireme::cli
