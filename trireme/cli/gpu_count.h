#pragma once
// GPUs that the driver shows to this process, asked without linking CUDA.
#include <cstdint>

namespace trireme::cli {

/// 0 without a driver or a device. Honours CUDA_VISIBLE_DEVICES, as every CUDA program here will.
int gpu_count();

/// Memory of the smallest of them in bytes; 0 when there is none.
int64_t gpu_memory();

}  // namespace trireme::cli
