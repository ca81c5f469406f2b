#pragma once
// The engine around a module of your own, which stays as it is:
//
//   auto engine = parallel::data_parallel(*model, mesh);       // or fully_shard(*model, mesh)
//   auto optimizer = optim::adamw(engine->optimizer_params(), {.lr = 1e-3});
//   for (...) {
//     engine->backward(loss_of(*model, batch));                // in place of loss.backward()
//     engine->clip_grad_norm(1.0);
//     engine->step(*optimizer);
//   }
//
// or torch::optim::AdamW optimizer(engine->optimizer_tensors(), 1e-3) with optimizer.step(). Gradients are
// means over ranks and micro-batches. Parameters are moved to the world's device and to Options::compute, and
// start with rank 0's values, as buffers of all dtypes do; sync_buffers() gives these to all ranks again.
// Only parameters get means: hooks on activations, and gradients of inputs, see DataParallel::loss_factor().
// When the engine ends the module has its parameters back. Weights and states in files: state_file.h.
// Code that reads parameters past the dispatcher (data_ptr(), own kernels) must hold them:
// DataParallel::Held.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {

/// What data_parallel() and fully_shard() are told; the same on all ranks.
struct WrapOptions {
  /// A label of plan/policy.h, such as "zero2" or "fsdp:shard_grad_op"; empty: ddp or fsdp.
  std::string policy = {};
  /// fully_shard: paths of submodules that become units; empty: chosen by size.
  std::vector<std::string> blocks = {};
  /// fully_shard without blocks: fewest elements of a unit; 0: by the size of the module.
  int64_t min_unit_numel = 0;
  double bucket_mib = 25.0;  ///< data_parallel: cap of a bucket, above 0; infinity: none but the first's
  /// Of parameters and gradients as the module sees them: Float, BFloat16 or, on GPUs, Half. Masters are
  /// fp32.
  at::ScalarType compute = at::kFloat;
  at::ScalarType reduce = at::kFloat;                 ///< of gradients on the wire: Float or BFloat16
  plan::SumDtype accumulate = plan::SumDtype::kFp32;  ///< of the gradients of several micro-batches
  bool overlap = true;                                ///< communication beside computation, on GPUs
  int64_t prefetch = 1;              ///< with overlap: how many units are gathered ahead of the one in use
  Unused unused = Unused::kError;    ///< what a parameter without a gradient at the end of a step means
  Average average = Average::kMean;  ///< of gradients over ranks and micro-batches
  HookOptions hook = {};             ///< how gradients are made smaller on the wire
};

/// DDP, ZeRO-1 or ZeRO-2: parameters whole on every rank, gradients reduced in buckets. Collective. Throws
/// ConfigError when the policy shards parameters, LogicError that names what the engine cannot take: a module
/// that is wrapped already, parameters of several devices, of no floating dtype or fp64, memory of a
/// parameter that another tensor has, what files of weights cannot hold, another module or other options than
/// rank 0's; ConfigError for options out of their bounds and for ranks along tp that share no layer
/// (tensor_layers.h). What one rank refuses all do.
std::unique_ptr<DataParallel> data_parallel(torch::nn::Module& module, const comm::Mesh& mesh,
                                            const WrapOptions& options = {});

/// FSDP or ZeRO-3: parameters sharded, and unsharded block by block when operators touch them. Collective.
/// Units are chosen by choose_blocks() (unit_choice.h) unless options name them; rank 0 logs how many there
/// are, and warns when there is one. Throws as data_parallel(), and LogicError that names a block that does
/// not exist or lies within another.
std::unique_ptr<DataParallel> fully_shard(torch::nn::Module& module, const comm::Mesh& mesh,
                                          const WrapOptions& options = {});

/// Buffers of all dtypes take rank 0's values, as running statistics of BatchNorm; with ranks along tp those
/// of the first rank of data with the same place along it. Collective. Throws LogicError naming a buffer that
/// has another shape or dtype than rank 0's, before any is changed.
void sync_buffers(torch::nn::Module& module, const comm::Mesh& mesh);

/// The units of fully_shard(): the root, then one a block, in the order of `blocks` or, where that is empty,
/// of choose_blocks(). A parameter with several names belongs where its first name is; a unit that would be
/// empty is left out. `shares` as sizes_of() has them.
std::vector<plan::UnitSpec> block_units(const torch::nn::Module& module,
                                        const std::vector<std::string>& blocks, int64_t min_unit_numel = 0,
                                        const std::map<std::string, int64_t>& shares = {});

}  // namespace trireme::parallel
