#pragma once
// The seconds of the operations that a unit's passes are made of, from the shapes of its parameters and a
// machine's rates.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/rates.h"

namespace trireme::plan {

/// Why time passes on a rank. Each second of a step has one of them.
enum class TimeCause {
  kProducts,   ///< of matrices, the head's included
  kAttention,  ///< scores, softmax, and values times them
  kMemory,     ///< norms, activations, residual sums, embeddings, casts
  kLoss,       ///< of logits
  kAgain,      ///< what backward computes again
  kSums,       ///< of gradients of micro-batches
  kUpdate,     ///< of parameters, with the norm of gradients
  kHost,       ///< launches that the device waits for
  kParts,      ///< transfers along tp and cp within a pass
  kGather,     ///< waits for parameters
  kReduce,     ///< waits for gradients
  kStages      ///< waits of a pipeline: for messages, and for other ranks at its end
};
template <>
inline constexpr auto kNames<TimeCause> = std::to_array<std::string_view>({"products", "attention", "memory",
                                                                           "loss", "computed_again", "sums",
                                                                           "update", "host", "parts",
                                                                           "gather", "reduce", "stages"});
inline constexpr size_t kTimeCauses = kNames<TimeCause>.size();

/// Kinds of kernels whose work is counted, by the names that profiles give them (train/profile.h).
enum class KernelKind {
  kGemm,
  kAttention,
  kNorm,
  kRope,
  kActivation,
  kLoss,
  kOptimizer,
  kOther  ///< not counted: it is spread over several kinds of kernels, or part of another one
};
template <>
inline constexpr auto kNames<KernelKind> = std::to_array<std::string_view>({"GEMM", "attention", "norm",
                                                                            "rope", "activation", "loss",
                                                                            "optimizer", "other"});
inline constexpr size_t kKernelKinds = kNames<KernelKind>.size();

/// An operation, launched once.
struct Work {
  TimeCause cause = TimeCause::kProducts;
  double seconds = 0.0;
  KernelKind kind = KernelKind::kOther;
  double flops = 0.0;  ///< of products and attention, of which the causal half counts; else 0
  double bytes = 0.0;  ///< each operand read or written once
};
/// A backward pass in one piece does the work of both of its halves.
struct UnitWork {
  std::vector<Work> forward, backward_input, backward_weight;
  std::vector<Work> again = {};  ///< operations that the one of backward_input with kAgain sums up
};

/// The name by which rates list the dtype; fp16 is as fast as bf16.
std::string rate_dtype(Dtype dtype);

/// The work of a micro-batch in each of `units`, which are those of an engine, or of a stage, in their order:
/// the head's is in the last. `config` is complete, with memory.recompute settled; `facts` are those of what
/// a rank holds. Throws ConfigError for models of images, and as Rates does.
std::vector<UnitWork> work_of_units(const std::vector<UnitSpec>& units, const Config& config,
                                    const ModelFacts& facts, const BatchPlan& batch, Device device,
                                    const Rates& rates);

/// A rank's bytes of an update of `elements` with `moments` bytes of state for 8 of them: gradient, master
/// and state are read, and written but for the gradient, and parameters of another dtype are written.
double update_bytes(double elements, int64_t moments, int64_t compute_bytes);

}  // namespace trireme::plan
