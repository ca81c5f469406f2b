#pragma once
// FP8 as far as a config alone decides it: which blocks multiply with it, and whether their shapes can.
#include <cstdint>
#include <string>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

/// Whether the linear layers of block `block` of `blocks` are multiplied in FP8.
bool multiplies_in_fp8(const Fp8Config& fp8, int64_t block, int64_t blocks);

/// Whether the block's matrices travel in FP8 where they are gathered: ranks that hold parts of a matrix can
/// only agree on one scale for all of it.
bool gathers_fp8(const Fp8Config& fp8, int64_t block, int64_t blocks);

/// Sizes of matrices that are multiplied must be multiples of this: 16 bytes, or the block of a scale.
int64_t fp8_multiple(Fp8 recipe);

/// Which matrix of the blocks, or number of tokens in a micro-batch of `micro_batch` rows, is no multiple of
/// fp8_multiple(), and what to set instead. Empty: all are, or nothing is multiplied in FP8.
std::string fp8_obstacle(const Config& config, const ModelFacts& facts, int64_t micro_batch);

/// `config`, in bf16 where it says that training goes on like that if FP8 cannot be. `device` is kCpu or
/// kCuda. Throws ConfigError where it does not say so.
Config with_possible_fp8(Config config, Device device, const BatchPlan& batch);

}  // namespace trireme::plan
