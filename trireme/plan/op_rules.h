#pragma once
// What operations make of tensors that the ranks of one group hold together. Each operation is a map of
// factors, as in einsum: which factor each dimension of each operand and result is. Ranks may share out one
// factor; what that makes of every tensor follows from the map, for gradients from its transpose. After
// Shardy's sharding rules, with the placements of PyTorch's DTensor.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/plan/ops.h"
#include "trireme/plan/placement.h"

namespace trireme::plan {

struct FactorMap {
  static constexpr int64_t kWhole = -1;  ///< a dimension that every rank needs whole

  std::vector<TensorType> results;
  /// The factor of each dimension. One that no result has is summed over: results are partial where it is
  /// shared out.
  std::vector<std::vector<int64_t>> inputs = {}, outputs = {};
  int64_t factors = 0;
  /// Factors that ranks must share out equally: dimensions of different sizes have them.
  std::vector<int64_t> even = {};
  /// Operands that are added to the sum over a factor, so that they are partial where it is shared out.
  std::vector<int64_t> added = {};
  /// Sets of operands in which the operation is linear: where these are partial and the others are whole, so
  /// are the results.
  std::vector<std::vector<int64_t>> linear = {};
  /// Operands that rather stay where they are: weights, which are larger than activations or used again.
  std::vector<int64_t> stay = {};
};

/// The map of an operation on operands of these types. Throws ConfigError that names the operation, the types
/// and what they should be.
FactorMap factor_map(Op op, const std::vector<TensorType>& inputs, const OpAttributes& attributes);

/// One way in which ranks compute an operation together: the placements of its operands and results.
struct OpStrategy {
  std::vector<TensorPlacement> inputs, outputs;
  bool operator==(const OpStrategy&) const = default;
};
/// All ways on `ranks` ranks. The first is that every rank computes everything.
std::vector<OpStrategy> strategies(const FactorMap& map, const std::vector<TensorType>& inputs,
                                   int64_t ranks);

/// The placement of an operand's gradient, by the transpose of the map: a part's gradient is a part alike; an
/// operand that all ranks have gets a share from each where they divide the work, and the whole where each
/// does all of it; a summand's gradient is that of the sum, which all have.
TensorPlacement gradient_of_input(const OpStrategy& strategy, size_t input);
/// The placement that the gradient of a result must have.
TensorPlacement gradient_of_output(const OpStrategy& strategy, size_t output);

/// A tensor that is not in the placement that an operation needs.
struct OpMove {
  int64_t tensor = 0;      ///< operand, or result
  bool is_result = false;  ///< after the operation, because a pinned result is placed otherwise
  TensorPlacement from, to;
  int64_t bytes = 0;  ///< that a rank sends
};

struct OpRequest {
  Op op = Op::kFull;
  OpAttributes attributes = {};
  std::vector<TensorType> types = {};  ///< of operands
  std::vector<TensorPlacement> placements = {};
  std::vector<bool> pinned = {};  ///< operands that may not move; empty: none, but those that are written
  std::optional<TensorPlacement> result = {};  ///< that a user has asked for
  int64_t ranks = 1;
  bool is_explicit = false;  ///< nothing moves between ranks unless the program says so
  std::string where = {};    ///< of the program, for messages; "program.txt:3"
};

struct OpPlan {
  FactorMap map;
  OpStrategy strategy;
  std::vector<OpMove> moves;  ///< those of operands first
  std::vector<TensorPlacement> results() const;
  int64_t bytes() const;
};

/// The strategy, of those that leave pinned operands where they are, that moves the fewest operands that
/// rather stay, then sends the fewest bytes, up to a result in the placement that is asked for, then changes
/// the fewest tensors. Throws ConfigError for types that do not
/// fit, pinned operands that cannot be used together, and, where the request is explicit, for a move that
/// sends something, naming operation, placements, bytes and what to write instead.
OpPlan plan_op(const OpRequest& request);

}  // namespace trireme::plan
