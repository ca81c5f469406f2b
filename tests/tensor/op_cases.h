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

inline OpAttributes numbers(std::vector<int64_t> whole, std::vector<double> real = {},
                            std::vector<int64_t> list = {}) {
  OpAttributes attributes;
  std::ranges::copy(whole, attributes.whole.begin());
  std::ranges::copy(real, attributes.real.begin());
  attributes.set_items(list);
  return attributes;
}

/// Sizes that ranks can share equally, some that they cannot, and none.
inline std::vector<OpCase> moving_cases() {
  const TensorType a{{5, 4}}, column{{5, 1}}, cube{{2, 4, 8}}, none{{0, 4}};
  return {
      {Op::kFull, {}, numbers({0}, {2.5}, {5, 4})},
      {Op::kRandn, {}, numbers({0, 7}, {}, {5, 4})},
      {Op::kRandn, {}, numbers({0, 7}, {}, {3, 2, 5})},
      {Op::kArange, {}, numbers({5})},
      {Op::kCast, {a}, numbers({1})},
      {Op::kCast, {a}, numbers({0})},
      {Op::kCast, {{{5, 4}, kInt}}, numbers({0})},
      {Op::kDropout, {a}, numbers({3}, {0.4})},
      {Op::kDropout, {cube}, numbers({3}, {0.4})},
      {Op::kTranspose, {cube}, numbers({0, -1})},
      {Op::kReshape, {cube}, numbers({}, {}, {8, 8})},
      {Op::kReshape, {cube}, numbers({}, {}, {2, 4, 4, 2})},
      {Op::kReshape, {cube}, numbers({}, {}, {-1})},
      {Op::kReshape, {a}, numbers({}, {}, {1, 5, 2, 2})},
      {Op::kReshape, {{{4, 6}}}, numbers({}, {}, {8, 3})},
      {Op::kReshape, {none}, numbers({}, {}, {4, 0})},
      {Op::kUnsqueeze, {a}, numbers({-1})},
      {Op::kSqueeze, {column}, numbers({1})},
      {Op::kSlice, {a}, numbers({1, 1, 3})},
      {Op::kSlice, {a}, numbers({-2, 0, 5})},
      {Op::kSplit, {{{3, 8}}}, numbers({1}, {}, {2, 2, 4})},
      {Op::kCat, {a, {{5, 3}}, a}, numbers({1})},
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
      {Op::kAttention, {heads, heads, heads}, numbers({1}, {0.7})},
      {Op::kAttention, {heads, {{2, 4, 5, 2}}, {{2, 4, 5, 3}}}, numbers({0}, {0.7})},
      {Op::kAttention, {heads, shared_heads, shared_heads}, numbers({1}, {0.7})},
      {Op::kSoftmax, {cube}, numbers({1})},
      {Op::kLogSoftmax, {a}, numbers({-1})},
      {Op::kLayerNorm, {a, row, row}, numbers({}, {1e-3})},
      {Op::kLayerNorm, {a, row}, numbers({}, {1e-3})},
      {Op::kLayerNorm, {a}, numbers({}, {1e-3})},
      {Op::kRmsNorm, {a, row}, numbers({}, {1e-3})},
      {Op::kRmsNorm, {cube}, numbers({}, {1e-3})},
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
      {Op::kSgd, {a, a}, numbers({}, {0.1, 0.9, 0.01})},
      {Op::kSgd, {a, a, a}, numbers({}, {0.1, 0.9, 0.01})},
      {Op::kSgd, {half, a, a}, numbers({}, {0.1, 0.9, 0.01})},
      {Op::kAdamw, {a, a, a, a}, numbers({3}, {0.1, 0.9, 0.95, 1e-8, 0.01})},
      {Op::kAdamw, {cube, cube, cube, cube}, numbers({1}, {0.1, 0.9, 0.95, 1e-8, 0.01})},
  };
}

inline std::vector<OpCase> element_cases() {
  const TensorType a{{5, 4}}, row{{4}}, column{{5, 1}}, whole{{5, 4}, kInt}, cube{{2, 4, 8}};
  std::vector<OpCase> all = {{Op::kWhere, {{{5, 4}, kFlag}, a, row}},
                             {Op::kNeg, {whole}},
                             {Op::kAdd, {whole, whole}},
                             {Op::kAdd, {{{0, 4}}, row}},
                             {Op::kSum, {whole}, numbers({0}, {}, {0})},
                             {Op::kSum, {{{}}}},
                             {Op::kMean, {{{5, 4}, kHalfWidth}}}};
  for (Op op = Op::kAdd; op <= Op::kGe; op = static_cast<Op>(static_cast<int>(op) + 1)) {
    all.push_back({op, {a, a}});
    all.push_back({op, {row, column}});
  }
  for (Op op = Op::kNeg; op <= Op::kSilu; op = static_cast<Op>(static_cast<int>(op) + 1))
    all.push_back({op, {a}, numbers({}, {0.3})});
  for (const Op op : {Op::kSum, Op::kMean, Op::kMax, Op::kMin}) {
    all.push_back({op, {cube}, numbers({0}, {}, {1})});
    all.push_back({op, {cube}, numbers({1}, {}, {0, -1})});
    all.push_back({op, {cube}});
  }
  return all;
}

}  // namespace trireme::test
