#include "trireme/nn/deferred_gradients.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/kernels/range.h"
#include "trireme/nn/linear_parts.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {
namespace {

using torch::autograd::variable_list;

/// torch hands what a thread keeps in such a slot to the threads of its backward passes. This kind is used by
/// nobody else: torch keeps it for tests of its own.
constexpr auto kSlot = c10::DebugInfoKind::TEST_INFO_2;

/// A tensor, and whether it was written to since.
class Kept {
 public:
  explicit Kept(const at::Tensor& tensor) : tensor_(tensor), version_(version()) {}
  const at::Tensor& tensor() const { return tensor_; }
  bool is_unchanged() const { return version() == version_; }

 private:
  int64_t version() const { return tensor_.is_inference() ? 0 : tensor_._version(); }

  at::Tensor tensor_;
  int64_t version_;
};

/// One factor of a gradient, of which some tensors may be undefined.
class KeptFactor {
 public:
  explicit KeptFactor(const Factor& factor) : factor_(factor) {
    for (const at::Tensor& tensor : {factor.rows, factor.columns.values, factor.columns.scale, factor.sums}) {
      if (tensor.defined()) kept_.emplace_back(tensor);
    }
  }
  const Factor& factor() const { return factor_; }
  const std::vector<Kept>& tensors() const { return kept_; }
  bool is_unchanged() const { return std::ranges::all_of(kept_, &Kept::is_unchanged); }

 private:
  Factor factor_;
  std::vector<Kept> kept_;
};

/// One linear operation.
struct Entry {
  variable_list weights;
  at::Tensor bias;
  bool in_out;
  std::optional<Fp8Recipe> fp8;
  KeptFactor input, dy;
};

/// Adds the gradient that a function reports to the parameter, as autograd does.
void add_gradient(const at::Tensor& param, const at::Tensor& reported) {
  if (!reported.defined()) return;
  if (at::Tensor grad = gradient_to_add_to(param); grad.defined()) {
    grad.add_(reported);
  } else {
    param.mutable_grad() = reported.detach();
  }
}

void compute(const Entry& entry) {
  TRIREME_CHECK(entry.input.is_unchanged() && entry.dy.is_unchanged(),
                "[nn.deferred_gradients] {} needed for the gradient of a {} weight was modified between "
                "backward and run(); call run() first, or write to other memory",
                entry.input.is_unchanged() ? "an output's gradient" : "the input",
                fmt::join(entry.weights.front().sizes(), "x"));
  const variable_list reported = add_parameter_gradients({entry.weights, entry.bias, entry.in_out, entry.fp8},
                                                         entry.input.factor(), entry.dy.factor());
  for (size_t i = 0; i < entry.weights.size(); ++i) add_gradient(entry.weights[i], reported[i]);
  add_gradient(entry.bias, reported.back());
}

}  // namespace

class DeferredGradients::Parked : public c10::DebugInfoBase {
 public:
  void push(Entry entry) {
    const std::lock_guard lock(mutex_);
    entries_.push_back(std::move(entry));
  }
  /// Takes the first one out; none: there is none.
  std::optional<Entry> pop() {
    const std::lock_guard lock(mutex_);
    if (entries_.empty()) return {};
    std::optional<Entry> first(std::move(entries_.front()));
    entries_.pop_front();
    return first;
  }
  int64_t count() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(entries_.size());
  }
  int64_t bytes(const at::Tensor& but_for) const {
    const std::lock_guard lock(mutex_);
    std::unordered_set<const void*> seen;
    if (but_for.defined()) seen.insert(but_for.storage().unsafeGetStorageImpl());
    int64_t bytes = 0;
    for (const Entry& entry : entries_) {
      for (const KeptFactor* factor : {&entry.input, &entry.dy}) {
        for (const Kept& kept : factor->tensors()) {
          const c10::Storage& storage = kept.tensor().storage();
          if (seen.insert(storage.unsafeGetStorageImpl()).second)
            bytes += static_cast<int64_t>(storage.nbytes());
        }
      }
    }
    return bytes;
  }

 private:
  mutable std::mutex mutex_;  // a backward pass may use several threads
  std::deque<Entry> entries_;
};

/// The store that the backward pass under way on this thread defers to.
struct Deferral {
  static DeferredGradients::Parked* store() {
    return dynamic_cast<DeferredGradients::Parked*>(c10::ThreadLocalDebugInfo::get(kSlot));
  }
};

variable_list deferrable_parameter_gradients(const LinearParams& params, const Factor& input,
                                             const Factor& dy) {
  auto* const store = Deferral::store();
  const auto waits = [](const at::Tensor& param) {
    return !param.defined() || !param.requires_grad() || may_write_gradient(param);
  };
  const bool deferred = store != nullptr && std::ranges::all_of(params.weights, waits) && waits(params.bias);
  if (!deferred) return add_parameter_gradients(params, input, dy);
  if (input.defined() && (std::ranges::any_of(params.weights, is_reached) || is_reached(params.bias))) {
    store->push(
        {params.weights.vec(), params.bias, params.in_out, params.fp8, KeptFactor(input), KeptFactor(dy)});
  }
  return variable_list(params.weights.size() + 1);
}

DeferredGradients::DeferredGradients() : parked_(std::make_shared<Parked>()) {}

DeferredGradients::~DeferredGradients() = default;

DeferredGradients::Scope::Scope(DeferredGradients& store) : guard_(kSlot, store.parked_) {}

void DeferredGradients::run() {
  const at::NoGradGuard no_grad;
  const kernels::TraceRange range("deferred gradients");
  c10::OptionalDeviceGuard on_device;  // a thread of the caller's may have another current one
  while (const std::optional<Entry> entry = parked_->pop()) {
    on_device.reset_device(entry->weights.front().device());
    compute(*entry);
  }
}

int64_t DeferredGradients::count() const {
  return parked_->count();
}

int64_t DeferredGradients::bytes(const at::Tensor& but_for) const {
  return parked_->bytes(but_for);
}

}  // namespace trireme::nn
