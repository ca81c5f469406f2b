#pragma once
// What an adapter (plan/adapter.h) makes of a weight, as plain numbers.
#include <span>
#include <vector>

#include "trireme/plan/region.h"

namespace trireme::checkpoint {

/// A matrix of fp32 as its family keeps it: (out, in), or (in, out) where `in_out`.
struct LayerWeight {
  std::span<float> values;
  int64_t out = 0, in = 0;
  bool in_out = false;
};
/// `shape`: that of the parameter.
LayerWeight layer_weight(std::span<float> values, const plan::Shape& shape, bool in_out);

/// The adapter of one layer.
struct LowRank {
  std::span<const float> first;         ///< A, (rank, in)
  std::span<const float> second;        ///< B, (out, rank)
  double scale = 1.0;                   ///< of B A
  std::span<const float> lengths = {};  ///< (out), of the rows of the sum, of DoRA; empty: as they come out
};

/// (out): the lengths of rows, each the norm of what makes one output.
std::vector<float> lengths_of_rows(const LayerWeight& weight);

/// Adds scale B A to the weight, and then gives its rows their lengths. A row of zeros stays one.
void add_low_rank(const LayerWeight& weight, const LowRank& adapter);

}  // namespace trireme::checkpoint
