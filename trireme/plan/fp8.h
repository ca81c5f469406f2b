#pragma once
// What a config alone says about FP8: which blocks multiply with it, and whether their shapes can.
#include <cstdint>
#include <string>

#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

/// Whether the linear layers of block `block` of `blocks` are multiplied in FP8.
bool multiplies_in_fp8(const Fp8Config& fp8, int64_t block, int64_t blocks);

/// Whether its matrices travel in FP8 where they are gathered: one scale a matrix can be agreed on by ranks
/// that hold parts of it.
bool gathers_fp8(const Fp8Config& fp8, int64_t block, int64_t blocks);

/// Sizes of what is multiplied must be multiples of this: 16 bytes, or a block of scales.
int64_t fp8_multiple(Fp8 recipe);

/// Why the matrices of the blocks, or the tokens of a micro-batch of so many rows, have sizes that are none;
/// with what to set instead. Empty: they have not, or nothing is multiplied in FP8.
std::string fp8_obstacle(const Config& config, const ModelFacts& facts, int64_t micro_batch);

}  // namespace trireme::plan
