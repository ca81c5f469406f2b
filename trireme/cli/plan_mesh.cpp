#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/placement_view.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/words.h"
#include "trireme/plan/mesh_choices.h"
#include "trireme/plan/mesh_groups.h"
#include "trireme/plan/token_split.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using MeshJson = nlohmann::ordered_json;
using plan::Axis;
using plan::MeshChoice;
using plan::MeshShape;
using report::Align;

/// Every rank has a line in the JSON, and a group is looked for among all of them.
constexpr int64_t kMostRanksOfMesh = 16384;
constexpr int64_t kRanksShown = 64, kGroupsShown = 8;

struct MeshOptions {
  TrainJob job;
  std::string gpu;
  std::optional<double> tflops;
  std::vector<double> links;  ///< within a host, and between hosts
  std::optional<int64_t> host_ranks;
  bool all = false, json = false;
};

int64_t along(const MeshShape::Coordinates& at, Axis axis) {
  return at[static_cast<size_t>(axis)];
}

/// What a rank reads in each step.
struct Reads {
  plan::Range sequences;
  std::vector<plan::Range> tokens;
};

Reads reads_of(const RunPlan& run, const plan::Config& config, int64_t rank) {
  const int64_t share = run.batch.global_batch / run.batch.dp_size, first = run.mesh.dp_rank(rank) * share;
  const plan::TokenSplit tokens = plan::token_split(config, along(run.mesh.coordinates(rank), Axis::kCp));
  return {{first, first + share}, tokens.ranges(config.data.seq_len)};
}

std::string reads_text(const RunPlan& run, const plan::Config& config, int64_t rank) {
  const Reads reads = reads_of(run, config, rank);
  const bool images = plan::reads_images(config.model.family);
  std::string text = fmt::format("{} {} to {} of {}", images ? "images" : "sequences", reads.sequences.begin,
                                 reads.sequences.end - 1, run.batch.global_batch);
  if (run.mesh.size(Axis::kCp) == 1) return text;
  std::vector<std::string> pieces;
  for (const plan::Range& range : reads.tokens)
    pieces.push_back(fmt::format("{} to {}", range.begin, range.end - 1));
  return text + fmt::format(", tokens {} of each", join(pieces, " and "));
}

std::vector<int64_t> stages_of_rank(const RunPlan& run, int64_t rank) {
  if (!run.pipeline) return {0};
  return run.pipeline->schedule.stages_of(along(run.mesh.coordinates(rank), Axis::kPp));
}

std::string stages_text(const RunPlan& run, int64_t rank) {
  if (!run.pipeline) return "the whole model";
  std::vector<std::string> texts;
  for (const int64_t stage : stages_of_rank(run, rank)) texts.push_back(stage_text(run, stage));
  return join(texts, "; ");
}

/// "0 2 4 6", or "0 to 56 by 8" where there are more.
std::string group_text(const std::vector<int64_t>& ranks) {
  constexpr size_t kMostListed = 8;
  if (ranks.size() <= kMostListed) return fmt::format("{}", fmt::join(ranks, " "));
  const int64_t step = ranks[1] - ranks[0];
  for (size_t at = 1; at < ranks.size(); ++at) {
    if (ranks[at] - ranks[at - 1] != step) return fmt::format("{}", fmt::join(ranks, " "));
  }
  return fmt::format("{} to {}{}", ranks.front(), ranks.back(), step == 1 ? "" : fmt::format(" by {}", step));
}

std::string axes_text(const std::vector<Axis>& axes) {
  std::vector<std::string> names;
  for (const Axis axis : axes) names.emplace_back(plan::kAxisNames[static_cast<size_t>(axis)]);
  return join(names, ", ");
}

std::string ranks_table(const RunPlan& run, const plan::Config& config, int64_t columns) {
  std::vector<size_t> axes;
  std::vector<report::Column> titles = {{"rank", Align::kRight}};
  for (size_t axis = 0; axis < plan::kAxes; ++axis) {
    if (run.mesh.size(static_cast<Axis>(axis)) == 1) continue;
    axes.push_back(axis);
    titles.push_back({std::string(plan::kAxisNames[axis]), Align::kRight});
  }
  titles.push_back({run.pipeline ? "stages" : "holds"});
  titles.push_back({"reads"});
  report::Table table(titles);
  const int64_t shown = std::min(run.ranks, kRanksShown);
  for (int64_t rank = 0; rank < shown; ++rank) {
    const MeshShape::Coordinates at = run.mesh.coordinates(rank);
    std::vector<std::string> row = {std::to_string(rank)};
    for (const size_t axis : axes) row.push_back(std::to_string(at[axis]));
    row.push_back(stages_text(run, rank));
    row.push_back(reads_text(run, config, rank));
    table.add_row(row);
  }
  const std::string more =
      shown < run.ranks ? fmt::format("{} more ranks; --json has all\n", run.ranks - shown) : "";
  return table.to_string(columns) + more;
}

std::string groups_table(const MeshShape& mesh, int64_t columns) {
  const std::vector<plan::MeshGroups> kinds = plan::mesh_groups(mesh);
  if (kinds.empty()) return "";
  report::Table table({{"group"}, {"along"}, {"ranks"}, {"for"}});
  for (const plan::MeshGroups& kind : kinds) {
    std::vector<std::string> groups;
    const size_t shown = std::min<size_t>(kind.ranks.size(), kGroupsShown);
    for (size_t group = 0; group < shown; ++group) groups.push_back(group_text(kind.ranks[group]));
    if (shown < kind.ranks.size()) groups.push_back(fmt::format("{} more", kind.ranks.size() - shown));
    table.add_row(
        {std::string(kind.name), axes_text(kind.axes), join(groups, " | "), std::string(kind.purpose)});
  }
  return "\n" + table.to_string(columns);
}

/// How ranks along cp attend to tokens of others.
std::string context_text(const plan::Config& config) {
  const plan::CpKind kind = plan::settled_cp_kind(config);
  return fmt::format("{} (parallel.cp_kind={}): {}", kind, config.parallel.cp_kind,
                     kind == plan::CpKind::kRing ? "keys and values go around the ranks along cp"
                                                 : "ranks along cp exchange tokens for heads");
}

std::string mesh_text(const RunPlan& run, const plan::Config& config, int64_t columns) {
  report::Table table({{"mesh"}, {config.name}});
  table.add_row({"ranks", fmt::format("{} on {}, {}", run.ranks, run.device, run.mesh.to_string())});
  table.add_row({"batch", fmt::format("{} = {} micro-batch x {} micro-batches x {} data-parallel ranks",
                                      run.batch.global_batch, run.batch.micro_batch, run.batch.accumulation,
                                      run.batch.dp_size)});
  if (config.parallel.cp > 1) table.add_row({"attention", context_text(config)});
  return table.to_string(columns) + "\n" + ranks_table(run, config, columns) +
         groups_table(run.mesh, columns);
}

MeshJson mesh_json(const RunPlan& run, const plan::Config& config) {
  MeshJson ranks = MeshJson::array(), groups = MeshJson::array();
  for (int64_t rank = 0; rank < run.ranks; ++rank) {
    const MeshShape::Coordinates at = run.mesh.coordinates(rank);
    MeshJson coordinates;
    for (size_t axis = 0; axis < plan::kAxes; ++axis)
      coordinates[std::string(plan::kAxisNames[axis])] = at[axis];
    const Reads reads = reads_of(run, config, rank);
    MeshJson tokens = MeshJson::array();
    for (const plan::Range& range : reads.tokens) tokens.push_back({range.begin, range.end});
    ranks.push_back({{"rank", rank},
                     {"coordinates", coordinates},
                     {"dp_rank", run.mesh.dp_rank(rank)},
                     {"sequences", {reads.sequences.begin, reads.sequences.end}},
                     {"tokens", tokens},
                     {"stages", stages_of_rank(run, rank)}});
  }
  for (const plan::MeshGroups& kind : plan::mesh_groups(run.mesh)) {
    MeshJson axes = MeshJson::array();
    for (const Axis axis : kind.axes) axes.push_back(plan::kAxisNames[static_cast<size_t>(axis)]);
    groups.push_back({{"name", kind.name}, {"axes", axes}, {"purpose", kind.purpose}, {"ranks", kind.ranks}});
  }
  return {
      {"schema", "trireme.mesh/2"},
      {"name", config.name},
      {"mesh", run.mesh.to_string()},
      {"cp_kind", config.parallel.cp > 1 ? MeshJson(plan::name(plan::settled_cp_kind(config))) : MeshJson()},
      {"ranks", ranks},
      {"groups", groups}};
}

plan::RankSpeed speed_for(const MeshOptions& options, plan::Device device) {
  constexpr double kTera = 1e12, kGiga = 1e9;
  plan::RankSpeed speed = plan::usual_speed(device);
  if (options.tflops) speed.flops = kTera * *options.tflops;
  if (!options.links.empty()) speed.bytes = kGiga * options.links.front(), speed.bytes_between = speed.bytes;
  if (options.links.size() > 1) speed.bytes_between = kGiga * options.links.back();
  if (options.host_ranks) speed.host_ranks = *options.host_ranks;
  return speed;
}

std::string speed_text(const plan::RankSpeed& speed, int64_t ranks) {
  std::string text = fmt::format("{:g} TFLOP/s and {:g} GB/s a rank", speed.flops / 1e12, speed.bytes / 1e9);
  if (ranks > speed.host_ranks)
    text += fmt::format(", {:g} GB/s between hosts of {} ranks", speed.bytes_between / 1e9, speed.host_ranks);
  return text + "; the products of matrices count, also those that backward computes again";
}

std::vector<std::string> sizes_of(const MeshShape& mesh) {
  return {std::to_string(mesh.size(Axis::kPp)), std::to_string(mesh.dp_size()),
          std::to_string(mesh.size(Axis::kCp)), std::to_string(mesh.size(Axis::kTp))};
}

std::string none_or_bytes(int64_t bytes) {
  return bytes == 0 ? "-" : bytes_text(bytes);
}

std::string seconds_text(double seconds) {
  return seconds < 1.0 ? fmt::format("{:.3g} ms", 1e3 * seconds) : fmt::format("{:.3g} s", seconds);
}

/// What one rank may take of the memory that is there; 0: not known.
int64_t memory_of_rank(const DeviceMemory& there) {
  return there.bytes / there.ranks;
}

std::string choices_table(const std::vector<MeshChoice>& choices, int64_t memory, int64_t columns) {
  report::Table table({{"pp", Align::kRight},
                       {"dp", Align::kRight},
                       {"cp", Align::kRight},
                       {"tp", Align::kRight},
                       {"micro-batches"},
                       {"peak", Align::kRight},
                       {"fits"},
                       {"data", Align::kRight},
                       {"tp sends", Align::kRight},
                       {"cp sends", Align::kRight},
                       {"stages", Align::kRight},
                       {"idle", Align::kRight},
                       {"lost", Align::kRight},
                       {"step", Align::kRight}});
  for (const MeshChoice& choice : choices) {
    if (!choice.works()) continue;
    std::vector<std::string> row = sizes_of(choice.mesh);
    row.push_back(fmt::format("{} x {}", choice.batch.accumulation, choice.batch.micro_batch));
    row.push_back(bytes_text(choice.needed.peak()));
    row.emplace_back(memory == 0 ? "-" : choice.fits(memory) ? "yes" : "no");
    const bool ring = choice.mesh.size(Axis::kCp) > 1 && choice.cp_kind == plan::CpKind::kRing;
    row.push_back(none_or_bytes(choice.sent.data));
    row.push_back(none_or_bytes(choice.sent.tp));
    row.push_back(none_or_bytes(choice.sent.cp) + (ring ? " (ring)" : ""));
    row.push_back(none_or_bytes(choice.sent.stages));
    row.push_back(choice.mesh.size(Axis::kPp) == 1 ? "-" : percent(choice.idle));
    row.push_back(percent(choice.lost()));
    row.push_back(seconds_text(choice.seconds()));
    table.add_row(row);
  }
  return table.to_string(columns);
}

std::string refused_table(const std::vector<MeshChoice>& choices, int64_t columns) {
  report::Table table({{"pp", Align::kRight},
                       {"dp", Align::kRight},
                       {"cp", Align::kRight},
                       {"tp", Align::kRight},
                       {"refused, because"}});
  bool any = false;
  for (const MeshChoice& choice : choices) {
    if (choice.works()) continue;
    std::vector<std::string> row = sizes_of(choice.mesh);
    row.push_back(choice.obstacle);
    table.add_row(row);
    any = true;
  }
  return any ? "\n" + table.to_string(columns) : "";
}

std::string choices_text(const PlannedRanks& ranks, const std::vector<MeshChoice>& choices,
                         const plan::RankSpeed& speed, int64_t columns) {
  const int64_t memory = memory_of_rank(ranks.there);
  report::Table table({{"meshes"}, {ranks.config.config.name}});
  table.add_row({"ranks", fmt::format("{} on {}{}", ranks.count, ranks.device,
                                      memory == 0 ? "" : fmt::format(", {} each", bytes_text(memory)))});
  table.add_row({"order",
                 "what fits first, then by what is lost: the share of a step in which a rank is idle or "
                 "sends, as if nothing were sent beside computation"});
  table.add_row({"assumed", speed_text(speed, ranks.count)});
  table.add_row({"sends", "bytes a step, of the rank that sends most"});
  return table.to_string(columns) + "\n" + choices_table(choices, memory, columns) +
         refused_table(choices, columns);
}

MeshJson choice_json(const MeshChoice& choice, int64_t memory) {
  MeshJson row = {{"pp", choice.mesh.size(Axis::kPp)},
                  {"dp", choice.mesh.dp_size()},
                  {"cp", choice.mesh.size(Axis::kCp)},
                  {"tp", choice.mesh.size(Axis::kTp)},
                  {"works", choice.works()}};
  if (!choice.works()) {
    row["obstacle"] = choice.obstacle;
    return row;
  }
  row["fits"] = memory == 0 ? MeshJson() : MeshJson(choice.fits(memory));
  if (choice.mesh.size(Axis::kCp) > 1) row["cp_kind"] = plan::name(choice.cp_kind);
  row["micro_batch"] = choice.batch.micro_batch;
  row["micro_batches"] = choice.batch.accumulation;
  row["peak_bytes"] = choice.needed.peak();
  row["sent_bytes"] = {{"data", choice.sent.data},
                       {"tp", choice.sent.tp},
                       {"cp", choice.sent.cp},
                       {"stages", choice.sent.stages},
                       {"total", choice.sent.total()}};
  row["idle"] = choice.idle;
  row["lost"] = choice.lost();
  row["seconds"] = {
      {"computing", choice.computing_s}, {"idle", choice.idle_s}, {"sending", choice.sending_s}};
  return row;
}

MeshJson choices_json(const PlannedRanks& ranks, const std::vector<MeshChoice>& choices,
                      const plan::RankSpeed& speed) {
  const int64_t memory = memory_of_rank(ranks.there);
  MeshJson meshes = MeshJson::array();
  for (const MeshChoice& choice : choices) meshes.push_back(choice_json(choice, memory));
  return {{"schema", "trireme.meshes/1"},
          {"name", ranks.config.config.name},
          {"device", plan::name(ranks.device)},
          {"ranks", ranks.count},
          {"memory_per_rank_bytes", memory == 0 ? MeshJson() : MeshJson(memory)},
          {"assumed",
           {{"flops_per_s", speed.flops},
            {"bytes_per_s", speed.bytes},
            {"bytes_per_s_between_hosts", speed.bytes_between},
            {"ranks_per_host", speed.host_ranks}}},
          {"meshes", meshes}};
}

void refuse_many_ranks(int64_t ranks) {
  if (ranks <= kMostRanksOfMesh) return;
  throw ConfigError("[cli.plan] -n {} is more than the {} ranks that this command lists; lower it", ranks,
                    kMostRanksOfMesh);
}

int all_meshes(const MeshOptions& options, const Front& front) {
  TrainJob job = options.job;
  job.overrides = front.overrides;
  // The config's own mesh is one of many, and need not fit these ranks.
  for (const char* axis : {"pp=1", "cp=1", "tp=1", "dp_shard=0"})
    job.overrides.push_back(fmt::format("parallel.{}", axis));
  const PlannedRanks ranks = plan_ranks(job, front, options.gpu);
  refuse_many_ranks(ranks.count);
  say_notes(ranks.config);
  check_device(ranks.config.config, ranks.device);
  const plan::RankSpeed speed = speed_for(options, ranks.device);
  const std::vector<MeshChoice> choices =
      plan::mesh_choices(ranks.config.config, ranks.count, ranks.device, speed, memory_of_rank(ranks.there));
  if (options.json) {
    fmt::print("{}\n", choices_json(ranks, choices, speed).dump(2));
  } else {
    fmt::print("{}", choices_text(ranks, choices, speed, terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

int mesh(const MeshOptions& options, const Front& front) {
  if (options.all) return all_meshes(options, front);
  TrainJob job = options.job;
  job.overrides = front.overrides;
  const PreparedJob prepared = plan_train_job(job, front, options.gpu);
  refuse_many_ranks(prepared.plan.ranks);
  say_notes(prepared.config);
  const plan::Config& config = prepared.config.config;
  if (options.json) {
    fmt::print("{}\n", mesh_json(prepared.plan, config).dump(2));
  } else {
    fmt::print("{}", mesh_text(prepared.plan, config, terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

}  // namespace

void add_plan_mesh(CLI::App& plan, Front& front) {
  auto options = std::make_shared<MeshOptions>();
  CLI::App* verb = plan.add_subcommand(
      "mesh", "Show where ranks are in a mesh and who communicates with whom, or compare all meshes");
  add_config_file(*verb, options->job.config);
  verb->add_option("-n,--ranks", options->job.ranks, "Ranks of the run (default: all GPUs, else 2)")
      ->option_text("RANKS");
  add_planned_gpu(*verb, options->gpu);
  CLI::Option* const all =
      verb->add_flag("--all", options->all,
                     "Compare every mesh of these ranks, whatever the config says of pp, cp and tp: memory, "
                     "bytes sent along each axis, idle time of the pipeline, and "
                     "why others are refused");
  verb->add_option("--tflops", options->tflops, "With --all, the assumed TFLOP/s of a rank")
      ->option_text("N")
      ->needs(all)
      ->check(CLI::Range(1e-6, 1e6));
  verb->add_option("--links", options->links,
                   "With --all, the assumed GB/s that a rank sends: within a host, and between hosts")
      ->option_text("N[,N]")
      ->delimiter(',')
      ->expected(1, 2)
      ->needs(all)
      ->check(CLI::Range(1e-6, 1e6));
  verb->add_option("--host-ranks", options->host_ranks, "With --all, the assumed ranks of one host")
      ->option_text("N")
      ->needs(all)
      ->check(CLI::Range(1, 1024));
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Any config key can be given as --section.key=value.\n"
      "Examples:\n"
      "  trireme plan mesh configs/mini-gpt-tp2-pp4.yaml -n 8\n"
      "  trireme plan mesh configs/mini-gpt-tp2-pp4.yaml -n 8 --all\n"
      "  trireme plan mesh -n 64 --gpu h100 --all --model.preset=llama-70b --precision.compute=bf16");
  verb->callback([options, &front] { front.action = [options, &front] { return mesh(*options, front); }; });
}

}  // namespace trireme::cli
