// Signals by themselves (GT's signal_demo): one product under three scopes of two workers, and what each
// makes of it. The log of instructions says where every tensor lies.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "trireme/base/error.h"
#include "trireme/gt/signal.h"
#include "trireme/gt/workers.h"

namespace {

constexpr const char* kSignals = R"(
columns: {shard: {axis: 1, workers: [0, 1]}}
rows: {shard: {axis: 0, workers: [0, 1]}}
whole: {workers: [0, 1], replicated: true}
)";

double product_in(const std::string& scope) {
  gt::manual_seed(1);
  const gt::Tensor x = gt::randn({4, 6}), weight = gt::randn({6, 8});
  const gt::signal::context context(scope);
  return gt::matmul(x, weight).sum().item();
}

}  // namespace

int main() {
  const std::string folder =
      std::filesystem::temp_directory_path().string() + "/signal_demo-" +
      std::to_string(std::filesystem::file_time_type::clock::now().time_since_epoch().count());
  std::filesystem::create_directory(folder);
  try {
    gt::Options options = gt::Options::from_environment();
    options.signals = folder + "/signals.yaml";
    options.instruction_log = folder + "/instructions.log";
    std::ofstream(options.signals) << kSignals;
    const gt::Workers workers = gt::gpu_workers(2, options);
    const double whole = product_in("whole");
    for (const char* scope : {"columns", "rows"})
      std::printf("%-8s sum %.4f, whole %.4f\n", scope, product_in(scope), whole);
  } catch (const trireme::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
  std::ifstream log(folder + "/instructions.log");
  for (std::string line; std::getline(log, line);) {
    if (line.find("matmul") != std::string::npos) std::printf("%s\n", line.c_str());
  }
  std::filesystem::remove_all(folder);
  return 0;
}
