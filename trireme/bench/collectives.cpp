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

/// Elements of tensors are small whole numbers, of which bf16 holds the sum over ranks exactly: element i of
/// a rank is (i + rank) modulo this.
int64_t modulus_of(int64_t ranks) {
  constexpr int64_t kExact = 256, kMost = 8;
  return std::clamp<int64_t>(kExact / ranks, 1, kMost);
}

/// (count) elements of a rank from number `begin` on, in bf16.
at::Tensor pattern(int64_t rank, int64_t begin, int64_t count, int64_t modulus, at::Device device) {
  const auto options = at::TensorOptions(device).dtype(at::kInt);
  return at::remainder(at::arange(count, options).add_(begin % modulus + rank), modulus).to(at::kBFloat16);
}

struct Case {
  CollectiveTimes times;
  std::function<void()> call;
  std::function<int64_t()> wrong;  ///< makes its input again, calls, and counts elements that differ
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
  void add_exchanges(int64_t mib, const Buffers& buffers);
  /// `expected`: of the rank's `output` once it was called; `reset`: makes the input again, if the call
  /// changes it.
  void add(const CollectiveTimes& times, std::function<void()> call, at::Tensor output,
           std::function<at::Tensor()> expected, std::function<void()> reset = {});
  at::Tensor mine(int64_t count) const;
  at::Tensor sum_from(int64_t begin, int64_t count) const;
  double time_ms(const std::function<void()>& call);

  bool on_gpu() const { return world_->device().is_cuda(); }
  /// Where GPUs cannot reach each other's memory there is nothing of ours to measure.
  bool shares() const {
    return !on_gpu() || (kernels_->symmetric_bytes() > 0 && copies_->symmetric_bytes() > 0);
  }

  std::shared_ptr<comm::World> world_;
  std::shared_ptr<Group> kernels_, copies_, backend_;
  int64_t modulus_;
  std::vector<Case> cases_;
};

Bench::Bench(std::shared_ptr<comm::World> world)
    : world_(std::move(world)), modulus_(modulus_of(world_->size())) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < world_->size(); ++r) ranks.push_back(r);
  kernels_ = world_->make_group("ours", ranks, {.share = true, .gather = GatherBy::kKernels});
  copies_ = world_->make_group("copies", ranks, {.share = true, .gather = GatherBy::kCopies});
  backend_ = world_->make_group("backend", ranks, {.share = false});
}

void Bench::add(const CollectiveTimes& times, std::function<void()> call, at::Tensor output,
                std::function<at::Tensor()> expected, std::function<void()> reset) {
  auto wrong = [group = backend_, call, output = std::move(output), expected = std::move(expected),
                reset = std::move(reset)] {
    if (reset) reset();
    call();
    return count_wrong(*group, output, expected());
  };
  cases_.push_back({.times = times, .call = std::move(call), .wrong = std::move(wrong)});
}

/// This rank's elements from the first on.
at::Tensor Bench::mine(int64_t count) const {
  return pattern(world_->rank(), 0, count, modulus_, world_->device());
}

/// The sum over ranks of elements from number `begin` on.
at::Tensor Bench::sum_from(int64_t begin, int64_t count) const {
  at::Tensor sum = pattern(0, begin, count, modulus_, world_->device());
  for (int64_t rank = 1; rank < world_->size(); ++rank)
    sum += pattern(rank, begin, count, modulus_, world_->device());
  return sum;
}

void Bench::add_size(int64_t mib) {
  const Buffers buffers = make_buffers(mib);
  add_reductions(mib, buffers);
  add_gathers(mib, buffers);
  add_exchanges(mib, buffers);
}

Bench::Buffers Bench::make_buffers(int64_t mib) const {
  const int64_t n = world_->size(), shard = mib * kMiB / 2 / n, count = n * shard;
  const auto options = at::TensorOptions(world_->device());
  Buffers made;
  made.values = mine(count);
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
  const int64_t shard = buffers.sum.numel(), begin = world_->rank() * shard;
  const auto reduce = [&](const std::string& by, int64_t bytes, const at::Tensor& out,
                          std::function<void()> call) {
    add({.operation = "reduce_scatter", .by = by, .mib = mib, .wire_bytes = bytes}, std::move(call), out,
        [this, begin, shard] { return sum_from(begin, shard); });
  };
  if (shares()) {
    reduce("ordered, peer memory", wire, buffers.sum,
           [group = kernels_, sum = buffers.sum, input = buffers.shared] {
             at::Tensor out = sum;
             group->reduce_scatter_ordered(out, input);
           });
  }
  reduce("ordered, messages", wire, buffers.sum,
         [group = backend_, sum = buffers.sum, input = buffers.values] {
           at::Tensor out = sum;
           group->reduce_scatter_ordered(out, input);
         });
  if (!on_gpu()) return;
  reduce("backend bf16", wire, buffers.low_sum,
         [group = backend_, sum = buffers.low_sum, input = buffers.values] {
           at::Tensor out = sum;
           group->reduce_scatter(out, input);
         });
  reduce("cast, backend fp32", 2 * wire, buffers.sum,
         [group = backend_, sum = buffers.sum, input = buffers.values] {
           at::Tensor out = sum;
           group->reduce_scatter(out, input.to(at::kFloat));
         });
}

void Bench::add_gathers(int64_t mib, const Buffers& buffers) {
  const int64_t shard = buffers.part.numel(), wire = 2 * (world_->size() - 1) * shard;
  const auto expected = [this, shard] {
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < world_->size(); ++rank)
      parts.push_back(pattern(rank, 0, shard, modulus_, world_->device()));
    return at::cat(parts);
  };
  const auto gather = [&](const std::string& by, std::shared_ptr<Group> group, const at::Tensor& part) {
    add(
        {.operation = "all_gather", .by = by, .mib = mib, .wire_bytes = wire},
        [group = std::move(group), whole = buffers.whole, part] {
          at::Tensor out = whole;
          group->all_gather(out, part);
        },
        buffers.whole, expected);
  };
  if (shares()) gather("peer memory", kernels_, buffers.part);
  if (on_gpu() && shares()) gather("copy engines", copies_, buffers.copied);
  gather("backend", backend_, buffers.part);
}

/// The collectives that the backend alone has.
void Bench::add_exchanges(int64_t mib, const Buffers& buffers) {
  const int64_t n = world_->size(), count = buffers.values.numel(), shard = count / n;
  const at::Tensor whole = buffers.whole;
  const auto case_of = [&](const std::string& operation, int64_t wire) {
    return CollectiveTimes{.operation = operation, .by = "backend", .mib = mib, .wire_bytes = wire};
  };
  const auto fill = [this, whole, count] { at::Tensor(whole).copy_(mine(count)); };
  add(
      case_of("all_reduce", 4 * (n - 1) * shard),
      [group = backend_, whole] {
        at::Tensor out = whole;
        group->all_reduce(out, comm::ReduceOp::kSum);
      },
      whole, [this, count] { return sum_from(0, count); }, fill);
  add(
      case_of("all_to_all", 2 * (n - 1) * shard),
      [group = backend_, whole, input = buffers.values] {
        at::Tensor out = whole;
        group->all_to_all(out, input);
      },
      whole,
      [this, n, shard] {
        std::vector<at::Tensor> chunks;
        for (int64_t from = 0; from < n; ++from)
          chunks.push_back(pattern(from, world_->rank() * shard, shard, modulus_, world_->device()));
        return at::cat(chunks);
      });
  add(
      case_of("broadcast", 2 * count),
      [group = backend_, whole] {
        at::Tensor out = whole;
        group->broadcast(out, 0);
      },
      whole, [this, count] { return pattern(0, 0, count, modulus_, world_->device()); }, fill);
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
  for (Case& one : cases_) {
    one.times.wrong = one.wrong();
    times.push_back(std::move(one.times));
  }
  return times;
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Seconds a message from rank to rank, on the ranks of the pair; others wait.
double time_messages(const comm::World& world, Group& group, const PairTimes& pair, at::Tensor& message,
                     int calls) {
  kernels::synchronize_gpu();
  group.barrier();
  const double begin = monotonic_seconds();
  for (int i = 0; i < calls && world.rank() == pair.from; ++i) group.send(message, pair.to);
  for (int i = 0; i < calls && world.rank() == pair.to; ++i) group.recv(message, pair.from);
  kernels::synchronize_gpu();
  return (monotonic_seconds() - begin) / calls;
}

}  // namespace

int64_t count_wrong(Group& group, const at::Tensor& output, const at::Tensor& expected) {
  const at::Tensor differing = at::ne(output, expected.to(output.scalar_type())).sum();
  double wrong = 0.0;
  for (const auto& of_rank : comm::gather_scalars(group, {differing.item<double>()})) wrong += of_rank[0];
  return static_cast<int64_t>(wrong);
}

std::vector<PairTimes> time_pairs(const std::shared_ptr<comm::World>& world, int64_t mib, int64_t rounds) {
  TRIREME_CHECK(rounds >= 1, "[bench.collectives] {} rounds requested; run at least 1", rounds);
  constexpr int kSmallCalls = 20, kLargeCalls = 4;
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < world->size(); ++r) ranks.push_back(r);
  const auto group = world->make_group("pairs", ranks, {.share = false});
  const auto options = at::TensorOptions(world->device()).dtype(at::kFloat);
  at::Tensor small = at::zeros({1}, options), large = at::zeros({mib * kMiB / 4}, options);
  std::vector<PairTimes> pairs;
  for (const int64_t from : ranks) {
    for (const int64_t to : ranks) {
      if (from == to) continue;
      PairTimes pair{.from = from, .to = to};
      time_messages(*world, *group, pair, small, 1);  // connects the two
      std::vector<double> latencies, seconds;
      for (int64_t round = 0; round < rounds; ++round) {
        latencies.push_back(time_messages(*world, *group, pair, small, kSmallCalls));
        seconds.push_back(time_messages(*world, *group, pair, large, kLargeCalls));
      }
      const auto seen = comm::gather_scalars(*group, {median_of(latencies), median_of(seconds)});
      const std::vector<double>& by_receiver = seen[static_cast<size_t>(to)];
      pair.latency_us = 1e6 * by_receiver[0];
      pair.gb_per_s = static_cast<double>(mib * kMiB) / by_receiver[1] / 1e9;
      pairs.push_back(pair);
    }
  }
  return pairs;
}

double CollectiveTimes::tensor_gb_per_s() const {
  return static_cast<double>(mib * kMiB) / median_ms() / 1e6;
}

double CollectiveTimes::median_ms() const {
  TRIREME_CHECK(!calls_ms.empty(), "[bench.collectives] {} was never timed", operation);
  return median_of(calls_ms);
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
