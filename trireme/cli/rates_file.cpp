#include "trireme/cli/rates_file.h"

#include "trireme/base/error.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/text_file.h"

namespace trireme::cli {
namespace {

constexpr size_t kMostBytesOfRates = size_t{16} << 20;

}  // namespace

int measure_rates(const std::string& file, plan::Device device, int64_t ranks, const Environment& environment,
                  const std::string& command) {
  Request request{.verb = "rates", .config = "", .run_dir = "", .command = command, .json = false};
  request.rates = {.device = std::string(plan::name(device)), .file = file};
  return run_workers(request, environment, device, ranks);
}

plan::Rates read_rates(const std::string& file, plan::Device device) {
  plan::Rates rates = plan::rates_from_text(plan::read_text_file(file, kMostBytesOfRates), file);
  if (rates.on_gpu != (device == plan::Device::kCuda)) {
    throw ConfigError(
        "[cli.plan] {} has the rates of {}, but the run is planned for {}; set --device={}, or give the "
        "rates of such a machine",
        file, rates.device, plan::name(device), rates.on_gpu ? "cuda" : "cpu");
  }
  return rates;
}

}  // namespace trireme::cli
