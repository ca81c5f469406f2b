// Rates of GPUs from their data sheets, for machines that nobody has measured.
#include <algorithm>
#include <iterator>

#include "trireme/base/error.h"
#include "trireme/plan/gpus.h"
#include "trireme/plan/rates.h"

namespace trireme::plan {
namespace {

constexpr double kTeraFlops = 1e12, kGigaBytes = 1e9;

/// Dense peaks without sparsity, and bytes that a GPU sends to others of its host in one direction.
struct DataSheet {
  std::string_view name;
  double fp32, bf16, fp8;  ///< TFLOP/s; fp8 0: it has none
  double memory, links;    ///< GB/s
};
constexpr DataSheet kDataSheets[] = {
    {"a100", 19.5, 312, 0, 2039, 300},        {"a100-40gb", 19.5, 312, 0, 1555, 300},
    {"a10g", 31.2, 70, 0, 600, 32},           {"b200", 75, 2250, 4500, 8000, 900},
    {"h100", 66.9, 989.4, 1978.9, 3350, 450}, {"h200", 66.9, 989.4, 1978.9, 4800, 450},
    {"l4", 30.3, 121, 242, 300, 32},          {"l40s", 91.6, 362, 733, 864, 32},
    {"rtx3090", 35.6, 71, 0, 936, 32},        {"rtx4090", 82.6, 165, 330, 1008, 32},
    {"rtx5090", 104.8, 209.5, 419, 1792, 64}, {"rtx6000ada", 91.1, 364, 728, 960, 32}};

// Shares of the data sheet that an H200 reached. Products of 8192^3 in bf16: 0.69
// (bench/results/gpu_one_h200.json, gemm_tflops); those of FP8 with fast accumulation 0.63. A copy: 0.90 of
// the memory's rate; kernels that compute, as casts do: 0.67. All-gathers and reduce-scatters of two GPUs
// over peer memory: 0.74 and 8 us (bench/results/comm_h200x2.json, 32 to 512 MiB).
constexpr double kProducts = 0.69, kFp8Products = 0.63, kCopies = 0.90, kComputed = 0.67, kLinks = 0.74;
constexpr double kKernel_s = 4e-6, kCollective_s = 8e-6, kLaunch_s = 5e-6;
constexpr double kBetween = 50.0;  ///< GB/s a GPU between hosts of eight

/// cuDNN's attention on an H200, shares of the peak in bf16: heads of 64 at 1,024 and 4,096 tokens, heads of
/// 128 at 4,096.
std::vector<AttentionRate> attention_at(double peak) {
  return {{1024, 64, 0.32 * peak, 0.20 * peak},
          {4096, 64, 0.42 * peak, 0.29 * peak},
          {4096, 128, 0.54 * peak, 0.35 * peak}};
}

/// A product takes a kernel's start, and its operations at `flops` or its matrices over the memory's rate,
/// whichever is longer: a kernel loads while it multiplies.
ProductGrids products_at(double flops, double bytes_per_s, double element, double start_s) {
  constexpr int64_t kSmallest = 16, kLargest = 65536;
  std::vector<int64_t> sizes;
  for (int64_t size = kSmallest; size <= kLargest; size *= 2) sizes.push_back(size);
  ProductGrid grid{.m = sizes, .n = sizes, .k = sizes, .seconds = {}};
  for (const int64_t rows : grid.m) {
    for (const int64_t columns : grid.n) {
      for (const int64_t inner : grid.k) {
        const auto m = static_cast<double>(rows), n = static_cast<double>(columns),
                   k = static_cast<double>(inner);
        grid.seconds.push_back(
            start_s + std::max(2.0 * m * n * k / flops, element * (m * k + k * n + m * n) / bytes_per_s));
      }
    }
  }
  return {grid, grid, grid};
}

MemoryRates memory_at(double bytes_per_s, double copies, double computed) {
  const double fast = copies * bytes_per_s, slow = computed * bytes_per_s;
  return {.copy = fast,
          .add = fast,
          .norm = slow,
          .norm_backward = slow,
          .activation = slow,
          .activation_backward = slow,
          .loss = slow,
          .update = fast};
}

LinkRates links_at(double bytes_per_s, double latency_s, int64_t host_ranks, double between) {
  LinkRates links;
  links.send = {2, latency_s, bytes_per_s};
  links.between = {2, 4.0 * latency_s, between};
  for (int64_t ranks = 2; ranks <= std::max<int64_t>(2, host_ranks); ranks *= 2) {
    const double latency = latency_s * (1.0 + static_cast<double>(ranks - 2) / 4.0);
    links.gather.push_back({ranks, latency, bytes_per_s});
    links.reduce.push_back({ranks, latency, bytes_per_s});
  }
  links.host_ranks = host_ranks;
  return links;
}

/// One core with AVX2 or more that shares a desktop's memory with a few others.
Rates rates_of_cpu() {
  constexpr double kFlops = 60e9, kBytes = 8e9, kCpuLinks = 3e9, kCpuBetween = 1e9, kStart_s = 2e-6;
  Rates rates{.device = "a CPU rank", .origin = "guessed for a core of a recent processor"};
  rates.launch_s = 10e-6;
  for (const char* const dtype : {"fp32", "bf16"}) {
    const double element = std::string_view(dtype) == "fp32" ? 4.0 : 2.0;
    rates.products[dtype] = products_at(kFlops, kBytes, element, kStart_s);
    rates.attention[dtype] = {{512, 64, 0.4 * kFlops, 0.3 * kFlops}};
    rates.memory[dtype] = memory_at(kBytes, 1.0, 0.5);
  }
  rates.links = links_at(kCpuLinks, 20e-6, 64, kCpuBetween);
  return rates;
}

Rates rates_of_gpu(const DataSheet& sheet) {
  const double memory = kGigaBytes * sheet.memory, bf16 = kTeraFlops * sheet.bf16,
               fp32 = kTeraFlops * sheet.fp32;
  Rates rates{.device = std::string(sheet.name), .on_gpu = true};
  rates.origin = "its data sheet, and the shares of it that an H200 reached";
  rates.launch_s = kLaunch_s;
  rates.products["fp32"] = products_at(kProducts * fp32, kCopies * memory, 4.0, kKernel_s);
  rates.products["bf16"] = products_at(kProducts * bf16, kCopies * memory, 2.0, kKernel_s);
  if (sheet.fp8 > 0)
    rates.products["fp8"] =
        products_at(kFp8Products * kTeraFlops * sheet.fp8, kCopies * memory, 1.0, kKernel_s);
  rates.attention = {{"fp32", attention_at(fp32)}, {"bf16", attention_at(bf16)}};
  for (const char* const dtype : {"fp32", "bf16"})
    rates.memory[dtype] = memory_at(memory, kCopies, kComputed);
  rates.links = links_at(kLinks * kGigaBytes * sheet.links, kCollective_s, 8, kGigaBytes * kBetween);
  rates.peak_flops = {{"fp32", fp32}, {"bf16", bf16}};
  return rates;
}

}  // namespace

Rates usual_rates(Device device, const std::string& gpu) {
  if (device != Device::kCuda) return rates_of_cpu();
  const std::string wanted = gpu.empty() ? "h100" : gpu;
  const auto* const found = std::ranges::find(kDataSheets, wanted, &DataSheet::name);
  if (found != std::end(kDataSheets)) return rates_of_gpu(*found);
  gpu_bytes(gpu);  // refuses what is neither a name nor a size
  throw ConfigError(
      "[plan.rates] GPUs of {} GiB have no rates; name the GPU ({}), or give a --probe file of the machine",
      gpu, gpu_choices());
}

std::string known_gpu(std::string_view name) {
  std::string lower(name);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  std::erase(lower, ' ');
  std::string_view best;
  for (const DataSheet& sheet : kDataSheets) {
    if (lower.find(sheet.name) != std::string::npos && sheet.name.size() > best.size()) best = sheet.name;
  }
  return std::string(best);
}

}  // namespace trireme::plan
