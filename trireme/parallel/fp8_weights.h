#pragma once
// The parameters of a unit whose matrices are multiplied in FP8 alone, under policies that shard parameters.
// Matrices are kept and gathered as the bytes that are multiplied, with one scale each; the rest, norms and
// biases, stays whole in bf16 on every rank. Bytes and scales are those that a rank with all of a matrix
// would have cast itself.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/parallel/options.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/model_facts.h"

namespace trireme::parallel {

class Fp8Weights {
 public:
  /// The parameters of `spec`, laid out as `layout` over the ranks of `group`; this rank has `range`.
  /// Collective.
  Fp8Weights(const plan::UnitSpec& spec, const plan::FlatLayout& layout, const plan::Range& range,
             comm::Group& group, const Options& options);

  /// The unit's matrices as FP8 bytes, (numel) uint8; elements of the rest have no meaning. Its storage comes
  /// and goes.
  const at::Tensor& whole() const { return whole_; }
  /// This rank's part of whole(), which the ranks gather.
  const at::Tensor& shard() const { return shard_; }
  /// Bytes that are kept from step to step.
  int64_t bytes() const { return static_cast<int64_t>(shard_.nbytes() + rest_.nbytes()); }

  /// Whether parameter `index` is one of the rest.
  bool is_whole(size_t index) const { return places_[index].has_value(); }
  /// A parameter of the rest, of its shape: a view of the memory that stays.
  at::Tensor whole_parameter(size_t index) const;
  /// Lends each matrix to the linear layer that multiplies with it, for as long as this lives.
  void lend(const std::vector<std::pair<std::string, at::Tensor>>& params) const;

  /// Masters have changed: shard, scales and the rest are out of date.
  void expire() { current_ = false; }
  /// Makes them anew from `master`, the fp32 values of `range`, when they are out of date; on the current
  /// stream. Collective in that case.
  void refresh(comm::Group& group, const at::Tensor& master);

 private:
  /// A weight, or neighbours that are multiplied as one matrix.
  struct Matrix {
    plan::BlockLayer layer;
    size_t first;       ///< of its parameters
    plan::Range range;  ///< in the unit
    int64_t rows, columns;
  };

  int64_t slot_of(const Matrix& matrix) const { return static_cast<int64_t>(matrix.layer); }
  at::Tensor part(const at::Tensor& local, const plan::Range& of) const;
  at::Tensor own_contribution(const at::Tensor& master) const;

  plan::Range range_;
  int64_t block_;
  Fp8Scales scales_of_;
  std::vector<plan::FlatEntry> entries_;
  std::vector<Matrix> matrices_;
  std::vector<std::optional<int64_t>> places_;  ///< of parameters in rest_; none: of a matrix
  at::Tensor whole_, shard_;
  at::Tensor rest_;    ///< (elements of the rest) bf16
  at::Tensor scales_;  ///< (kBlockLayers, 4) fp32, the same in a row
  bool current_ = false;
};

}  // namespace trireme::parallel
