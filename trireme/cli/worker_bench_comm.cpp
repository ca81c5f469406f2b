#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/clock.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using comm::GatherBy;

constexpr int64_t kMiB = 1 << 20;
constexpr int kProducts = 6;  ///< matrix products that a collective runs beside
constexpr double kEnough_s = 0.02;
constexpr int kMostCalls = 20;

struct Case {
  std::string operation, by;
  int64_t mib = 0;
  int64_t wire_bytes = 0;  ///< what a rank receives
  std::function<void()> call;
  std::vector<double> alone_ms = {};
  std::vector<double> extra_ms = {};  ///< that matrix products take longer beside it
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The groups and buffers of one size.
class Bench {
 public:
  Bench(std::shared_ptr<comm::World> world, int64_t rounds);
  void add_size(int64_t mib);
  void run();
  Json to_json() const;
  std::string to_text() const;

 private:
  bool on_gpu() const { return world_->device().is_cuda(); }
  void add(const std::string& operation, const std::string& by, int64_t mib, int64_t wire_bytes,
           std::function<void()> call);
  double time(const std::function<void()>& call);
  void products();
  void beside(const std::function<void()>& call);

  std::shared_ptr<comm::World> world_;
  int64_t rounds_;
  std::shared_ptr<comm::Group> kernels_, copies_, backend_;
  at::Tensor left_, right_, product_;
  std::optional<c10::Stream> side_;
  std::vector<Case> cases_;
};

Bench::Bench(std::shared_ptr<comm::World> world, int64_t rounds) : world_(std::move(world)), rounds_(rounds) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < world_->size(); ++r) ranks.push_back(r);
  kernels_ = world_->make_group("ours", ranks, {.share = true, .gather = GatherBy::kKernels});
  copies_ = world_->make_group("copies", ranks, {.share = true, .gather = GatherBy::kCopies});
  backend_ = world_->make_group("backend", ranks, {.share = false});
  if (!on_gpu()) return;
  const auto options = at::TensorOptions(world_->device()).dtype(at::kBFloat16);
  left_ = at::randn({8192, 4096}, options);
  right_ = at::randn({4096, 14336}, options);
  product_ = at::empty({8192, 14336}, options);
  side_ =
      c10::impl::VirtualGuardImpl(world_->device().type()).getStreamFromGlobalPool(world_->device(), true);
}

void Bench::add(const std::string& operation, const std::string& by, int64_t mib, int64_t wire_bytes,
                std::function<void()> call) {
  cases_.push_back(
      {.operation = operation, .by = by, .mib = mib, .wire_bytes = wire_bytes, .call = std::move(call)});
}

void Bench::add_size(int64_t mib) {
  const int64_t n = world_->size(), count = mib * kMiB / 2 / n * n, shard = count / n;
  const int64_t wire = shard * 2 * (n - 1);
  const auto options = at::TensorOptions(world_->device());
  const at::Tensor values = at::randn({count}, options).to(at::kBFloat16);
  const at::Tensor shared = kernels_->symmetric_empty(count, at::kBFloat16).copy_(values);
  const at::Tensor part = kernels_->symmetric_empty(shard, at::kBFloat16).copy_(values.narrow(0, 0, shard));
  const at::Tensor copied = copies_->symmetric_empty(shard, at::kBFloat16).copy_(part);
  const at::Tensor sum = at::empty({shard}, options), low_sum = at::empty({shard}, values.options());
  const at::Tensor whole = at::empty_like(values);
  const auto reduce = [&](const std::string& by, int64_t bytes, std::function<void()> call) {
    add("reduce_scatter", by, mib, bytes, std::move(call));
  };
  const auto gather = [&](const std::string& by, std::function<void()> call) {
    add("all_gather", by, mib, wire, std::move(call));
  };
  // Where GPUs cannot reach each other's memory there is nothing of ours to measure.
  const bool shares = !on_gpu() || (kernels_->symmetric_bytes() > 0 && copies_->symmetric_bytes() > 0);
  if (shares)
    reduce("ordered, peer memory", wire, [=, group = kernels_] {
      at::Tensor out = sum;
      group->reduce_scatter_ordered(out, shared);
    });
  reduce("ordered, messages", wire, [=, group = backend_] {
    at::Tensor out = sum;
    group->reduce_scatter_ordered(out, values);
  });
  if (on_gpu()) {
    reduce("backend bf16", wire, [=, group = backend_] {
      at::Tensor out = low_sum;
      group->reduce_scatter(out, values);
    });
    reduce("cast, backend fp32", 2 * wire, [=, group = backend_] {
      at::Tensor out = sum;
      group->reduce_scatter(out, values.to(at::kFloat));
    });
  }
  if (shares)
    gather("peer memory", [=, group = kernels_] {
      at::Tensor out = whole;
      group->all_gather(out, part);
    });
  if (on_gpu() && shares) {
    gather("copy engines", [=, group = copies_] {
      at::Tensor out = whole;
      group->all_gather(out, copied);
    });
  }
  gather("backend", [=, group = backend_] {
    at::Tensor out = whole;
    group->all_gather(out, part);
  });
}

/// ms a call, all ranks in step at the start.
double Bench::time(const std::function<void()>& call) {
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

void Bench::products() {
  for (int i = 0; i < kProducts; ++i) at::mm_out(product_, left_, right_);
}

void Bench::beside(const std::function<void()>& call) {
  const c10::impl::VirtualGuardImpl guard(world_->device().type());
  c10::Event ready(world_->device().type()), done(world_->device().type());
  ready.record(guard.getStream(world_->device()));
  ready.block(*side_);
  {
    const c10::StreamGuard on_side(*side_);
    call();
    done.record(*side_);
  }
  products();
  done.block(guard.getStream(world_->device()));
}

void Bench::run() {
  for (int64_t round = 0; round < rounds_; ++round) {
    for (Case& one : cases_) {
      one.alone_ms.push_back(time(one.call));
      if (!on_gpu()) continue;
      const double both = time([&] { beside(one.call); });
      one.extra_ms.push_back(both - time([this] { products(); }));
    }
  }
}

Json Bench::to_json() const {
  Json rows = Json::array();
  for (const Case& one : cases_) {
    Json row = {{"operation", one.operation},
                {"by", one.by},
                {"mib", one.mib},
                {"wire_bytes", one.wire_bytes},
                {"ms", median(one.alone_ms)},
                {"gb_per_s", static_cast<double>(one.wire_bytes) / median(one.alone_ms) / 1e6},
                {"samples_ms", one.alone_ms}};
    if (!one.extra_ms.empty()) {
      row["extra_ms_under_products"] = median(one.extra_ms);
      row["samples_extra_ms"] = one.extra_ms;
    }
    rows.push_back(row);
  }
  return rows;
}

std::string Bench::to_text() const {
  using report::Align;
  report::Table table({{"MiB", Align::kRight},
                       {"collective"},
                       {"by"},
                       {"ms", Align::kRight},
                       {"GB/s", Align::kRight},
                       {"products +ms", Align::kRight}});
  for (const Case& one : cases_) {
    const double ms = median(one.alone_ms);
    table.add_row({std::to_string(one.mib), one.operation, one.by, fmt::format("{:.3f}", ms),
                   fmt::format("{:.1f}", static_cast<double>(one.wire_bytes) / ms / 1e6),
                   one.extra_ms.empty() ? "-" : fmt::format("{:.3f}", median(one.extra_ms))});
  }
  return table.to_string();
}

}  // namespace

int worker_bench_comm(const Request& request, const Environment& environment) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  const auto world = comm::World::join(spec, comm::take_device(request.bench_comm.device, spec), 300.0);
  Bench bench(world, request.bench_comm.rounds);
  for (const int64_t mib : request.bench_comm.mib) bench.add_size(mib);
  bench.run();
  if (world->rank() != 0) return 0;
  if (!request.json) {
    fmt::print("{}", bench.to_text());
    return 0;
  }
  const Json document = {{"schema", "trireme.bench_comm/1"},
                         {"command", request.command},
                         {"device", world->device().is_cuda() ? kernels::gpus().front().name : "cpu"},
                         {"ranks", world->size()},
                         {"rounds", request.bench_comm.rounds},
                         {"rows", bench.to_json()}};
  fmt::print("{}\n", document.dump(2));
  return 0;
}

}  // namespace trireme::cli
