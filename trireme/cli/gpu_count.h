#pragma once
// GPUs that the driver shows to this process, asked without linking CUDA.

namespace trireme::cli {

/// 0 without a driver or a device. Honours CUDA_VISIBLE_DEVICES, as every CUDA program here will.
int gpu_count();

}  // namespace trireme::cli
