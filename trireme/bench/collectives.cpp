#include "trireme/bench/collectives.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"

namespace trireme::bench {
namespace {

using comm::GatherBy;
using comm::Group;

constexpr int64_t kMiB = 1 << 20;
constexpr double kEnough_s = 0.02;
constexpr int kMostCalls = 20;

struct Case {
  CollectiveTimes times;
  std::function<void()> call;
};

/// The groups of a world, and the cases of all sizes with their buffers.
class Bench {
 public:
  explicit Bench(std::shared_ptr<comm::World> world);
  void add_size(int64_t mib);
  std::vector<CollectiveTimes> run(int64_t rounds, const std::function<void(int64_t)>& on_round);

 private:
  struct Buffers {
    at::Tensor values, shared;  // (n*m) bf16, `shared` where other ranks can read it
    at::Tensor part, copied;    // (m) bf16, likewise
    at::Tensor sum, low_sum;    // (m) fp32 and bf16
    at::Tensor whole;           // (n*m) bf16
  };
  Buffers make_buffers(int64_t mib) const;
  void add_reductions(int64_t mib, const Buffers& buffers);
  void add_gathers(int64_t mib, const Buffers& buffers);
  void add(const std::string& operation, const std::string& by, int64_t mib, int64_t wire_bytes,
           std::function<void()> call);
  double time_ms(const std::function<void()>& call);

  bool on_gpu() const { return world_->device().is_cuda(); }
  /// Where GPUs cannot reach each other's memory there is nothing of ours to measure.
  bool shares() const {
    return !on_gpu() || (kernels_->symmetric_bytes() > 0 && copies_->symmetric_bytes() > 0);
  }

  std::shared_ptr<comm::World> world_;
  std::shared_ptr<Group> kernels_, copies_, backend_;
  std::vector<Case> cases_;
};

Bench::Bench(std::shared_ptr<comm::World> world) : world_(std::move(world)) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < world_->size(); ++r) ranks.push_back(r);
  kernels_ = world_->make_group("ours", ranks, {.share = true, .gather = GatherBy::kKernels});
  copies_ = world_->make_group("copies", ranks, {.share = true, .gather = GatherBy::kCopies});
  backend_ = world_->make_group("backend", ranks, {.share = false});
}

void Bench::add(const std::string& operation, const std::string& by, int64_t mib, int64_t wire_bytes,
                std::function<void()> call) {
  cases_.push_back(
      {.times = {.operation = operation, .by = by, .mib = mib, .wire_bytes = wire_bytes, .calls_ms = {}},
       .call = std::move(call)});
}

void Bench::add_size(int64_t mib) {
  const Buffers buffers = make_buffers(mib);
  add_reductions(mib, buffers);
  add_gathers(mib, buffers);
}

Bench::Buffers Bench::make_buffers(int64_t mib) const {
  const int64_t n = world_->size(), shard = mib * kMiB / 2 / n, count = n * shard;
  const auto options = at::TensorOptions(world_->device());
  Buffers made;
  made.values = at::randn({count}, options).to(at::kBFloat16);
  made.shared = kernels_->symmetric_empty(count, at::kBFloat16).copy_(made.values);
  made.part = kernels_->symmetric_empty(shard, at::kBFloat16).copy_(made.values.narrow(0, 0, shard));
  made.copied = copies_->symmetric_empty(shard, at::kBFloat16).copy_(made.part);
  made.sum = at::empty({shard}, options);
  made.low_sum = at::empty({shard}, made.values.options());
  made.whole = at::empty_like(made.values);
  return made;
}

void Bench::add_reductions(int64_t mib, const Buffers& buffers) {
  const int64_t wire = 2 * (world_->size() - 1) * buffers.sum.numel();
  const auto reduce = [&](const std::string& by, int64_t bytes, std::function<void()> call) {
    add("reduce_scatter", by, mib, bytes, std::move(call));
  };
  if (shares()) {
    reduce("ordered, peer memory", wire, [group = kernels_, sum = buffers.sum, input = buffers.shared] {
      at::Tensor out = sum;
      group->reduce_scatter_ordered(out, input);
    });
  }
  reduce("ordered, messages", wire, [group = backend_, sum = buffers.sum, input = buffers.values] {
    at::Tensor out = sum;
    group->reduce_scatter_ordered(out, input);
  });
  if (!on_gpu()) return;
  reduce("backend bf16", wire, [group = backend_, sum = buffers.low_sum, input = buffers.values] {
    at::Tensor out = sum;
    group->reduce_scatter(out, input);
  });
  reduce("cast, backend fp32", 2 * wire, [group = backend_, sum = buffers.sum, input = buffers.values] {
    at::Tensor out = sum;
    group->reduce_scatter(out, input.to(at::kFloat));
  });
}

void Bench::add_gathers(int64_t mib, const Buffers& buffers) {
  const int64_t wire = 2 * (world_->size() - 1) * buffers.part.numel();
  const auto gather = [&](const std::string& by, std::shared_ptr<Group> group, const at::Tensor& part) {
    add("all_gather", by, mib, wire, [group = std::move(group), whole = buffers.whole, part] {
      at::Tensor out = whole;
      group->all_gather(out, part);
    });
  };
  if (shares()) gather("peer memory", kernels_, buffers.part);
  if (on_gpu() && shares()) gather("copy engines", copies_, buffers.copied);
  gather("backend", backend_, buffers.part);
}

/// ms a call, all ranks in step at the start.
double Bench::time_ms(const std::function<void()>& call) {
  const auto timed = [&](int calls) {
    kernels::synchronize_gpu();
    backend_->barrier();
    const double begin = monotonic_seconds();
    for (int i = 0; i < calls; ++i) call();
    kernels::synchronize_gpu();
    return monotonic_seconds() - begin;
  };
  const double once = timed(2) / 2.0;
  at::Tensor calls = at::full({}, std::clamp(kEnough_s / once, 1.0, double{kMostCalls}),
                              at::TensorOptions(world_->device()));
  backend_->all_reduce(calls, comm::ReduceOp::kMin);
  const int count = calls.item<int>();
  return 1e3 * timed(count) / count;
}

std::vector<CollectiveTimes> Bench::run(int64_t rounds, const std::function<void(int64_t)>& on_round) {
  for (int64_t round = 0; round < rounds; ++round) {
    for (Case& one : cases_) one.times.calls_ms.push_back(time_ms(one.call));
    if (on_round) on_round(round + 1);
  }
  std::vector<CollectiveTimes> times;
  for (Case& one : cases_) times.push_back(std::move(one.times));
  return times;
}

}  // namespace

double CollectiveTimes::median_ms() const {
  TRIREME_CHECK(!calls_ms.empty(), "[bench.collectives] {} was never timed", operation);
  std::vector<double> sorted = calls_ms;
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

std::vector<CollectiveTimes> time_collectives(const std::shared_ptr<comm::World>& world,
                                              const std::vector<int64_t>& mib, int64_t rounds,
                                              const std::function<void(int64_t)>& on_round) {
  TRIREME_CHECK(rounds >= 1, "[bench.collectives] {} rounds requested; run at least 1", rounds);
  Bench bench(world);
  for (const int64_t size : mib) bench.add_size(size);
  return bench.run(rounds, on_round);
}

}  // namespace trireme::bench
