#pragma once
// Operations on whole tensors: their names, operands and attributes. What an operation makes of the shapes
// and placements of its operands is in op_rules.h.
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/choices.h"
#include "trireme/plan/region.h"

namespace trireme::plan {

enum class TensorDtype { kFp32, kBf16, kFp16, kInt64, kBool };
template <>
inline constexpr auto kNames<TensorDtype> = std::to_array<std::string_view>({"fp32", "bf16", "fp16", "int64",
                                                                             "bool"});
int64_t bytes_of(TensorDtype dtype);
constexpr bool is_floating(TensorDtype dtype) {
  return dtype == TensorDtype::kFp32 || dtype == TensorDtype::kBf16 || dtype == TensorDtype::kFp16;
}

/// A tensor without its values.
struct TensorType {
  Shape shape;
  TensorDtype dtype = TensorDtype::kFp32;
  bool operator==(const TensorType&) const = default;
  int64_t bytes() const;
};
/// "fp32 (4, 64)".
std::string to_text(const TensorType& type);

enum class Op {
  kFull,
  kRandn,
  kArange,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMaximum,
  kMinimum,
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kNeg,
  kAbs,
  kSquare,
  kScale,
  kShift,
  kExp,
  kLog,
  kSqrt,
  kRsqrt,
  kTanh,
  kSigmoid,
  kRelu,
  kGelu,
  kSilu,
  kCast,
  kDropout,
  kWhere,
  kSum,
  kMean,
  kMax,
  kMin,
  kTranspose,
  kReshape,
  kUnsqueeze,
  kSqueeze,
  kSlice,
  kSplit,
  kCat,
  kMatmul,
  kLinear,
  kEmbedding,
  kAttention,
  kSoftmax,
  kLogSoftmax,
  kLayerNorm,
  kRmsNorm,
  kCrossEntropy,
  kMseLoss,
  kAddInto,
  kCopyInto,
  kSgd,
  kAdamw
};
template <>
inline constexpr auto kNames<Op> =
    std::to_array<std::string_view>({"full",        "randn",      "arange",    "add",
                                     "sub",         "mul",        "div",       "maximum",
                                     "minimum",     "eq",         "ne",        "lt",
                                     "le",          "gt",         "ge",        "neg",
                                     "abs",         "square",     "scale",     "shift",
                                     "exp",         "log",        "sqrt",      "rsqrt",
                                     "tanh",        "sigmoid",    "relu",      "gelu",
                                     "silu",        "cast",       "dropout",   "where",
                                     "sum",         "mean",       "max",       "min",
                                     "transpose",   "reshape",    "unsqueeze", "squeeze",
                                     "slice",       "split",      "cat",       "matmul",
                                     "linear",      "embedding",  "attention", "softmax",
                                     "log_softmax", "layer_norm", "rms_norm",  "cross_entropy",
                                     "mse_loss",    "add_",       "copy_",     "sgd_",
                                     "adamw_"});

/// The numbers of an operation. What each means is in its OpRecord.
struct OpAttributes {
  static constexpr size_t kMostWhole = 4, kMostReal = 5, kMostListed = 8;
  std::array<int64_t, kMostWhole> whole{};
  std::array<double, kMostReal> real{};
  std::array<int64_t, kMostListed> list{};
  int64_t listed = 0;

  std::span<const int64_t> items() const { return {list.data(), static_cast<size_t>(listed)}; }
  void set_items(std::span<const int64_t> items);
  /// Numbers that are not given are 0.
  static OpAttributes of(const std::vector<int64_t>& whole, const std::vector<double>& real = {},
                         const std::vector<int64_t>& list = {});
  bool operator==(const OpAttributes&) const = default;
};

/// The facts of every call of an operation.
struct OpRecord {
  Op op = Op::kFull;
  int64_t least_inputs = 0, most_inputs = 0, most_results = 1;
  std::array<std::string_view, OpAttributes::kMostWhole> whole = {};  ///< names of attributes; empty: none
  std::array<std::string_view, OpAttributes::kMostReal> real = {};
  std::string_view list = {};
  /// The operation writes its first operand, which has no other result.
  bool in_place = false;
};
const OpRecord& record_of(Op op);

inline constexpr int64_t kMostOpInputs = 6, kMostOpResults = 4;

}  // namespace trireme::plan
