#include "trireme/parallel/compression.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/plan/power_sgd.h"

namespace trireme::parallel {
namespace {

/// The sum of rows (n, m) fp32 in the order of kernels/tree_sum.h.
at::Tensor tree_of_rows(const at::Tensor& rows) {
  const int64_t count = rows.size(0);
  if (count == 1) return rows[0];
  const auto left = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(count - 1)));
  return tree_of_rows(rows.narrow(0, 0, left)) + tree_of_rows(rows.narrow(0, left, count - left));
}

class Fp16 : public Compressor {
 public:
  void reduce(comm::Group& group, at::Tensor& shard, const at::Tensor& grad) override {
    const at::Tensor wire = grad.to(at::kHalf);
    at::Tensor rows = at::empty_like(wire);
    group.all_to_all(rows, wire);
    shard.copy_(tree_of_rows(rows.view({group.size(), -1}).to(at::kFloat)));
  }
};

/// The part that is common to hooks with error feedback.
class WithError : public Compressor {
 public:
  explicit WithError(const plan::FlatLayout& layout) : layout_(layout) {}
  at::Tensor error() const override { return error_; }
  HookState state(const plan::FlatEntry& entry) const override {
    if (!error_.defined()) return {};
    return {.owed = error_.narrow(0, entry.offset, entry.numel), .factor = {}};
  }
  void set_state(const std::vector<HookState>& params) override {
    error_.reset();
    left_out_.reset();
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& owed = params[i].owed;
      if (!owed.defined()) continue;
      if (!error_.defined()) error_ = at::zeros({layout_.numel()}, owed.options());
      const plan::FlatEntry& entry = layout_.entries()[i];
      error_.narrow(0, entry.offset, entry.numel).copy_(owed);
    }
  }

  void commit() override {
    if (left_out_.defined()) error_ = std::exchange(left_out_, {});
  }
  void discard() override { left_out_.reset(); }

 protected:
  /// grad and what is owed, (n m) fp32; the caller sets left_out_ to what it leaves out.
  at::Tensor wanted(const at::Tensor& grad) const {
    const at::Tensor& owed = left_out_.defined() ? left_out_ : error_;
    return owed.defined() ? grad.to(at::kFloat) + owed
                          : grad.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }
  const plan::FlatLayout& layout_;
  at::Tensor left_out_;  ///< so far by the gradient that waits for its update; undefined: none waits

 private:
  at::Tensor error_;
};

class Int8 : public WithError {
 public:
  using WithError::WithError;
  void reduce(comm::Group& group, at::Tensor& shard, const at::Tensor& grad) override {
    const int64_t ranks = group.size(), count = shard.numel();
    const int64_t blocks = (count + plan::kInt8ScaleBlock - 1) / plan::kInt8ScaleBlock;
    const at::Tensor all = wanted(grad);
    const at::Tensor padded =
        at::constant_pad_nd(all.view({ranks, count}), {0, blocks * plan::kInt8ScaleBlock - count})
            .view({ranks, blocks, -1});
    at::Tensor scales = padded.abs().amax(2, /*keepdim=*/true).div_(127.0);  // (n, blocks, 1)
    at::Tensor codes = (padded / scales.clamp_min(1e-38)).round_().clamp_(-127, 127).to(at::kChar);
    const at::Tensor sent = (codes.to(at::kFloat) * scales).view({ranks, -1}).narrow(1, 0, count);
    left_out_ = all - sent.reshape({-1});
    at::Tensor codes_in = at::empty_like(codes), scales_in = at::empty_like(scales);
    group.all_to_all(codes_in, codes);
    group.all_to_all(scales_in, scales);
    const at::Tensor rows = (codes_in.to(at::kFloat) * scales_in).view({ranks, -1}).narrow(1, 0, count);
    shard.copy_(tree_of_rows(rows));
  }
};

/// Hooks that reduce plainly at first, while gradients change fast.
class LateStart : public WithError {
 public:
  LateStart(const plan::FlatLayout& layout, int64_t start_step)
      : WithError(layout), start_step_(start_step) {}
  HookState state(const plan::FlatEntry& entry) const override {
    HookState state = WithError::state(entry);
    state.steps = step_;
    return state;
  }
  void set_state(const std::vector<HookState>& params) override {
    WithError::set_state(params);
    step_ = 0;
    reduced_ = false;
    for (const HookState& param : params) step_ = std::max(step_, param.steps);
  }
  void commit() override {
    WithError::commit();
    if (std::exchange(reduced_, false)) ++step_;
  }
  void discard() override {
    WithError::discard();
    reduced_ = false;
  }
  void reduce(comm::Group& group, at::Tensor& shard, const at::Tensor& grad) final {
    reduced_ = true;
    if (step_ < start_step_) return group.reduce_scatter_ordered(shard, grad);
    compress(group, shard, grad);
  }

 protected:
  virtual void compress(comm::Group& group, at::Tensor& shard, const at::Tensor& grad) = 0;

 private:
  int64_t start_step_, step_ = 0;
  bool reduced_ = false;  ///< a gradient that waits for its update
};

class TopK : public LateStart {
 public:
  TopK(const HookOptions& options, const plan::FlatLayout& layout)
      : LateStart(layout, options.start_step), density_(options.density) {}

 protected:
  void compress(comm::Group& group, at::Tensor& shard, const at::Tensor& grad) override {
    left_out_ = wanted(grad);
    const int64_t numel = left_out_.numel();
    const auto kept =
        std::clamp<int64_t>(static_cast<int64_t>(std::ceil(density_ * static_cast<double>(numel))), 1, numel);
    const at::Tensor places = std::get<1>(left_out_.abs().topk(kept, 0, true, /*sorted=*/false));  // (k)
    const at::Tensor values = left_out_.index_select(0, places);
    left_out_.index_fill_(0, places, 0.0);
    at::Tensor all_places = at::empty({group.size(), kept}, places.options().dtype(at::kInt));
    at::Tensor all_values = at::empty({group.size(), kept}, values.options());
    group.all_gather(all_places, places.to(at::kInt));
    group.all_gather(all_values, values);
    at::Tensor sum = at::zeros_like(left_out_);
    // Rank by rank: the places of one rank differ, so every addition has its fixed turn.
    for (int64_t rank = 0; rank < group.size(); ++rank) sum.index_add_(0, all_places[rank], all_values[rank]);
    shard.copy_(sum.narrow(0, group.rank() * shard.numel(), shard.numel()));
  }

 private:
  double density_;
};

class PowerSgd : public LateStart {
 public:
  PowerSgd(const HookOptions& options, const plan::FlatLayout& layout)
      : LateStart(layout, options.start_step), rank_(options.rank) {}
  HookState state(const plan::FlatEntry& entry) const override {
    HookState state = LateStart::state(entry);
    for (const Factor& factor : factors_)
      if (factor.offset == entry.offset) state.factor = factor.right;
    return state;
  }
  void set_state(const std::vector<HookState>& params) override {
    LateStart::set_state(params);
    chosen_ = false;
    factors_.clear();
    rest_.clear();
    rights_.clear();
    seconds_.clear();
    for (size_t i = 0; i < params.size(); ++i)
      if (params[i].factor.defined()) rights_[layout_.entries()[i].offset] = params[i].factor.clone();
  }

  void commit() override {
    LateStart::commit();
    for (size_t i = 0; i < seconds_.size(); ++i) factors_[i].right = seconds_[i];
    seconds_.clear();
  }
  void discard() override {
    LateStart::discard();
    seconds_.clear();
  }

 protected:
  void compress(comm::Group& group, at::Tensor& shard, const at::Tensor& grad) override {
    if (!chosen_) choose_matrices(grad);
    if (factors_.empty()) return group.reduce_scatter_ordered(shard, grad);
    const at::Tensor all = wanted(grad);
    std::vector<at::Tensor> lefts, seconds;
    for (size_t i = 0; i < factors_.size(); ++i)
      lefts.push_back(
          at::matmul(matrix(all, factors_[i]), seconds_.empty() ? factors_[i].right : seconds_[i]));
    add_up(group, lefts);
    for (size_t i = 0; i < factors_.size(); ++i) {
      lefts[i] = std::get<0>(at::linalg_qr(lefts[i]));
      seconds.push_back(at::matmul(matrix(all, factors_[i]).t(), lefts[i]));
    }
    for (const plan::Range& range : rest_) seconds.push_back(all.narrow(0, range.begin, range.size()));
    add_up(group, seconds);
    const double share = 1.0 / static_cast<double>(group.size());
    at::Tensor sum = at::empty_like(all);
    left_out_ = at::zeros_like(all);
    for (size_t i = 0; i < factors_.size(); ++i) {
      const at::Tensor approximation = at::matmul(lefts[i], seconds[i].t());
      matrix(left_out_, factors_[i]).copy_(matrix(all, factors_[i]) - approximation * share);
      matrix(sum, factors_[i]).copy_(approximation);
    }
    for (size_t i = 0; i < rest_.size(); ++i) {
      sum.narrow(0, rest_[i].begin, rest_[i].size()).copy_(seconds[factors_.size() + i]);
    }
    seconds.resize(factors_.size());
    seconds_ = std::move(seconds);
    shard.copy_(sum.narrow(0, group.rank() * shard.numel(), shard.numel()));
  }

 private:
  struct Factor {
    int64_t offset, rows, columns;
    at::Tensor right;  ///< (columns, rank), where the next step starts
  };

  static at::Tensor matrix(const at::Tensor& flat, const Factor& factor) {
    return flat.narrow(0, factor.offset, factor.rows * factor.columns).view({factor.rows, factor.columns});
  }

  static at::Tensor first_right(const plan::FactoredMatrix& matrix) {
    at::Tensor right = at::empty({matrix.columns, matrix.rank}, at::kFloat);
    auto* const out = right.mutable_data_ptr<float>();
    for (int64_t i = 0; i < right.numel(); ++i) {
      const uint64_t bits = mix64(static_cast<uint64_t>(matrix.offset) + 1, static_cast<uint64_t>(i));
      out[i] = static_cast<float>(bits >> 40) / 16777216.0f - 0.5f;
    }
    return right;
  }

  /// Chooses the matrices that have factors; elements between these travel whole. The first right factors are
  /// the same on every rank.
  void choose_matrices(const at::Tensor& grad) {
    chosen_ = true;
    int64_t covered = 0;
    const auto take_rest_until = [&](int64_t end) {
      if (end > covered) rest_.push_back({covered, end});
    };
    for (const plan::FactoredMatrix& chosen :
         plan::factored_matrices(layout_, rank_, static_cast<int64_t>(grad.element_size()))) {
      const auto& [offset, rows, columns, rank] = chosen;
      take_rest_until(offset);
      covered = offset + rows * columns;
      const auto given = rights_.find(offset);
      const bool fits = given != rights_.end() && given->second.sizes() == at::IntArrayRef{columns, rank};
      const at::Tensor right = fits ? given->second : first_right(chosen);
      factors_.push_back({offset, rows, columns, right.to(grad.device())});
    }
    rights_.clear();
    take_rest_until(layout_.numel());
  }

  /// Sums over the ranks, all in one message.
  static void add_up(comm::Group& group, std::vector<at::Tensor>& parts) {
    if (parts.empty()) return;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& part : parts) flat.push_back(part.reshape({-1}));
    at::Tensor whole = at::cat(flat);
    group.all_reduce(whole, comm::ReduceOp::kSum);
    int64_t offset = 0;
    for (at::Tensor& part : parts) {
      part = whole.narrow(0, offset, part.numel()).view(part.sizes());
      offset += part.numel();
    }
  }

  int64_t rank_;
  bool chosen_ = false;
  std::vector<Factor> factors_;
  std::vector<at::Tensor> seconds_;       ///< the factors' next `right`, of a gradient that waits
  std::map<int64_t, at::Tensor> rights_;  ///< of a state that was set, by offset, until matrices are chosen
  std::vector<plan::Range> rest_;         ///< of the flat gradient, outside of the factors' matrices
};

}  // namespace

std::unique_ptr<Compressor> make_compressor(const HookOptions& options, const plan::FlatLayout& layout) {
  switch (options.hook) {
    case Hook::kNone:
    case Hook::kLocalSgd:
      return nullptr;
    case Hook::kFp16:
      return std::make_unique<Fp16>();
    case Hook::kInt8:
      return std::make_unique<Int8>(layout);
    case Hook::kTopK:
      return std::make_unique<TopK>(options, layout);
    case Hook::kPowerSgd:
      return std::make_unique<PowerSgd>(options, layout);
  }
  throw LogicError("[parallel.compression] unknown hook {}", static_cast<int>(options.hook));
}

}  // namespace trireme::parallel
