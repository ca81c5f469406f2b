// trireme ps: who is connected to the server of a controller, and how far each worker is.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/server_address.h"
#include "trireme/cli/status_view.h"
#include "trireme/controller/greeting.h"

namespace trireme::cli {
namespace {

struct PsOptions {
  ServerAddress server;
  bool json = false;
};

void print_status_json(const std::string& address, const controller::Status& status) {
  using StatusJson = nlohmann::ordered_json;
  StatusJson workers = StatusJson::array();
  for (const controller::WorkerStatus& one : status.workers) {
    workers.push_back({{"number", one.worker.number},
                       {"pid", one.worker.pid},
                       {"host", one.worker.host},
                       {"devices", one.worker.devices},
                       {"cores", one.cores},
                       {"executed", one.executed},
                       {"queued_bytes", one.queued_bytes},
                       {"last_seen_ms", one.last_seen_ms}});
  }
  StatusJson client;
  if (status.client_pid != 0) client = {{"pid", status.client_pid}, {"host", status.client_host}};
  const StatusJson document = {{"schema", "trireme.ps/1"},
                               {"address", address},
                               {"version", status.version},
                               {"build", status.build},
                               {"pid", status.pid},
                               {"uptime_s", 1e-3 * static_cast<double>(status.uptime_ms)},
                               {"wanted_workers", status.wanted_workers},
                               {"session", status.session},
                               {"submitted", status.submitted},
                               {"client", client},
                               {"workers", workers}};
  fmt::print("{}\n", document.dump(2, ' ', false, StatusJson::error_handler_t::replace));
}

int ps(const PsOptions& options, const Environment& environment) {
  const controller::Address address = options.server.address();
  const controller::Status status = controller::ask_status(address, environment, kStatusAnswer_s);
  options.json ? print_status_json(address.text(), status)
               : fmt::print("{}", status_text(address.text(), status, {}, terminal_columns(STDOUT_FILENO)));
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace

void add_ps(CLI::App& app, Front& front) {
  auto options = std::make_shared<PsOptions>();
  CLI::App* verb =
      app.add_subcommand("ps", "List the workers and the client of a server, and how far each is");
  add_server_address(*verb, options->server);
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer("Exit code 5 if there is no server.");
  verb->callback([options, &front] {
    front.action = [options, &front] {
      options->server.files.put_into(front.environment);
      return ps(*options, front.environment);
    };
  });
}

}  // namespace trireme::cli
