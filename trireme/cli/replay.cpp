#include <CLI/CLI.hpp>
#include <memory>

#include "trireme/base/build_info.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/run_plan.h"
#include "trireme/cli/train_job.h"
#include "trireme/controller/messages.h"
#include "trireme/plan/program_bytes.h"

namespace trireme::cli {
namespace {

struct ReplayFlags {
  std::string file, device = "auto", values = "random", timeline;
  int64_t seed = 42;
  bool is_explicit = false, json = false;
};

void check_runnable(const plan::Program& program, const std::string& path) {
  if (program.instructions.empty())
    throw ConfigError("[cli.replay] {} has no instructions; write it with TRIREME_PROGRAM_FILE", path);
  if (program.workers.size() < program.signals.size())
    throw ConfigError(
        "[cli.replay] {}: nothing says who the workers of signal '{}' are; add 'signal {} workers=0,1'", path,
        program.signals[program.workers.size()], program.signals[program.workers.size()]);
}

int replay(const ReplayFlags& flags, Front& front) {
  plan::Program program = plan::load_program(flags.file);
  check_runnable(program, flags.file);
  plan::verify(program, flags.file);
  const int64_t workers = plan::number_workers(program);
  if (workers > static_cast<int64_t>(controller::kMostWorkers))
    throw ConfigError("[cli.replay] {} names {} workers, at most {} can run", flags.file, workers,
                      controller::kMostWorkers);
  plan::program_bytes(program, workers, flags.file,
                      flags.is_explicit);  // places it, before a rank is started
  const auto wanted = plan::parse<plan::Device>(flags.device);
  if (!wanted)
    throw UsageError(fmt::format("[cli.replay] --device: '{}' is no device", flags.device),
                     "use cpu, cuda or auto");
  const int gpus = kHasCuda ? gpu_count() : 0;
  const bool fits = *wanted != plan::Device::kAuto || workers <= gpus;
  const plan::Device device = choose_device(fits ? *wanted : plan::Device::kCpu, gpus);
  Request request{
      .verb = "replay", .config = "", .run_dir = "", .command = front.command, .json = flags.json};
  request.replay = {.device = std::string(plan::name(device)),
                    .file = flags.file,
                    .values = flags.values,
                    .seed = flags.seed,
                    .is_explicit = flags.is_explicit,
                    .timeline = flags.timeline};
  return run_workers(request, front.environment, device, choose_ranks(workers, device, gpus));
}

}  // namespace

void add_replay(CLI::App& app, Front& front) {
  auto flags = std::make_shared<ReplayFlags>();
  CLI::App* verb = app.add_subcommand("replay", "Run the program of a controller's client again, without it");
  verb->add_option("FILE", flags->file, "The program, as TRIREME_PROGRAM_FILE has written it")->required();
  verb->add_option("--device", flags->device, with_default("cpu, cuda or auto", flags->device))
      ->option_text("DEVICE");
  verb->add_option("--values", flags->values,
                   with_default("Of inputs, whose values are not in the file: random (normal, whole ones "
                                "zero) or zeros",
                                flags->values))
      ->option_text("KIND")
      ->check(CLI::IsMember({"random", "zeros"}));
  verb->add_option("--seed", flags->seed, with_default("Of random values", flags->seed))->option_text("N");
  verb->add_flag("--explicit", flags->is_explicit, "What would move between workers unasked is an error");
  verb->add_option("--timeline", flags->timeline,
                   "Write timeline.svg and trace.json (Perfetto) to this folder; GPUs are then waited for "
                   "after each instruction")
      ->option_text("FOLDER");
  verb->add_flag("--json", flags->json, "Print one JSON document");
  verb->footer(
      "Starts as many ranks as the file names workers, which run its instructions, and prints fetched "
      "values,\n"
      "times, and the bytes of tensors that each worker holds at once.\n"
      "Examples:\n"
      "  TRIREME_PROGRAM_FILE=program.txt ./controller_mini_gpt && trireme replay program.txt\n"
      "  trireme replay program.txt --device cpu --values zeros --json");
  verb->callback([flags, &front] { front.action = [flags, &front] { return replay(*flags, front); }; });
}

}  // namespace trireme::cli
