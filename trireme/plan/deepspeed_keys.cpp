// The table of DeepSpeed's keys. A key that is not in it is unknown, and an error.
#include "trireme/plan/deepspeed_keys.h"

#include <algorithm>
#include <utility>

namespace trireme::plan {
namespace {

using enum DeepSpeedType;
using enum DeepSpeedEffect;
using Pair = std::pair<std::string_view, std::string_view>;

constexpr Pair kStages[] = {{"0", "ddp"}, {"1", "zero1"}, {"2", "zero2"}, {"3", "zero3"}};
/// The form before stages were numbered.
constexpr Pair kOldStages[] = {{"false", "ddp"}, {"true", "zero1"}};
constexpr Pair kFp32OnWire[] = {{"false", "auto"}, {"true", "fp32"}};

constexpr std::string_view kBatch = "train.global_batch, train.rank_batch, train.micro_batch";
constexpr std::string_view kCompute = "precision.compute";
constexpr std::string_view kNoOffload =
    "state cannot be offloaded to host memory or disks yet; remove it, and use a higher stage or more ranks";
constexpr std::string_view kNothingOffloaded = "nothing is offloaded, so there is nothing to tune";
constexpr std::string_view kFlat =
    "parameters and gradients of a block lie in one flat buffer, which travels as one message";
constexpr std::string_view kByBlock =
    "an upper limit in elements; here the parameters of one block travel at a time (parallel.bucket_mib "
    "makes "
    "buckets by size)";
constexpr std::string_view kByUnit =
    "parameters are gathered and freed by blocks in a fixed order; parallel.prefetch says how many ahead";
constexpr std::string_view kSummedInFp32 =
    "gradients are summed over ranks in fp32 and divided once, so an earlier division changes nothing";
constexpr std::string_view kRecomputed =
    "it says how the activations are kept that a model's code checkpoints; here memory.recompute says which "
    "are recomputed";
constexpr std::string_view kRecorded =
    "metrics.jsonl, TensorBoard's event files and step times are in the directory of every run, by its name";
constexpr std::string_view kMeasured =
    "FLOPs are in train --dry-run, bytes in train --summary, and train.profile_steps traces kernels";
constexpr std::string_view kCheckpoints =
    "checkpoints name their layout and are resharded when they are loaded (checkpoint.every, --resume)";
constexpr std::string_view kAnyOptimizer = "every optimizer here works under every policy";
constexpr std::string_view kOneKernel = "one fused update over flat shards, whichever is asked for";
constexpr std::string_view kMasters = "masters and moments are in fp32 (optim.state stores moments in less)";
constexpr std::string_view kOtherMoments = "optim.state=bf16 stores moments in bf16; remove it";
constexpr std::string_view kModelKnown =
    "it concerns modules of any kind; the models here need no such setting";
constexpr std::string_view kOff = "the feature that it tunes is off";
constexpr std::string_view kNotHere = "Trireme does not have this; remove it or disable it";

constexpr DeepSpeedKey kKeys[] = {
    // batch
    {"train_batch_size", kWhole, kTogether, kBatch,
     "of all ranks; the product of the next two and the data-parallel ranks"},
    {"train_micro_batch_size_per_gpu", kWhole, kTogether, kBatch, "alone it is the whole batch of a rank"},
    {"gradient_accumulation_steps", kWhole, kTogether, kBatch,
     "micro-batches of a step; train.rank_batch is its product with the micro-batch"},
    // optimizer
    {"optimizer.type", kWord, kTogether, "optim.name",
     "Adam, AdamW, FusedAdam: adamw; SGD: sgd; others are refused"},
    {"optimizer.params.lr", kNumber, kTogether, "optim.lr", "0.001 where it is left out"},
    {"optimizer.params.betas", kNumbers, kTogether, "optim.beta1, optim.beta2",
     "0.9 and 0.999 where they are left out"},
    {"optimizer.params.eps", kNumber, kTogether, "optim.eps"},
    {"optimizer.params.weight_decay", kNumber, kTogether, "optim.weight_decay",
     "0 where it is left out, 0.01 with torch_adam"},
    {"optimizer.params.momentum", kNumber, kTogether, "optim.momentum", "SGD; 0 where it is left out"},
    {"optimizer.params.nesterov", kFlag, kTogether, "optim.nesterov", "SGD"},
    {"optimizer.params.max_grad_norm", kNumber, kSets, "train.grad_clip"},
    {"optimizer.params.adam_w_mode", kFlag, kTogether, "optim.weight_decay",
     "false is refused with weight decay"},
    {"optimizer.params.torch_adam", kFlag, kNeedless, "", kOneKernel},
    {"optimizer.params.fused", kFlag, kNeedless, "", kOneKernel},
    {"optimizer.params.foreach", kFlag, kNeedless, "", kOneKernel},
    {"optimizer.params.bias_correction", kFlag, kOnly, "",
     "adamw corrects the bias of its moments, as in the paper; remove it", "true"},
    {"optimizer.params.amsgrad", kFlag, kOnly, "", kNotHere, "false"},
    {"optimizer.params.dampening", kNumber, kOnly, "", kNotHere, "0"},
    {"optimizer.legacy_fusion", kFlag, kNeedless, "", kOneKernel},
    {"zero_allow_untested_optimizer", kFlag, kNeedless, "", kAnyOptimizer},
    {"zero_force_ds_cpu_optimizer", kFlag, kNeedless, "", kAnyOptimizer},
    // scheduler
    {"scheduler.type", kWord, kTogether, "optim.schedule",
     "WarmupLR: constant, WarmupDecayLR: linear, WarmupCosineLR: cosine; others are refused"},
    {"scheduler.params.warmup_min_lr", kNumber, kTogether, "optim.warmup_steps",
     "the warm-up rises from 0, and a note says so where this is more"},
    {"scheduler.params.warmup_max_lr", kNumber, kTogether, "optim.lr"},
    {"scheduler.params.warmup_num_steps", kWhole, kTogether, "optim.warmup_steps",
     "1000 where it is left out"},
    {"scheduler.params.warmup_type", kWord, kTogether, "optim.warmup_steps",
     "linear in any case; a note says how log differs"},
    {"scheduler.params.total_num_steps", kWhole, kTogether, "train.steps"},
    {"scheduler.params.warmup_min_ratio", kNumber, kTogether, "optim.warmup_steps",
     "the warm-up rises from 0, and a note says so where this is more"},
    {"scheduler.params.cos_min_ratio", kNumber, kTogether, "optim.min_lr",
     "times optim.lr; 0.0001 where it is left out"},
    {"scheduler.params.last_batch_iteration", kWhole, kOnly, "",
     "a run continues from a checkpoint (--resume), which knows its step; remove it", "-1"},
    // precision
    {"fp16.enabled", kFlag, kTogether, kCompute, "fp16; fp32 where neither fp16 nor bf16 is enabled"},
    {"fp16.auto_cast", kFlag, kNeedless, "", "inputs are token numbers, or images that the model casts"},
    {"fp16.loss_scale", kNumber, kTogether,
     "precision.scaling, precision.initial_scale, precision.scale_window, precision.min_scale",
     "0: dynamic; above 0: a scale that cannot move"},
    {"fp16.initial_scale_power", kWhole, kTogether, "precision.initial_scale", "2 to this power"},
    {"fp16.loss_scale_window", kWhole, kTogether, "precision.scale_window"},
    {"fp16.hysteresis", kWhole, kTogether, "precision.scale_hysteresis"},
    {"fp16.min_loss_scale", kNumber, kTogether, "precision.min_scale"},
    {"fp16.consecutive_hysteresis", kFlag, kOnly, "",
     "overflows are counted until the scale has doubled, and finite steps between them do not reset the "
     "count; "
     "remove it",
     "false"},
    {"fp16.fp16_master_weights_and_grads", kFlag, kOnly, "", kMasters, "false"},
    {"bf16.enabled", kFlag, kTogether, kCompute, "bf16"},
    {"bfloat16.enabled", kFlag, kTogether, kCompute, "the older name of bf16.enabled"},
    {"bf16.immediate_grad_update", kFlag, kNeedless, "",
     "gradients are written into the flat buffer at once"},
    {"bf16.check_grad_overflow", kFlag, kNeedless, "",
     "a run whose loss or gradients are not finite ends with exit code 6 in any case"},
    {"bf16.bf16_master_weights_and_grads", kFlag, kOnly, "", kMasters, "false"},
    {"bf16.bf16_optimizer_states", kFlag, kOnly, "", kOtherMoments, "false"},
    {"amp.enabled", kFlag, kOnly, "", "Apex is not used; set bf16 or fp16 instead", "false"},
    {"amp.*", kAny, kNeedless, "", kOff},
    {"torch_autocast.enabled", kFlag, kOnly, "",
     "parameters are cast as a whole instead; set bf16 or fp16 instead", "false"},
    {"torch_autocast.*", kAny, kNeedless, "", kOff},
    {"data_types.grad_accum_dtype", kWord, kTogether, "precision.accumulate",
     "fp32, or the dtype that is computed with"},
    // gradients
    {"gradient_clipping", kNumber, kSets, "train.grad_clip"},
    {"prescale_gradients", kFlag, kNeedless, "", kSummedInFp32},
    {"gradient_predivide_factor", kNumber, kNeedless, "", kSummedInFp32},
    {"communication_data_type", kWord, kTogether, "precision.reduce, parallel.comm_hook",
     "fp32, bf16 (bfp16): precision.reduce; fp16: parallel.comm_hook"},
    {"fp32_allreduce", kFlag, kSets, "precision.reduce", "", "", kFp32OnWire},
    {"seq_parallel_communication_data_type", kWord, kNeedless, "",
     "activations travel in the dtype of computation"},
    {"sparse_gradients", kFlag, kOnly, "", "gradients of embeddings are dense; remove it", "false"},
    {"disable_allgather", kFlag, kNeedless, "", kFlat},
    // ZeRO
    {"zero_optimization", kFlag, kSets, "parallel.policy", "", "", kOldStages},
    {"zero_optimization.stage", kWhole, kSets, "parallel.policy", "", "", kStages},
    {"zero_optimization.overlap_comm", kFlag, kSets, "parallel.overlap"},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", kFlag, kSets, "checkpoint.final_weights"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save", kFlag, kSets, "checkpoint.final_weights"},
    {"zero_optimization.gather_16bit_weights_on_model_save", kFlag, kSets, "checkpoint.final_weights"},
    {"zero_optimization.zero_hpz_partition_size", kWhole, kTogether, "parallel.reshard_after_forward",
     "above 1, with stage 3"},
    {"zero_optimization.contiguous_gradients", kFlag, kNeedless, "", kFlat},
    {"zero_optimization.reduce_scatter", kFlag, kNeedless, "",
     "the policy decides: gradients are reduced and scattered, and with ddp gathered again"},
    {"zero_optimization.allgather_partitions", kFlag, kNeedless, "", kFlat},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kFlag, kNeedless, "", kFlat},
    {"zero_optimization.reduce_bucket_size", kWhole, kNeedless, "", kByBlock},
    {"zero_optimization.allgather_bucket_size", kWhole, kNeedless, "", kByBlock},
    {"zero_optimization.sub_group_size", kWhole, kNeedless, "", kByBlock},
    {"zero_optimization.stage3_prefetch_bucket_size", kWhole, kNeedless, "", kByUnit},
    {"zero_optimization.prefetch_bucket_size", kWhole, kNeedless, "", kByUnit},
    {"zero_optimization.stage3_param_persistence_threshold", kWhole, kNeedless, "", kFlat},
    {"zero_optimization.param_persistence_threshold", kWhole, kNeedless, "", kFlat},
    {"zero_optimization.stage3_model_persistence_threshold", kWhole, kNeedless, "", kFlat},
    {"zero_optimization.model_persistence_threshold", kWhole, kNeedless, "", kFlat},
    {"zero_optimization.stage3_max_live_parameters", kWhole, kNeedless, "", kByUnit},
    {"zero_optimization.max_live_parameters", kWhole, kNeedless, "", kByUnit},
    {"zero_optimization.stage3_max_reuse_distance", kWhole, kNeedless, "", kByUnit},
    {"zero_optimization.max_reuse_distance", kWhole, kNeedless, "", kByUnit},
    {"zero_optimization.stage3_module_granularity_threshold", kWhole, kNeedless, "", kByUnit},
    {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kFlag, kNeedless, "", kByUnit},
    {"zero_optimization.stage3_allgather_sequential", kFlag, kNeedless, "", kFlat},
    {"zero_optimization.round_robin_gradients", kFlag, kNeedless, "", kFlat},
    {"zero_optimization.ignore_unused_parameters", kFlag, kNeedless, "", kModelKnown},
    {"zero_optimization.memory_efficient_linear", kFlag, kNeedless, "", kModelKnown},
    {"zero_optimization.override_module_apply", kFlag, kNeedless, "", kModelKnown},
    {"zero_optimization.log_trace_cache_warnings", kFlag, kNeedless, "", kByUnit},
    {"zero_optimization.enable_sanity_checks", kFlag, kNeedless, "",
     "the order of a step is checked before it runs (trireme plan step)"},
    {"zero_optimization.legacy_stage1", kFlag, kNeedless, "", "there is one implementation"},
    {"zero_optimization.load_from_fp32_weights", kFlag, kNeedless, "", kCheckpoints},
    {"zero_optimization.elastic_checkpoint", kFlag, kNeedless, "", kCheckpoints},
    {"zero_optimization.offload_optimizer", kAny, kNeedless, "", kNothingOffloaded},
    {"zero_optimization.offload_optimizer.device", kWord, kOnly, "", kNoOffload, "none"},
    {"zero_optimization.offload_optimizer.*", kAny, kNeedless, "", kNothingOffloaded},
    {"zero_optimization.offload_param", kAny, kNeedless, "", kNothingOffloaded},
    {"zero_optimization.offload_param.device", kWord, kOnly, "", kNoOffload, "none"},
    {"zero_optimization.offload_param.*", kAny, kNeedless, "", kNothingOffloaded},
    {"zero_optimization.cpu_offload", kFlag, kOnly, "", kNoOffload, "false"},
    {"zero_optimization.cpu_offload_param", kFlag, kOnly, "", kNoOffload, "false"},
    {"zero_optimization.cpu_offload_params", kFlag, kOnly, "", kNoOffload, "false"},
    {"zero_optimization.cpu_offload_use_pin_memory", kFlag, kNeedless, "", kNothingOffloaded},
    {"zero_optimization.zero_quantized_weights", kFlag, kOnly, "",
     "weights travel as they are computed with; precision.fp8 gathers them in 8 bits", "false"},
    {"zero_optimization.zero_quantized_nontrainable_weights", kFlag, kOnly, "", kNotHere, "false"},
    {"zero_optimization.zero_quantized_gradients", kFlag, kOnly, "",
     "remove it, and set parallel.comm_hook=int8 for gradients in 8 bits", "false"},
    {"zero_optimization.zeropp_loco_param.*", kAny, kNeedless, "", kOff},
    {"zero_optimization.zenflow.*", kAny, kRefused, "", kNotHere},
    {"zero_optimization.mics_shard_size", kWhole, kOnly, "",
     "remove it, and set parallel.policy=fsdp:hybrid_shard with parallel.dp_shard (ranks of a group) and "
     "parallel.dp_replicate (groups)",
     "-1"},
    {"zero_optimization.mics_hierarchical_params_gather", kFlag, kOnly, "", kNotHere, "false"},
    {"zero_optimization.pipeline_loading_checkpoint", kFlag, kNeedless, "", kCheckpoints},
    // activations
    {"activation_checkpointing.cpu_checkpointing", kFlag, kOnly, "",
     "activations cannot be offloaded to host memory; use memory.recompute", "false"},
    {"activation_checkpointing.partition_activations", kFlag, kNeedless, "", kRecomputed},
    {"activation_checkpointing.contiguous_memory_optimization", kFlag, kNeedless, "", kRecomputed},
    {"activation_checkpointing.number_checkpoints", kWhole, kNeedless, "", kRecomputed},
    {"activation_checkpointing.synchronize_checkpoint_boundary", kFlag, kNeedless, "", kRecomputed},
    {"activation_checkpointing.profile", kFlag, kNeedless, "", kRecomputed},
    // records
    {"steps_per_print", kWhole, kSets, "train.log_every"},
    {"wall_clock_breakdown", kFlag, kNeedless, "", kRecorded},
    {"memory_breakdown", kFlag, kNeedless, "", kMeasured},
    {"dump_state", kFlag, kNeedless, "",
     "config.yaml in the directory of a run has every value and its origin"},
    {"tensorboard.*", kAny, kNeedless, "", kRecorded},
    {"csv_monitor.*", kAny, kNeedless, "", kRecorded},
    {"wandb.enabled", kFlag, kOnly, "", "runs report to nobody; remove it and read metrics.jsonl", "false"},
    {"wandb.*", kAny, kNeedless, "", kRecorded},
    {"comet.enabled", kFlag, kOnly, "", "runs report to nobody; remove it and read metrics.jsonl", "false"},
    {"comet.*", kAny, kNeedless, "", kRecorded},
    {"flops_profiler.*", kAny, kNeedless, "", kMeasured},
    {"comms_logger.*", kAny, kNeedless, "", kMeasured},
    {"checkpoint.*", kAny, kNeedless, "", kCheckpoints},
    {"dataloader_drop_last", kFlag, kNeedless, "",
     "with train.epochs every sample of an epoch counts once, otherwise batches are always full"},
    {"aio.*", kAny, kNeedless, "", kNothingOffloaded},
    // features
    {"sequence_parallel_size", kWhole, kSets, "parallel.cp", "ranks that share each sequence"},
    {"tensor_parallel.autotp_size", kWhole, kTogether, "parallel.tp", "0 is off, as 1 is"},
    {"elasticity.enabled", kFlag, kOnly, "",
     "set the batch, and continue on another number of ranks with --resume", "false"},
    {"elasticity.*", kAny, kNeedless, "", kOff},
    {"autotuning.enabled", kFlag, kOnly, "", "trireme bench speed compares policies and micro-batches",
     "false"},
    {"autotuning.*", kAny, kNeedless, "", kOff},
    {"compile.*", kAny, kNeedless, "", "kernels are fused already, and nothing is compiled at run time"},
    {"curriculum_learning.enabled", kFlag, kOnly, "", kNotHere, "false"},
    {"curriculum_learning.*", kAny, kNeedless, "", kOff},
    {"data_efficiency.enabled", kFlag, kOnly, "", kNotHere, "false"},
    {"data_efficiency.*", kAny, kNeedless, "", kOff},
    {"progressive_layer_drop.enabled", kFlag, kOnly, "", kNotHere, "false"},
    {"progressive_layer_drop.*", kAny, kNeedless, "", kOff},
    {"eigenvalue.enabled", kFlag, kOnly, "", kNotHere, "false"},
    {"eigenvalue.*", kAny, kNeedless, "", kOff},
    {"hybrid_engine.enabled", kFlag, kOnly, "", kNotHere, "false"},
    {"hybrid_engine.*", kAny, kNeedless, "", kOff},
    {"quantize_training.*", kAny, kRefused, "", kNotHere},
    {"compression_training.*", kAny, kRefused, "", kNotHere},
    {"sparse_attention.*", kAny, kRefused, "", kNotHere},
};

}  // namespace

std::span<const DeepSpeedKey> deepspeed_keys() {
  return kKeys;
}

const DeepSpeedKey* find_deepspeed_key(std::string_view key) {
  const auto exact = std::ranges::find(kKeys, key, &DeepSpeedKey::key);
  if (exact != std::end(kKeys)) return exact;
  const auto below = std::ranges::find_if(kKeys, [key](const DeepSpeedKey& row) {
    return row.key.ends_with(".*") && key.starts_with(row.key.substr(0, row.key.size() - 1));
  });
  return below == std::end(kKeys) ? nullptr : below;
}

}  // namespace trireme::plan
