#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trireme/data/document_table.h"

namespace trireme::data {

/// One micro-batch on the CPU, pinned when asked for.
struct Batch {
  at::Tensor inputs;  ///< of text (B, T) int64; of images (B, C, H, W) fp32, channels last in memory
  /// For text (B, T) int64, inputs shifted by one. For images (B) int64, or (B, classes) fp32 that sum to 1
  /// where labels are smoothed or pictures mixed.
  at::Tensor targets;
  /// How many rows count. 0: none does; a batch of text then has B = 1, and its row is only a placeholder.
  int64_t rows = 0;
  int64_t step_rows = 0;    ///< rows of the step on all ranks together, broken pictures included
  int64_t step_passes = 0;  ///< micro-batches of each rank in the step; 0: as many as in any other
  /// Of text where some targets do not count (kIgnoredTarget): those that do, here and in the step on all
  /// ranks together. 0 and 0: all do.
  int64_t kept = 0, step_kept = 0;
  DocumentTable documents = {};       ///< of text that is kept apart by documents: of whole sequences
  std::vector<int64_t> samples = {};  ///< of images: index in the ImageSet of each row that counts

  /// The weight of this batch's mean in the mean over the step.
  double share() const { return weight() / step_weight(); }
  /// The weight of the batch's mean loss, and that of the whole step.
  double weight() const { return static_cast<double>(step_kept > 0 ? kept : rows); }
  double step_weight() const { return static_cast<double>(step_kept > 0 ? step_kept : step_rows); }
};

}  // namespace trireme::data
