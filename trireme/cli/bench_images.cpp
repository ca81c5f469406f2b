#include <CLI/CLI.hpp>
#include <memory>

#include "trireme/cli/child.h"
#include "trireme/cli/front.h"

namespace trireme::cli {

void add_bench_images(CLI::App& bench, Front& front) {
  auto request = std::make_shared<Request>();
  DataOptions& options = request->data;
  CLI::App* images = bench.add_subcommand("images", "JPEG files a second and core, beside the decoder alone");
  images->add_option("PATH", options.path, "Folders of JPEG files (default: generated ones)")
      ->option_text(" ");
  images->add_option("--side", options.side, "Pixels of a side of what comes out")
      ->option_text("N")
      ->check(CLI::Range(8, 4096));
  images->add_option("--images", options.images, "Files that a round takes")
      ->option_text("N")
      ->check(CLI::Range(8, 1'000'000));
  images->add_option("--rounds", options.rounds, "Alternations; medians are shown")
      ->option_text("N")
      ->check(CLI::Range(1, 1000));
  images->add_flag("--json", request->json, "One JSON document with all samples");
  images->footer(
      "The way: read, decode (the part that is shown, smaller by 2, 4 or 8 where it may be), random resized\n"
      "crop, flip, normalise, into a batch. Rates are by the processor's time of one thread, so other\n"
      "programs do not count.\n"
      "Example:\n"
      "  trireme bench images --side 224");
  images->callback([request, &front] {
    front.action = [request, &front]() -> int {
      request->verb = "data";
      request->data.action = "bench";
      request->command = front.command;
      exec_worker(front.environment, *request);
    };
  });
}

}  // namespace trireme::cli
