#include <CLI/CLI.hpp>
#include <memory>

#include "trireme/cli/child.h"
#include "trireme/cli/front.h"

namespace trireme::cli {

void add_bench_images(CLI::App& bench, Front& front) {
  auto request = std::make_shared<Request>();
  DataOptions& options = request->data;
  CLI::App* images =
      bench.add_subcommand("images", "Measure JPEG files per second and core, beside the bare decoder");
  images->add_option("PATH", options.path, "Folders of JPEG files (default: generated ones)")
      ->option_text(" ");
  images
      ->add_option("--side", options.side,
                   with_default("Height and width of the output images, in pixels", options.side))
      ->option_text("N")
      ->check(CLI::Range(8, 4096));
  images->add_option("--images", options.images, with_default("Files per round", options.images))
      ->option_text("N")
      ->check(CLI::Range(8, 1'000'000));
  images->add_option("--rounds", options.rounds, with_default("Rounds; medians are shown", options.rounds))
      ->option_text("N")
      ->check(CLI::Range(1, 1000));
  images->add_flag("--json", request->json, "Print one JSON document with all samples");
  images->footer(
      "Measured: read, decode (only the part that is needed, scaled down by 2, 4 or 8 where possible), "
      "random\n"
      "resized crop, flip, normalise, copy into a batch. Rates are per CPU second of one thread, so other\n"
      "programs do not matter.\n"
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
