// trireme top: what the workers of a server do, as they do it.
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "trireme/base/clock.h"
#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/server_address.h"
#include "trireme/cli/status_view.h"
#include "trireme/controller/greeting.h"
#include "trireme/launch/signals.h"

namespace trireme::cli {
namespace {

struct TopOptions {
  ServerAddress server;
  double interval_s = 1.0;
  int64_t count = 0;
};

/// Waits; whether the user has asked to end.
bool ends_within(launch::SignalTrap& signals, double seconds) {
  pollfd asked{.fd = signals.fd(), .events = POLLIN, .revents = 0};
  ::poll(&asked, 1, static_cast<int>(1e3 * seconds));
  return signals.next().has_value();
}

/// In a terminal each picture takes the place of the one before; elsewhere they follow each other.
void show_picture(const std::string& text, bool is_first) {
  const bool in_place = terminal_columns(STDOUT_FILENO) > 0;
  const char* const before = in_place ? "\x1b[H\x1b[J" : is_first ? "" : "\n";
  fmt::print("{}{}", before, text);
  std::fflush(stdout);
}

int top(const TopOptions& options, const Environment& environment) {
  if (!(options.interval_s >= 0.1 && options.interval_s <= 3600.0))
    throw ConfigError("[cli.top] --interval is {:g} s; give 0.1 to 3600", options.interval_s);
  launch::SignalTrap signals;
  const controller::Address address = options.server.address();
  controller::Status before = controller::ask_status(address, environment, kStatusAnswer_s);
  double asked_at = monotonic_seconds();
  for (int64_t shown = 0; options.count == 0 || shown < options.count; ++shown) {
    if (ends_within(signals, options.interval_s)) break;
    const controller::Status now = controller::ask_status(address, environment, kStatusAnswer_s);
    const double seconds = monotonic_seconds() - std::exchange(asked_at, monotonic_seconds());
    show_picture(status_text(address.text(), now, rates_between(before, now, seconds),
                             terminal_columns(STDOUT_FILENO)),
                 shown == 0);
    before = now;
  }
  return static_cast<int>(ExitCode::kOk);
}

}  // namespace

void add_top(CLI::App& app, Front& front) {
  auto options = std::make_shared<TopOptions>();
  CLI::App* verb =
      app.add_subcommand("top", "Watch the workers of a server: how many instructions a second each does");
  add_server_address(*verb, options->server);
  verb->add_option("--interval", options->interval_s,
                   with_default("Seconds between two looks", options->interval_s))
      ->option_text("SECONDS");
  verb->add_option("--count", options->count, "Looks to take (default: until Ctrl-C)")
      ->option_text("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000'000}));
  verb->footer(
      "Exit code 5 if there is no server, or once it has gone.\n"
      "Example:\n"
      "  trireme top -p 12345");
  verb->callback([options, &front] {
    front.action = [options, &front] {
      options->server.files.put_into(front.environment);
      return top(*options, front.environment);
    };
  });
}

}  // namespace trireme::cli
