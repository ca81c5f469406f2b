#include "trireme/bench/machine_rates.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <vector>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/streams.h"
#include "trireme/base/text.h"
#include "trireme/bench/collectives.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/fp8.h"
#include "trireme/kernels/matmul.h"
#include "trireme/kernels/moment.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/attention.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/loss.h"
#include "trireme/report/machine.h"

namespace trireme::bench {
namespace {

using plan::ProductPass;

/// Sizes by the kind of device: what a training step has, and what its caches do not.
struct ProbeSizes {
  std::vector<int64_t> axis;  ///< of products, each dimension
  std::vector<int64_t> lengths, head_dims;
  int64_t tokens, heads;         ///< of attention
  int64_t rows, width, classes;  ///< of passes over memory, and of the loss
  std::vector<int64_t> mib;      ///< of collectives
};

ProbeSizes sizes_for(bool gpu) {
  if (gpu)
    return {.axis = {256, 1024, 4096, 16384},
            .lengths = {1024, 4096, 8192},
            .head_dims = {64, 128},
            .tokens = 16384,
            .heads = 16,
            .rows = 16384,
            .width = 4096,
            .classes = 16384,
            .mib = {4, 256}};
  return {.axis = {32, 128, 512, 2048},
          .lengths = {128, 512, 2048},
          .head_dims = {32, 64},
          .tokens = 2048,
          .heads = 4,
          .rows = 2048,
          .width = 512,
          .classes = 1024,
          .mib = {1, 16}};
}

/// Times what all ranks do at once.
class ProbeClock {
 public:
  explicit ProbeClock(std::function<void()> barrier) : barrier_(std::move(barrier)) {}

  /// Seconds of a call: the least of a few samples of some milliseconds, since whatever disturbs a machine
  /// only adds time; or of the only call where that takes long.
  double seconds_of(const std::function<void()>& call) const {
    constexpr double kSample_s = 0.008, kLong_s = 0.25;
    constexpr int kSamples = 4;
    barrier_();
    call();  // libraries choose kernels and take memory
    const double once = timed(call, 1);
    if (once > kLong_s) return once;
    const int calls = std::clamp(static_cast<int>(kSample_s / std::max(once, 1e-7)), 1, 2000);
    double least = once;
    for (int i = 0; i < kSamples; ++i) least = std::min(least, timed(call, calls));
    return least;
  }

 private:
  static double timed(const std::function<void()>& call, int calls) {
    kernels::synchronize_gpu();
    const double begin = monotonic_seconds();
    for (int i = 0; i < calls; ++i) call();
    kernels::synchronize_gpu();
    return (monotonic_seconds() - begin) / calls;
  }

  std::function<void()> barrier_;
};

/// The rates of one dtype of computation.
class Probe {
 public:
  Probe(at::Device device, at::ScalarType dtype, const ProbeClock& clock)
      : sizes_(sizes_for(device.is_cuda())),
        options_(at::TensorOptions(device).dtype(dtype)),
        clock_(clock) {}

  plan::ProductGrids products() const {
    plan::ProductGrids grids;
    for (size_t pass = 0; pass < plan::kProductPasses; ++pass) {
      grids[pass] = grid(
          [&](int64_t m, int64_t n, int64_t k) { return product(static_cast<ProductPass>(pass), m, n, k); });
    }
    return grids;
  }

  /// Products of matrices that are cast already; casts are passes over memory.
  plan::ProductGrids fp8_products() const {
    plan::ProductGrids grids;
    for (size_t pass = 0; pass < plan::kProductPasses; ++pass) {
      // As precision.fp8_fast has it, unless it is set.
      const bool fast = static_cast<ProductPass>(pass) == ProductPass::kForward;
      grids[pass] = grid([&](int64_t m, int64_t n, int64_t k) { return fp8_product(fast, m, n, k); });
    }
    return grids;
  }

  std::vector<plan::AttentionRate> attention() const {
    std::vector<plan::AttentionRate> rates;
    for (const int64_t head_dim : sizes_.head_dims) {
      for (const int64_t length : sizes_.lengths) rates.push_back(attention(length, head_dim));
    }
    return rates;
  }

  plan::MemoryRates memory() const {
    const at::Tensor x = rows(sizes_.width), y = rows(sizes_.width);
    at::Tensor out = rows(sizes_.width);
    plan::MemoryRates rates;
    rates.copy = 2.0 * bytes(x) / clock_.seconds_of([&] { out.copy_(x); });
    rates.add = 3.0 * bytes(x) / clock_.seconds_of([&] { at::add_out(out, x, y); });
    add_norm(rates);
    add_activation(rates);
    at::Tensor logits = rows(sizes_.classes);
    at::Tensor loss = at::empty({sizes_.rows}, options_.dtype(at::kFloat));
    const at::Tensor targets = at::zeros({sizes_.rows}, options_.dtype(at::kLong));
    rates.loss = 2.0 * bytes(logits) /
                 clock_.seconds_of([&] { kernels::cross_entropy(loss, logits, targets, 1.0, true); });
    rates.update = update_rate();
    rates.cached = cached_rate(out);
    return rates;
  }

  /// The host's time for an operation that has almost nothing to do, forward or backward.
  double launch_s() const {
    const at::Tensor x = at::randn({16}, options_).requires_grad_(true);
    constexpr int kCalls = 200;
    const double both = clock_.seconds_of([&] {
      for (int i = 0; i < kCalls; ++i) nn::gelu(x).backward(x.detach());
    });
    return both / (2.0 * kCalls);
  }

 private:
  at::Tensor rows(int64_t width) const { return at::randn({sizes_.rows, width}, options_); }
  static double bytes(const at::Tensor& tensor) { return static_cast<double>(tensor.nbytes()); }

  plan::ProductGrid grid(const std::function<double(int64_t, int64_t, int64_t)>& seconds_of) const {
    plan::ProductGrid grid{.m = sizes_.axis, .n = sizes_.axis, .k = sizes_.axis, .seconds = {}};
    for (const int64_t m : grid.m) {
      for (const int64_t n : grid.n) {
        for (const int64_t k : grid.k) grid.seconds.push_back(seconds_of(m, n, k));
      }
    }
    return rising(std::move(grid));
  }

  double product(ProductPass pass, int64_t m, int64_t n, int64_t k) const {
    at::Tensor out = at::empty({m, n}, options_);
    const at::Tensor a =
        pass == ProductPass::kWeight ? at::randn({k, m}, options_).t() : at::randn({m, k}, options_);
    const at::Tensor b =
        pass == ProductPass::kForward ? at::randn({n, k}, options_).t() : at::randn({k, n}, options_);
    return clock_.seconds_of([&] { kernels::matmul(out, a, b); });
  }

  double fp8_product(bool fast, int64_t m, int64_t n, int64_t k) const {
    const auto cast = [&](int64_t rows) {
      const at::Tensor x = at::randn({rows, k}, options_);
      const kernels::Fp8Cast how{.scaling = kernels::Fp8Scaling::kTensor};
      return kernels::fp8_cast(x, kernels::fp8_amax(x, how.scaling), how, kernels::Fp8Copy::kPlain).plain;
    };
    at::Tensor out = at::empty({m, n}, options_);
    const kernels::Fp8Matrix a = cast(m), b = cast(n);
    return clock_.seconds_of([&] { kernels::fp8_matmul(out, a, b, fast); });
  }

  /// A machine that was disturbed may have taken longer for less.
  static plan::ProductGrid rising(plan::ProductGrid grid) {
    const size_t strides[] = {grid.n.size() * grid.k.size(), grid.k.size(), 1};
    const size_t sizes[] = {grid.m.size(), grid.n.size(), grid.k.size()};
    for (size_t at = 0; at < grid.seconds.size(); ++at) {
      for (size_t axis = 0; axis < 3; ++axis) {
        if (at / strides[axis] % sizes[axis] == 0) continue;
        grid.seconds[at] = std::max(grid.seconds[at], grid.seconds[at - strides[axis]]);
      }
    }
    return grid;
  }

  /// Seconds of a forward pass, and of the backward pass behind it.
  struct Both {
    double forward, backward;
  };
  Both both_of(const std::function<at::Tensor()>& forward) const {
    const at::Tensor gradient = at::randn_like(forward());
    const double alone = clock_.seconds_of([&] { forward(); });
    const double both = clock_.seconds_of([&] { forward().backward(gradient); });
    return {alone, std::max(both - alone, 0.1 * alone)};
  }

  plan::AttentionRate attention(int64_t length, int64_t head_dim) const {
    const int64_t batch = std::max<int64_t>(1, sizes_.tokens / length), width = sizes_.heads * head_dim;
    const at::Tensor qkv = at::randn({batch, length, 3 * width}, options_).requires_grad_(true);
    const Both seconds = both_of([&] {
      return nn::causal_attention(qkv, {sizes_.heads, sizes_.heads, head_dim}, nn::RopeTable());
    });
    const double flops =
        2.0 * static_cast<double>(length) * static_cast<double>(width) * static_cast<double>(batch * length);
    return {length, head_dim, flops / seconds.forward, 2.0 * flops / seconds.backward};
  }

  /// Bytes as plan/unit_work.cpp counts them.
  void add_norm(plan::MemoryRates& rates) const {
    const at::Tensor x = rows(sizes_.width).requires_grad_(true);
    const at::Tensor weight = at::ones({sizes_.width}, options_).requires_grad_(true);
    const at::Tensor bias = at::zeros({sizes_.width}, options_).requires_grad_(true);
    const Both seconds = both_of([&] { return nn::layer_norm(x, weight, bias, 1e-5); });
    rates.norm = 2.0 * bytes(x) / seconds.forward;
    rates.norm_backward = 4.0 * bytes(x) / seconds.backward;
  }

  void add_activation(plan::MemoryRates& rates) const {
    const at::Tensor x = rows(sizes_.width).requires_grad_(true);
    const Both seconds = both_of([&] { return nn::gelu(x); });
    rates.activation = 2.0 * bytes(x) / seconds.forward;
    rates.activation_backward = 3.0 * bytes(x) / seconds.backward;
  }

  /// The rate of a pass in place over the first rows of `x`: as few as caches hold, but enough to take longer
  /// than a launch.
  double cached_rate(const at::Tensor& x) const {
    double most = 0.0;
    for (const int64_t part : {8, 16, 32, 64, 128}) {
      at::Tensor few = x.narrow(0, 0, sizes_.rows / part);
      most = std::max(most, 2.0 * bytes(few) / clock_.seconds_of([&] { few.neg_(); }));
    }
    return most;
  }

  double update_rate() const {
    const int64_t count = sizes_.rows * sizes_.width;
    const bool copies = options_.dtype() != at::kFloat;
    at::Tensor param = at::randn({count}, options_.dtype(at::kFloat));
    at::Tensor copy = copies ? at::empty({count}, options_) : at::Tensor();
    const at::Tensor gradient = at::randn({count}, options_.dtype(at::kFloat));
    kernels::MomentsOfRange moments;
    for (const auto kind : {kernels::MomentKind::kSigned, kernels::MomentKind::kSquares})
      moments.numbers.emplace_back(count, kernels::MomentFormat::kFp32, kind, options_.device());
    const kernels::UpdatePart all[] = {{.begin = 0, .end = count, .lr = 1e-4F, .weight_decay = 0.1F}};
    const kernels::AdamWStep step{.beta1 = 0.9F,
                                  .beta2 = 0.95F,
                                  .eps = 1e-8F,
                                  .bias_correction1 = 0.5F,
                                  .bias_correction2 = 0.5F,
                                  .grad_scale = 1.0F};
    const double seconds =
        clock_.seconds_of([&] { kernels::adamw(param, moments, gradient, copy, all, step); });
    const double of_element = 4.0 * 3.0 + 4.0 * 4.0 + (copies ? 2.0 : 0.0);
    return of_element * static_cast<double>(count) / seconds;
  }

  ProbeSizes sizes_;
  at::TensorOptions options_;
  const ProbeClock& clock_;
};

/// The bandwidth of an operation from its times at two sizes, by the way that training takes: memory of peers
/// where ranks share it, else messages.
double bandwidth_of(const std::vector<bench::CollectiveTimes>& times, const std::string& operation) {
  std::vector<const bench::CollectiveTimes*> found;
  for (const bench::CollectiveTimes& one : times) {
    const bool other_way = !found.empty() && found.front()->by != one.by;
    if (one.operation == operation && !one.in_place && !other_way) found.push_back(&one);
  }
  const auto &small = *found.front(), &large = *found.back();
  const double more_s = 1e-3 * (large.median_ms() - small.median_ms());
  const auto more = static_cast<double>(large.wire_bytes - small.wire_bytes);
  // A disturbed machine may have taken longer for less.
  return more_s > 0.0 ? more / more_s : 1e9 * large.gb_per_s();
}

/// Seconds of a collective that moves almost nothing. All ranks make as many calls.
double latency_of(comm::Group& group, const std::function<void()>& call) {
  constexpr int kCalls = 64;
  const auto timed = [&] {
    kernels::synchronize_gpu();
    group.barrier();
    const double begin = monotonic_seconds();
    for (int i = 0; i < kCalls; ++i) call();
    kernels::synchronize_gpu();
    return (monotonic_seconds() - begin) / kCalls;
  };
  timed();
  return timed();
}

void measure_links(plan::LinkRates& links, const std::shared_ptr<comm::World>& world,
                   const std::vector<int64_t>& ranks) {
  if (world->size() < 2) return;
  constexpr int64_t kRounds = 3, kFew = 64;
  const auto group = world->make_group("latency", ranks, {.share = true});
  const auto options = at::TensorOptions(world->device());
  const at::Tensor part = group->symmetric_empty(kFew, at::kFloat).zero_();
  const at::Tensor values = group->symmetric_empty(kFew * world->size(), at::kFloat).zero_();
  at::Tensor whole = at::empty({kFew * world->size()}, options), sum = at::empty({kFew}, options);
  const double gather_s = latency_of(*group, [&] { group->all_gather(whole, part); });
  const double reduce_s = latency_of(*group, [&] { group->reduce_scatter_ordered(sum, values); });
  const auto times = bench::time_collectives(world, sizes_for(world->device().is_cuda()).mib, kRounds);
  links.gather = {{world->size(), gather_s, bandwidth_of(times, "all_gather")}};
  links.reduce = {{world->size(), reduce_s, bandwidth_of(times, "reduce_scatter")}};
  links.send = links.gather.front();
  links.measured = true;
}

}  // namespace

plan::DiskRates measure_disk(const std::string& path) {
  constexpr size_t kBytes = size_t{64} << 20;
  const std::string scratch = path + ".disk";
  const std::string content(kBytes, 'x');
  const double begin = monotonic_seconds();
  write_file_atomic(scratch, content);
  const double written = monotonic_seconds();
  if (const int file = ::open(scratch.c_str(), O_RDONLY | O_CLOEXEC); file >= 0) {
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
  const double opened = monotonic_seconds();
  read_file(scratch);
  const double read = monotonic_seconds();
  std::error_code ignored;
  std::filesystem::remove(scratch, ignored);
  return {.write = kBytes / (written - begin), .read = kBytes / (read - opened)};
}

plan::Rates measure_rates(const std::shared_ptr<comm::World>& world) {
  const bool gpu = world->device().is_cuda();
  const std::string device = gpu ? kernels::gpus().front().name : report::describe_machine().cpu;
  const std::string known = gpu ? plan::known_gpu(device) : "";
  const auto say = [&](const std::string& what) {
    if (world->rank() == 0) write_stderr(fmt::format("probe: {}\n", what));
  };
  plan::Rates rates{.device = device, .on_gpu = gpu, .measured = true, .ranks = world->size()};
  const plan::Rates usual = plan::usual_rates(gpu ? plan::Device::kCuda : plan::Device::kCpu, known);
  rates.links = usual.links;
  if (!known.empty()) rates.peak_flops = usual.peak_flops;
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < world->size(); ++rank) ranks.push_back(rank);
  const auto group = world->make_group("probe", ranks);
  const ProbeClock clock([&] { group->barrier(); });
  for (const auto& [name, dtype] : {std::pair("fp32", at::kFloat), std::pair("bf16", at::kBFloat16)}) {
    const Probe probe(world->device(), dtype, clock);
    say(fmt::format("products in {}", name));
    rates.products[name] = probe.products();
    say(fmt::format("attention and memory in {}", name));
    rates.attention[name] = probe.attention();
    rates.memory[name] = probe.memory();
    if (dtype == at::kFloat) rates.launch_s = probe.launch_s();
    if (dtype != at::kBFloat16 || !kernels::fp8_lack(world->device(), kernels::Fp8Scaling::kTensor).empty())
      continue;
    say("products in fp8");
    rates.products["fp8"] = probe.fp8_products();
  }
  say(world->size() > 1 ? fmt::format("links of {} ranks", world->size())
                        : "one rank has no links to measure");
  measure_links(rates.links, world, ranks);
  return rates;
}

}  // namespace trireme::bench
