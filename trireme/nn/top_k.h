#pragma once
// How often a classifier's first guesses are right.
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme::nn {

/// logits (B, V), targets (B) int64 -> int64 scalar on the device: the number of rows whose target is among
/// their k largest logits; of equal logits lower classes come first. A NaN counts as larger than what it is
/// compared with, so a row whose target has one is wrong unless k >= V. Counts of batches and ranks add up,
/// whatever their sizes.
at::Tensor top_k_hits(const at::Tensor& logits, const at::Tensor& targets, int64_t k);

}  // namespace trireme::nn
