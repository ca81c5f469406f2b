#pragma once
// Shared by the sources that make factor maps. Private to plan/*_maps.cpp.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/plan/op_rules.h"

namespace trireme::plan::maps {

using Types = std::vector<TensorType>;
using Dims = std::vector<int64_t>;

inline constexpr int64_t kWhole = FactorMap::kWhole;

/// "fp32 (4, 64), int64 (4)".
std::string types_text(const Types& types);

/// A call whose map is made.
struct Call {
  Op op;
  const Types& inputs;
  const OpAttributes& attributes;

  const TensorType& in(size_t index) const { return inputs[index]; }
  int64_t rank(size_t index) const { return std::ssize(inputs[index].shape); }

  template <typename... Args>
  void require(bool holds, fmt::format_string<Args...> wanted, Args&&... args) const {
    if (holds) return;
    throw ConfigError("[plan.ops] {} of {}: {}", op, types_text(inputs),
                      fmt::format(wanted, std::forward<Args>(args)...));
  }
  void require_floating(size_t index) const {
    require(is_floating(in(index).dtype), "operand {} must have a floating dtype; cast it", index);
  }
  void require_same_dtype() const {
    for (const TensorType& type : inputs)
      require(type.dtype == inputs.front().dtype, "operands must have one dtype; cast one");
  }
  /// A dimension of operand 0, counted from the end where it is negative.
  int64_t dim(int64_t number, int64_t dims) const {
    require(-dims <= number && number < dims, "dimension {} is outside {} dimensions", number, dims);
    return number < 0 ? number + dims : number;
  }
};

/// Factors `from`, from + 1, ...
Dims numbered(int64_t count, int64_t from = 0);
/// The factor of each dimension of the operand is a dimension of the result, too.
FactorMap elementwise(const TensorType& type, TensorDtype dtype);
/// Factors of operands that are repeated along dimensions of size 1 or that they do not have.
FactorMap repeated(const Call& call, TensorDtype dtype);

// Of layers, losses and optimizers.
FactorMap multiplied(const Call& call);
FactorMap linear(const Call& call);
FactorMap looked_up(const Call& call);
FactorMap attended(const Call& call);
FactorMap softened(const Call& call);
FactorMap normed(const Call& call);
FactorMap mean_loss(const Call& call);
FactorMap updated(const Call& call);

}  // namespace trireme::plan::maps
