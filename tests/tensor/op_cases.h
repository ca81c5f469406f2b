#pragma once
// Cases of every operation, for tests of what ranks make of them.
#include <algorithm>
#include <vector>

#include "tests/tensor/dense_torch.h"
#include "trireme/plan/op_rules.h"

namespace trireme::test {

using plan::Op;
using plan::OpAttributes;
using plan::TensorType;

inline constexpr auto kInt = plan::TensorDtype::kInt64, kFlag = plan::TensorDtype::kBool,
                      kHalfWidth = plan::TensorDtype::kBf16;

/// Sizes that ranks can share equally, some that they cannot, and none.
inline std::vector<OpCase> moving_cases() {
  const TensorType a{{5, 4}}, column{{5, 1}}, cube{{2, 4, 8}}, none{{0, 4}};
  return {
      {Op::kFull, {}, OpAttributes::of({0}, {2.5}, {5, 4})},
      {Op::kRandn, {}, OpAttributes::of({0, 7}, {}, {5, 4})},
      {Op::kRandn, {}, OpAttributes::of({0, 7}, {}, {3, 2, 5})},
      {Op::kArange, {}, OpAttributes::of({5})},
      {Op::kCast, {a}, OpAttributes::of({1})},
      {Op::kCast, {a}, OpAttributes::of({0})},
      {Op::kCast, {{{5, 4}, kInt}}, OpAttributes::of({0})},
      {Op::kDropout, {a}, OpAttributes::of({3}, {0.4})},
      {Op::kDropout, {cube}, OpAttributes::of({3}, {0.4})},
      {Op::kTranspose, {cube}, OpAttributes::of({0, -1})},
      {Op::kReshape, {cube}, OpAttributes::of({}, {}, {8, 8})},
      {Op::kReshape, {cube}, OpAttributes::of({}, {}, {2, 4, 4, 2})},
      {Op::kReshape, {cube}, OpAttributes::of({}, {}, {-1})},
      {Op::kReshape, {a}, OpAttributes::of({}, {}, {1, 5, 2, 2})},
      {Op::kReshape, {{{4, 6}}}, OpAttributes::of({}, {}, {8, 3})},
      {Op::kReshape, {none}, OpAttributes::of({}, {}, {4, 0})},
      {Op::kUnsqueeze, {a}, OpAttributes::of({-1})},
      {Op::kSqueeze, {column}, OpAttributes::of({1})},
      {Op::kSlice, {a}, OpAttributes::of({1, 1, 3})},
      {Op::kSlice, {a}, OpAttributes::of({-2, 0, 5})},
      {Op::kSplit, {{{3, 8}}}, OpAttributes::of({1}, {}, {2, 2, 4})},
      {Op::kCat, {a, {{5, 3}}, a}, OpAttributes::of({1})},
  };
}

inline std::vector<OpCase> layer_cases() {
  const TensorType a{{5, 4}}, row{{4}}, cube{{2, 4, 8}}, none{{0, 4}};
  const TensorType half{{5, 4}, kHalfWidth}, heads{{2, 4, 3, 2}}, shared_heads{{2, 2, 3, 2}};
  return {
      {Op::kMatmul, {a, {{4, 3}}}},
      {Op::kMatmul, {{{2, 3, 4}}, {{4, 5}}}},
      {Op::kMatmul, {{{2, 1, 3, 4}}, {{5, 4, 2}}}},
      {Op::kMatmul, {none, {{4, 3}}}},
      {Op::kMatmul, {{{3, 0}}, {{0, 4}}}},
      {Op::kLinear, {{{2, 3, 4}}, {{5, 4}}}},
      {Op::kLinear, {a, {{3, 4}}, {{3}}}},
      {Op::kLinear, {half, {{3, 4}, kHalfWidth}, {{3}, kHalfWidth}}},
      {Op::kEmbedding, {{{2, 3}, kInt}, {{5, 4}}}},
      {Op::kAttention, {heads, heads, heads}, OpAttributes::of({1}, {0.7})},
      {Op::kAttention, {heads, {{2, 4, 5, 2}}, {{2, 4, 5, 3}}}, OpAttributes::of({0}, {0.7})},
      {Op::kAttention, {heads, shared_heads, shared_heads}, OpAttributes::of({1}, {0.7})},
      {Op::kSoftmax, {cube}, OpAttributes::of({1})},
      {Op::kLogSoftmax, {a}, OpAttributes::of({-1})},
      {Op::kLayerNorm, {a, row, row}, OpAttributes::of({}, {1e-3})},
      {Op::kLayerNorm, {a, row}, OpAttributes::of({}, {1e-3})},
      {Op::kLayerNorm, {a}, OpAttributes::of({}, {1e-3})},
      {Op::kRmsNorm, {a, row}, OpAttributes::of({}, {1e-3})},
      {Op::kRmsNorm, {cube}, OpAttributes::of({}, {1e-3})},
      {Op::kCrossEntropy, {a, {{5}, kInt}}},
      {Op::kCrossEntropy, {half, {{5}, kInt}}},
      {Op::kMseLoss, {a, a}},
  };
}

inline std::vector<OpCase> update_cases() {
  const TensorType a{{5, 4}}, cube{{2, 4, 8}}, half{{5, 4}, kHalfWidth};
  return {
      {Op::kAddInto, {a, a}},
      {Op::kCopyInto, {a, a}},
      {Op::kSgd, {a, a}, OpAttributes::of({}, {0.1, 0.9, 0.01})},
      {Op::kSgd, {a, a, a}, OpAttributes::of({}, {0.1, 0.9, 0.01})},
      {Op::kSgd, {half, a, a}, OpAttributes::of({}, {0.1, 0.9, 0.01})},
      {Op::kAdamw, {a, a, a, a}, OpAttributes::of({3}, {0.1, 0.9, 0.95, 1e-8, 0.01})},
      {Op::kAdamw, {cube, cube, cube, cube}, OpAttributes::of({1}, {0.1, 0.9, 0.95, 1e-8, 0.01})},
  };
}

inline std::vector<OpCase> element_cases() {
  const TensorType a{{5, 4}}, row{{4}}, column{{5, 1}}, whole{{5, 4}, kInt}, cube{{2, 4, 8}};
  std::vector<OpCase> all = {{Op::kWhere, {{{5, 4}, kFlag}, a, row}},
                             {Op::kNeg, {whole}},
                             {Op::kAdd, {whole, whole}},
                             {Op::kAdd, {{{0, 4}}, row}},
                             {Op::kSum, {whole}, OpAttributes::of({0}, {}, {0})},
                             {Op::kSum, {{{}}}},
                             {Op::kMean, {{{5, 4}, kHalfWidth}}}};
  for (Op op = Op::kAdd; op <= Op::kGe; op = static_cast<Op>(static_cast<int>(op) + 1)) {
    all.push_back({op, {a, a}});
    all.push_back({op, {row, column}});
  }
  for (Op op = Op::kNeg; op <= Op::kSilu; op = static_cast<Op>(static_cast<int>(op) + 1))
    all.push_back({op, {a}, OpAttributes::of({}, {0.3})});
  for (const Op op : {Op::kSum, Op::kMean, Op::kMax, Op::kMin}) {
    all.push_back({op, {cube}, OpAttributes::of({0}, {}, {1})});
    all.push_back({op, {cube}, OpAttributes::of({1}, {}, {0, -1})});
    all.push_back({op, {cube}});
  }
  return all;
}

}  // namespace trireme::test
