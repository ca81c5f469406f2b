#pragma once
// The rates of a machine as data: how long products, attention, passes over memory, transfers and launches
// take on it. `trireme doctor --probe` measures them, `trireme plan time` reads them; for GPUs that nobody
// has measured there are rates derived from data sheets.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/choices.h"

namespace trireme::plan {

/// The products of a linear layer, which read their matrices in different orders.
enum class ProductPass {
  kForward,  ///< x (m, k) times a weight that lies as (n, k)
  kInput,    ///< gradients (m, k) times a weight that lies as (k, n)
  kWeight    ///< inputs, which lie as (k, m), times gradients (k, n)
};
template <>
inline constexpr auto kNames<ProductPass> = std::to_array<std::string_view>({"forward", "input", "weight"});
inline constexpr size_t kProductPasses = kNames<ProductPass>.size();

/// Seconds of products (m, k) by (k, n) for every combination of some sizes.
struct ProductGrid {
  std::vector<int64_t> m, n, k;  ///< rising
  std::vector<double> seconds;   ///< by m, then n, then k; none falls where a size grows

  /// Seconds of a product of any size. Between sizes of the grid they change linearly with each size, which
  /// is exact for the sum of a start, operations and bytes of matrices. A product smaller than those of the
  /// grid takes as long as the smallest; beyond the largest, time grows with work.
  double seconds_of(double rows, double columns, double inner) const;
  double most_flops() const;  ///< a second, of the fastest product
  bool operator==(const ProductGrid&) const = default;
};
using ProductGrids = std::array<ProductGrid, kProductPasses>;

/// FLOPs a second of causal attention, of which half counts: 2 T heads head_dim a token forward, twice that
/// backward.
struct AttentionRate {
  int64_t length = 0, head_dim = 0;
  double forward = 0.0, backward = 0.0;
  bool operator==(const AttentionRate&) const = default;
};

/// Bytes a second, read and written, of passes over memory.
struct MemoryRates {
  double copy = 0.0;
  double add = 0.0;   ///< sums of two tensors, of rows for a bias, and rotations
  double norm = 0.0;  ///< reads and writes each element once; with a sum twice
  double norm_backward = 0.0;
  double activation = 0.0;  ///< GELU and SwiGLU
  double activation_backward = 0.0;
  double loss = 0.0;    ///< over logits, with their gradient
  double update = 0.0;  ///< of an optimizer
  double cached = 0.0;  ///< of the fastest pass over what caches hold; 0: not measured
  /// The fastest pass over memory, caches left aside.
  double most() const;
  bool operator==(const MemoryRates&) const = default;
};

/// A transfer of `bytes` takes latency_s + bytes / bytes_per_s, where bytes are those that one rank sends.
struct LinkRate {
  int64_t ranks = 2;  ///< that take part
  double latency_s = 0.0, bytes_per_s = 0.0;
  double seconds_of(double bytes) const { return latency_s + bytes / bytes_per_s; }
  bool operator==(const LinkRate&) const = default;
};
/// The links of ranks, within a host but for `between`.
struct LinkRates {
  std::vector<LinkRate> gather;  ///< all-gathers, by ranks, rising
  std::vector<LinkRate> reduce;  ///< reduce-scatters with their sums, and all-to-alls
  LinkRate send;                 ///< of one rank to another
  LinkRate between;              ///< of any kind among ranks of several hosts
  int64_t host_ranks = 1;        ///< of one host
  bool measured = false;
  bool operator==(const LinkRates&) const = default;
};
/// The rate of the fewest ranks that are at least `ranks`, else that of the most.
const LinkRate& of_ranks(const std::vector<LinkRate>& rates, int64_t ranks);

struct DiskRates {
  double write = 0.0, read = 0.0;  ///< bytes a second; 0: not measured
  bool operator==(const DiskRates&) const = default;
};

struct Rates {
  std::string device;       ///< "NVIDIA H200", "AMD EPYC"
  bool on_gpu = false;      ///< the host launches what the device does, and runs ahead of it
  bool measured = false;    ///< on a machine; else derived from data sheets
  std::string origin = {};  ///< for people: a file, or what the numbers are derived from; no part of a file
  int64_t ranks = 1;        ///< that were measured at once
  double launch_s = 0.0;    ///< the host's time for an operation
  /// By the dtype of computation, "fp32" and "bf16", and "fp8".
  std::map<std::string, ProductGrids> products = {};
  std::map<std::string, std::vector<AttentionRate>> attention = {};
  std::map<std::string, MemoryRates> memory = {};
  LinkRates links = {};
  DiskRates disk = {};
  /// FLOPs a second of the data sheet, of which MFU is a share, by dtype; without one it is a share of the
  /// fastest product.
  std::map<std::string, double> peak_flops = {};
  bool operator==(const Rates& other) const;

  // Each throws ConfigError that names the dtypes that there are, where it has no rates in `dtype`.
  double product(const std::string& dtype, ProductPass pass, double rows, double columns, double inner) const;
  AttentionRate attention_of(const std::string& dtype, int64_t length, int64_t head_dim) const;
  const MemoryRates& memory_of(const std::string& dtype) const;
  double fastest_product(const std::string& dtype) const;  ///< FLOPs a second
  double peak_of(const std::string& dtype) const;
};

/// Rates of a CPU rank, or of the GPU that plan::gpu_bytes() knows by this name ("" is an H100), derived from
/// data sheets and shares of them that were measured elsewhere. Throws ConfigError for other names.
Rates usual_rates(Device device, const std::string& gpu = {});
/// The name that usual_rates() has for a GPU that calls itself `name` ("NVIDIA H200"); empty: none.
std::string known_gpu(std::string_view name);

/// One JSON document, trireme.rates/1. rates_from_text() reads it back.
std::string to_json(const Rates& rates);
/// Throws ConfigError that names file and line of what is no JSON, or the field whose value cannot be.
/// `links` left out are the usual ones of the device.
Rates rates_from_text(const std::string& text, const std::string& file);

}  // namespace trireme::plan
