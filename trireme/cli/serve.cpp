// trireme serve: the server of a controller, for workers and the programs that drive them.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "trireme/base/log.h"
#include "trireme/cli/front.h"
#include "trireme/cli/server_address.h"
#include "trireme/controller/dispatcher.h"
#include "trireme/launch/signals.h"

namespace trireme::cli {
namespace {

struct ServeOptions {
  int64_t workers = 0;
  double timeout_s = 300.0;
  ServerAddress server;
};

int serve(const ServeOptions& options, const Environment& environment) {
  if (!(options.timeout_s > 0.0)) {
    throw UsageError(fmt::format("[cli.serve] --timeout {:g}", options.timeout_s),
                     "give the seconds that workers may take to come");
  }
  launch::SignalTrap signals;  // any of them is the request to end
  controller::DispatcherSettings settings{.address = options.server.address(), .workers = options.workers};
  settings.timeout_s = options.timeout_s;
  settings.stop_fd = signals.fd();
  settings.say = [](const std::string& line) { log_info("{}", line); };
  controller::Dispatcher dispatcher(settings, environment);
  fmt::print("serving {} {} at {}\n", options.workers, options.workers == 1 ? "worker" : "workers",
             dispatcher.address().text());
  std::fflush(stdout);
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
  verb->footer(
      "Ctrl-C ends the server and its workers. Processes of this user on this host can connect, no others.\n"
      "Exit code 5 if workers did not come in time.");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return serve(*options, front.environment); }; });
}

}  // namespace trireme::cli
