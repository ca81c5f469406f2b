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
constexpr int64_t kRoot = 0;
constexpr double kNever = -1.0;  // which is an element of no result

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
    at::Tensor values, shared;              // (n*m) bf16, `shared` where other ranks can read it
    at::Tensor part, copied;                // (m) bf16, likewise
    at::Tensor shared_slots, copied_slots;  // (n*m) bf16, where all-gathers in place may be read
    at::Tensor sum, low_sum;                // (m) fp32 and bf16
    at::Tensor whole;                       // (n*m) bf16
  };
  Buffers make_buffers(int64_t mib) const;
  void add_reductions(int64_t mib, const Buffers& buffers);
  void add_gathers(int64_t mib, const Buffers& buffers);
  void add_gather(const CollectiveTimes& times, const std::shared_ptr<Group>& group, const at::Tensor& whole,
                  const at::Tensor& input);
  void add_exchanges(int64_t mib, const Buffers& buffers);
  void add_rooted(int64_t mib, const Buffers& buffers);
  /// `expected`: of the rank's `output` once it was called; `reset`: makes the input again, if the call
  /// changes it.
  void add(const CollectiveTimes& times, std::function<void()> call, at::Tensor output,
           std::function<at::Tensor()> expected, std::function<void()> reset = {});
  at::Tensor mine(int64_t count) const;
  at::Tensor sum_from(int64_t begin, int64_t count) const;
  at::Tensor gathered(int64_t begin, int64_t count) const;
  at::Tensor slot_of(const at::Tensor& whole) const;
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
    output.fill_(kNever);
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

/// Elements of all ranks from number `begin` on, by rank.
at::Tensor Bench::gathered(int64_t begin, int64_t count) const {
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < world_->size(); ++rank)
    parts.push_back(pattern(rank, begin, count, modulus_, world_->device()));
  return at::cat(parts);
}

/// This rank's part of a tensor that has one for each rank.
at::Tensor Bench::slot_of(const at::Tensor& whole) const {
  const int64_t shard = whole.numel() / world_->size();
  return whole.narrow(0, world_->rank() * shard, shard);
}

void Bench::add_size(int64_t mib) {
  const Buffers buffers = make_buffers(mib);
  add_reductions(mib, buffers);
  add_gathers(mib, buffers);
  add_exchanges(mib, buffers);
  add_rooted(mib, buffers);
}

Bench::Buffers Bench::make_buffers(int64_t mib) const {
  const int64_t n = world_->size(), shard = mib * kMiB / 2 / n, count = n * shard;
  const auto options = at::TensorOptions(world_->device());
  Buffers made;
  made.values = mine(count);
  made.shared = kernels_->symmetric_empty(count, at::kBFloat16).copy_(made.values);
  made.part = kernels_->symmetric_empty(shard, at::kBFloat16).copy_(made.values.narrow(0, 0, shard));
  made.copied = copies_->symmetric_empty(shard, at::kBFloat16).copy_(made.part);
  made.shared_slots = kernels_->symmetric_empty(count, at::kBFloat16);
  if (on_gpu()) made.copied_slots = copies_->symmetric_empty(count, at::kBFloat16);
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
  const int64_t wire = 2 * (world_->size() - 1) * buffers.part.numel();
  const auto gather = [&](const std::string& by, const std::shared_ptr<Group>& group, const at::Tensor& part,
                          const at::Tensor& slots) {
    CollectiveTimes times{.operation = "all_gather", .by = by, .mib = mib, .wire_bytes = wire};
    add_gather(times, group, buffers.whole, part);
    times.in_place = true;
    add_gather(times, group, slots, slot_of(slots));
  };
  if (shares()) gather("peer memory", kernels_, buffers.part, buffers.shared_slots);
  if (on_gpu() && shares()) gather("copy engines", copies_, buffers.copied, buffers.copied_slots);
  gather("backend", backend_, buffers.part, buffers.whole);
}

/// An all-gather of this rank's first elements, which `input` is filled with.
void Bench::add_gather(const CollectiveTimes& times, const std::shared_ptr<Group>& group,
                       const at::Tensor& whole, const at::Tensor& input) {
  const int64_t count = input.numel();
  add(
      times,
      [group, whole, input] {
        at::Tensor out = whole;
        group->all_gather(out, input);
      },
      whole, [this, count] { return gathered(0, count); },
      [this, input, count] { input.copy_(mine(count)); });
}

/// The collectives of all ranks that the backend alone has.
void Bench::add_exchanges(int64_t mib, const Buffers& buffers) {
  const int64_t n = world_->size(), count = buffers.values.numel(), shard = count / n;
  const at::Tensor whole = buffers.whole;
  const auto case_of = [&](const std::string& operation, int64_t wire, bool in_place) {
    return CollectiveTimes{
        .operation = operation, .by = "backend", .mib = mib, .wire_bytes = wire, .in_place = in_place};
  };
  add(
      case_of("all_reduce", 4 * (n - 1) * shard, true),
      [group = backend_, whole] {
        at::Tensor out = whole;
        group->all_reduce(out, comm::ReduceOp::kSum);
      },
      whole, [this, count] { return sum_from(0, count); },
      [this, whole, count] { whole.copy_(mine(count)); });
  add(
      case_of("all_to_all", 2 * (n - 1) * shard, false),
      [group = backend_, whole, input = buffers.values] {
        at::Tensor out = whole;
        group->all_to_all(out, input);
      },
      whole, [this, shard] { return gathered(world_->rank() * shard, shard); });
}

/// The collectives from one rank or to one rank, which the backend alone has.
void Bench::add_rooted(int64_t mib, const Buffers& buffers) {
  const int64_t n = world_->size(), count = buffers.values.numel(), shard = count / n;
  const at::Tensor whole = buffers.whole, slot = slot_of(whole);
  const auto of_root = [this](const at::Tensor& result) {
    return world_->rank() == kRoot ? result : result.narrow(0, 0, 0);
  };
  const auto fill = [this, whole, count] { whole.copy_(mine(count)); };
  CollectiveTimes times{
      .operation = "broadcast", .by = "backend", .mib = mib, .wire_bytes = 2 * count, .in_place = true};
  add(
      times,
      [group = backend_, whole] {
        at::Tensor out = whole;
        group->broadcast(out, kRoot);
      },
      whole, [this, count] { return pattern(kRoot, 0, count, modulus_, world_->device()); }, fill);
  times.operation = "reduce";
  add(
      times,
      [group = backend_, whole] {
        at::Tensor out = whole;
        group->reduce(out, comm::ReduceOp::kSum, kRoot);
      },
      of_root(whole), [this, of_root, count] { return of_root(sum_from(0, count)); }, fill);
  times.wire_bytes = 2 * (n - 1) * shard;
  for (const bool in_place : {false, true}) {
    times.in_place = in_place;
    times.operation = "gather";
    const at::Tensor given = in_place ? slot : buffers.part;
    add(
        times,
        [group = backend_, whole, given] {
          at::Tensor out = whole;
          group->gather(out, given, kRoot);
        },
        of_root(whole), [this, of_root, shard] { return of_root(gathered(0, shard)); },
        [this, given, shard] { given.copy_(mine(shard)); });
  }
  for (const bool in_place : {false, true}) {
    times.in_place = in_place;
    times.operation = "scatter";
    const at::Tensor taken = in_place ? slot : buffers.low_sum;
    add(
        times,
        [group = backend_, input = in_place ? whole : buffers.values, taken] {
          at::Tensor out = taken;
          group->scatter(out, input, kRoot);
        },
        taken,
        [this, shard] { return pattern(kRoot, world_->rank() * shard, shard, modulus_, world_->device()); },
        fill);
  }
}

/// ms a call on the rank that is done last, all ranks in step at the start.
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
  double slowest = 0.0;
  for (const auto& of_rank : comm::gather_scalars(*backend_, {1e3 * timed(count) / count}))
    slowest = std::max(slowest, of_rank[0]);
  return slowest;
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
