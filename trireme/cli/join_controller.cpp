// The verb 'worker': a worker of a controller, in this terminal.
#include <CLI/CLI.hpp>
#include <memory>

#include "trireme/cli/child.h"
#include "trireme/cli/front.h"
#include "trireme/cli/server_address.h"

namespace trireme::cli {
namespace {

struct JoinOptions {
  ServerAddress server;
  ControllerOptions controller;
};

int join(const JoinOptions& options, const Front& front) {
  Request request;
  request.verb = "controller";
  request.command = front.command;
  request.controller = options.controller;
  const controller::Address address = options.server.address();
  if (address.is_beyond())
    controller::tls_of(front.environment, address.text());  // said before torch is loaded
  request.controller.address = address.text();
  if (request.controller.timeout_s <= 0)
    throw ConfigError("[cli.worker] --timeout is {}, but must be above 0 s", request.controller.timeout_s);
  exec_worker(front.environment, request);
}

}  // namespace

void add_worker(CLI::App& app, Front& front) {
  auto options = std::make_shared<JoinOptions>();
  CLI::App* verb = app.add_subcommand("worker", "Work for a controller that 'trireme serve' has started");
  add_server_address(*verb, options->server);
  verb->add_option("--number", options->controller.number, "Number of this worker (default: the next one)")
      ->option_text("N");
  verb->add_option("--device", options->controller.device,
                   "cpu, cuda, or auto: a GPU where this process sees one (default: auto)")
      ->option_text("DEVICE");
  verb->add_option("--timeout", options->controller.timeout_s,
                   "Seconds that a wait may last: for other workers, for their messages (default: 300)")
      ->option_text("S");
  verb->footer(
      "Start one in each terminal; the server numbers them as they come. CUDA_VISIBLE_DEVICES picks the "
      "GPU.\n"
      "A worker ends with its server.\n"
      "Example:\n"
      "  CUDA_VISIBLE_DEVICES=0 trireme worker -p 12345\n"
      "  trireme worker --host 10.0.0.7 -p 12345 --token token.hex");
  verb->callback([options, &front] {
    front.action = [options, &front] {
      options->server.files.put_into(front.environment);
      return join(*options, front);
    };
  });
}

}  // namespace trireme::cli
