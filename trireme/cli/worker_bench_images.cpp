#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "trireme/base/build_info.h"
#include "trireme/bench/image_loading.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/report/step_times.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

double median(const std::vector<double>& values) {
  return report::median(values).value_or(0.0);
}

}  // namespace

int worker_bench_images(const Request& request) {
  const DataOptions& options = request.data;
  const std::vector<bench::ImageRates> cases = bench::measure_image_loading(
      {.path = options.path, .side = options.side, .images = options.images, .rounds = options.rounds});
  if (!request.json) {
    using report::Align;
    report::Table table({{"JPEG files"},
                         {"bytes", Align::kRight},
                         {"decoder alone", Align::kRight},
                         {"whole pipeline", Align::kRight},
                         {"ratio", Align::kRight}});
    for (const bench::ImageRates& each : cases)
      table.add_row({each.name, fmt::format("{:.0f}", each.mean_bytes),
                     fmt::format("{:.0f}/s", median(each.alone)), fmt::format("{:.0f}/s", median(each.whole)),
                     fmt::format("{:.2f}", median(each.whole) / median(each.alone))});
    fmt::print("{}", table.to_string());
    return 0;
  }
  Json rows = Json::array();
  for (const bench::ImageRates& each : cases) {
    rows.push_back({{"files", each.name},
                    {"mean_bytes", each.mean_bytes},
                    {"alone_per_s", each.alone},
                    {"whole_per_s", each.whole},
                    {"ratio", median(each.whole) / median(each.alone)}});
  }
  std::cout << Json{{"schema", "trireme.bench.images/1"},
                    {"command", request.command},
                    {"version", kVersion},
                    {"side", options.side},
                    {"images", options.images},
                    {"clock", "processor time of the process, one thread at work"},
                    {"alone", "decode_image(): libjpeg-turbo into a new buffer, scaled as in the whole way"},
                    {"whole",
                     "ImageLoader: read, decode, random resized crop, flip, normalise, into a batch"},
                    {"cases", rows}}
                   .dump(2)
            << "\n";
  return 0;
}

}  // namespace trireme::cli
