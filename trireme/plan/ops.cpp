#include "trireme/plan/ops.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

constexpr auto kOpRecords = std::to_array<OpRecord>({
    {.op = Op::kFull, .whole = {"dtype"}, .real = {"value"}, .list = "shape"},
    {.op = Op::kRandn, .whole = {"dtype", "seed"}, .list = "shape"},
    {.op = Op::kArange, .whole = {"size"}},
    {Op::kAdd, 2, 2},
    {Op::kSub, 2, 2},
    {Op::kMul, 2, 2},
    {Op::kDiv, 2, 2},
    {Op::kMaximum, 2, 2},
    {Op::kMinimum, 2, 2},
    {Op::kEq, 2, 2},
    {Op::kNe, 2, 2},
    {Op::kLt, 2, 2},
    {Op::kLe, 2, 2},
    {Op::kGt, 2, 2},
    {Op::kGe, 2, 2},
    {Op::kNeg, 1, 1},
    {Op::kAbs, 1, 1},
    {Op::kSquare, 1, 1},
    {.op = Op::kScale, .least_inputs = 1, .most_inputs = 1, .real = {"by"}},
    {.op = Op::kShift, .least_inputs = 1, .most_inputs = 1, .real = {"by"}},
    {Op::kExp, 1, 1},
    {Op::kLog, 1, 1},
    {Op::kSqrt, 1, 1},
    {Op::kRsqrt, 1, 1},
    {Op::kTanh, 1, 1},
    {Op::kSigmoid, 1, 1},
    {Op::kRelu, 1, 1},
    {Op::kGelu, 1, 1},
    {Op::kSilu, 1, 1},
    {.op = Op::kCast, .least_inputs = 1, .most_inputs = 1, .whole = {"dtype"}},
    {.op = Op::kDropout, .least_inputs = 1, .most_inputs = 1, .whole = {"seed"}, .real = {"p"}},
    {Op::kWhere, 3, 3},
    {.op = Op::kSum, .least_inputs = 1, .most_inputs = 1, .whole = {"keep"}, .list = "dims"},
    {.op = Op::kMean, .least_inputs = 1, .most_inputs = 1, .whole = {"keep"}, .list = "dims"},
    {.op = Op::kMax, .least_inputs = 1, .most_inputs = 1, .whole = {"keep"}, .list = "dims"},
    {.op = Op::kMin, .least_inputs = 1, .most_inputs = 1, .whole = {"keep"}, .list = "dims"},
    {.op = Op::kTranspose, .least_inputs = 1, .most_inputs = 1, .whole = {"dim0", "dim1"}},
    {.op = Op::kReshape, .least_inputs = 1, .most_inputs = 1, .list = "shape"},
    {.op = Op::kUnsqueeze, .least_inputs = 1, .most_inputs = 1, .whole = {"dim"}},
    {.op = Op::kSqueeze, .least_inputs = 1, .most_inputs = 1, .whole = {"dim"}},
    {.op = Op::kSlice, .least_inputs = 1, .most_inputs = 1, .whole = {"dim", "begin", "end"}},
    {.op = Op::kSplit,
     .least_inputs = 1,
     .most_inputs = 1,
     .most_results = kMostOpResults,
     .whole = {"dim"},
     .list = "sizes"},
    {.op = Op::kCat, .least_inputs = 1, .most_inputs = kMostOpInputs, .whole = {"dim"}},
    {Op::kMatmul, 2, 2},
    {Op::kLinear, 2, 3},
    {Op::kEmbedding, 2, 2},
    {.op = Op::kAttention, .least_inputs = 3, .most_inputs = 3, .whole = {"causal"}, .real = {"scale"}},
    {.op = Op::kSoftmax, .least_inputs = 1, .most_inputs = 1, .whole = {"dim"}},
    {.op = Op::kLogSoftmax, .least_inputs = 1, .most_inputs = 1, .whole = {"dim"}},
    {.op = Op::kLayerNorm, .least_inputs = 1, .most_inputs = 3, .real = {"eps"}},
    {.op = Op::kRmsNorm, .least_inputs = 1, .most_inputs = 2, .real = {"eps"}},
    {Op::kCrossEntropy, 2, 2},
    {Op::kMseLoss, 2, 2},
    {.op = Op::kAddInto, .least_inputs = 2, .most_inputs = 2, .most_results = 0, .in_place = true},
    {.op = Op::kCopyInto, .least_inputs = 2, .most_inputs = 2, .most_results = 0, .in_place = true},
    {.op = Op::kSgd,
     .least_inputs = 2,
     .most_inputs = 3,
     .most_results = 0,
     .real = {"lr", "momentum", "weight_decay"},
     .in_place = true},
    {.op = Op::kAdamw,
     .least_inputs = 4,
     .most_inputs = 4,
     .most_results = 0,
     .whole = {"step"},
     .real = {"lr", "beta1", "beta2", "eps", "weight_decay"},
     .in_place = true},
});
static_assert(kOpRecords.size() == kNames<Op>.size());

}  // namespace

int64_t bytes_of(TensorDtype dtype) {
  constexpr std::array<int64_t, kNames<TensorDtype>.size()> kBytes = {4, 2, 2, 8, 1};
  return kBytes[static_cast<size_t>(dtype)];
}

int64_t TensorType::bytes() const {
  const std::optional<int64_t> elements = checked_numel(shape);
  TRIREME_CHECK(elements, "[plan.ops] the elements of {} cannot be counted", to_text(*this));
  return *elements * bytes_of(dtype);
}

std::string to_text(const TensorType& type) {
  return fmt::format("{} ({})", type.dtype, fmt::join(type.shape, ", "));
}

void OpAttributes::set_items(std::span<const int64_t> items) {
  TRIREME_CHECK(items.size() <= kMostListed, "[plan.ops] {} numbers in a list; there may be {}", items.size(),
                kMostListed);
  list = {};
  std::ranges::copy(items, list.begin());
  listed = std::ssize(items);
}

OpAttributes OpAttributes::of(const std::vector<int64_t>& whole, const std::vector<double>& real,
                              const std::vector<int64_t>& list) {
  TRIREME_CHECK(whole.size() <= kMostWhole && real.size() <= kMostReal,
                "[plan.ops] {} whole numbers and {} others; there may be {} and {}", whole.size(),
                real.size(), kMostWhole, kMostReal);
  OpAttributes attributes;
  std::ranges::copy(whole, attributes.whole.begin());
  std::ranges::copy(real, attributes.real.begin());
  attributes.set_items(list);
  return attributes;
}

const OpRecord& record_of(Op op) {
  const OpRecord& record = kOpRecords[static_cast<size_t>(op)];
  TRIREME_CHECK(record.op == op, "[plan.ops] the table has {} in the place of {}", record.op, op);
  return record;
}

}  // namespace trireme::plan
