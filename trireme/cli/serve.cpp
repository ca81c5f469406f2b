// trireme serve: the server of a controller, for workers and the programs that drive them.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "trireme/base/build_info.h"
#include "trireme/base/log.h"
#include "trireme/cli/child.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/server_address.h"
#include "trireme/cli/serving.h"
#include "trireme/controller/dispatcher.h"
#include "trireme/launch/local.h"
#include "trireme/launch/signals.h"

namespace trireme::cli {
namespace {

struct ServeOptions {
  int64_t workers = 0;
  bool starts_workers = false, quiet = false;
  std::string device = "auto";
  double timeout_s = 300.0;
  ServerAddress server;
};

controller::DispatcherSettings settings_of(const ServeOptions& options) {
  controller::DispatcherSettings settings{.address = options.server.address(), .workers = options.workers};
  settings.timeout_s = options.timeout_s;
  if (!options.quiet) settings.say = [](const std::string& line) { log_info("{}", line); };
  return settings;
}

/// The first server that names a token makes it.
void make_missing_token(const ServeOptions& options, const Environment& environment) {
  const auto token = environment.get(controller::kTokenVariable);
  std::error_code ignored;
  if (!token || !options.server.address().is_beyond() || std::filesystem::exists(*token, ignored)) return;
  if (!controller::has_tls() || environment.get(controller::kCertificateVariable))
    return;  // which is refused
  controller::make_token_file(*token);
  log_info("made the token {}; copy it to the hosts of workers and programs, with mode 0600", *token);
}

void say_address(const ServeOptions& options, const controller::Dispatcher& dispatcher) {
  fmt::print("serving {} {} at {}\n", options.workers, options.workers == 1 ? "worker" : "workers",
             dispatcher.address().text());
  std::fflush(stdout);
}

/// GPUs where there are as many as workers; none at all: the CPU.
std::string device_of_workers(const ServeOptions& options) {
  const int gpus = kHasCuda ? gpu_count() : 0;
  if (options.device == "auto" && gpus == 0) return "cpu";
  if (options.device == "cpu" || options.workers <= gpus) return options.device;
  throw ConfigError(
      "[cli.serve] {} workers on {}, but this machine has {} GPUs; ask for as many, or for --device cpu",
      options.workers, options.device, gpus);
}

/// Server and workers are one job: it ends with its first client, or when one of them is lost.
int serve_with_workers(const ServeOptions& options, const Front& front) {
  launch::Launcher launcher;
  controller::DispatcherSettings settings = settings_of(options);
  settings.owned = true;
  controller::Dispatcher dispatcher(settings, front.environment);
  Request request;
  request.verb = "controller";
  request.command = front.command;
  request.controller.address = dispatcher.address().text();
  request.controller.device = device_of_workers(options);
  request.controller.timeout_s = options.timeout_s;
  say_address(options, dispatcher);
  Serving serving(dispatcher);
  launch::LocalJob job;
  job.program = worker_path();
  job.ranks = options.workers;
  job.environment = worker_environment(front.environment, request);
  job.serves_forks = request.controller.device == "cpu";
  job.explains_failures = true;
  const launch::JobEnd end = launcher.run(job);
  const std::exception_ptr failure = serving.end();
  if (failure && end.code == 0) std::rethrow_exception(failure);
  return end.code;
}

int serve(const ServeOptions& options, const Front& front) {
  if (!(options.timeout_s > 0.0)) {
    throw UsageError(fmt::format("[cli.serve] --timeout {:g}", options.timeout_s),
                     "give the seconds that workers may take to come");
  }
  make_missing_token(options, front.environment);
  if (options.starts_workers) return serve_with_workers(options, front);
  launch::SignalTrap signals;  // any of them is the request to end
  controller::DispatcherSettings settings = settings_of(options);
  settings.stop_fd = signals.fd();
  controller::Dispatcher dispatcher(settings, front.environment);
  say_address(options, dispatcher);
  dispatcher.run();
  while (signals.next()) {
    // The request has been met; unread, it would strike when the trap ends.
  }
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace

void add_serve(CLI::App& app, Front& front) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App* verb =
      app.add_subcommand("serve", "Serve workers to the programs that drive them, one at a time");
  verb->add_option("-n,--workers", options->workers, "How many workers there are")
      ->option_text("WORKERS")
      ->required();
  add_server_address(*verb, options->server);
  verb->add_option("--timeout", options->timeout_s,
                   with_default("Seconds for all workers to come", options->timeout_s))
      ->option_text("S");
  verb->add_flag("--start-workers", options->starts_workers,
                 "Start the workers, too; all end with the first program that comes");
  verb->add_option("--device", options->device,
                   "Of workers that it starts: cpu, cuda, or auto: GPUs where there are some (default: auto)")
      ->option_text("DEVICE");
  verb->add_flag("-q,--quiet", options->quiet, "Do not say who comes and goes");
  verb->footer(
      "Ctrl-C ends the server and its workers. Processes of this user on this host can connect, no others;\n"
      "with --host those that have the token, which is made where there is none yet, or a certificate.\n"
      "Exit code 5 if workers did not come in time.\n"
      "Example:\n"
      "  trireme serve -n 8 --host 10.0.0.7 --token token.hex");
  verb->callback([options, &front] {
    front.action = [options, &front] {
      options->server.files.put_into(front.environment);
      return serve(*options, front);
    };
  });
}

}  // namespace trireme::cli
