// Files with the values that public projects train with, and what they become: keys of ours, or a refusal.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/plan/deepspeed.h"

namespace trireme::plan {
namespace {

struct ProjectFile {
  const char* name;
  int64_t ranks;
  const char* ours;  ///< YAML of ours beside it
  const char* json;
  std::map<std::string, std::string> becomes = {};  ///< our keys
  std::vector<std::string> refused_with = {};       ///< empty: it is accepted
};

constexpr const char* kLong = "train: {steps: 100000}";

const std::vector<ProjectFile>& project_files() {
  static const std::vector<ProjectFile> files = {
      {"cifar10, fp16 and a logarithmic warm-up",
       2,
       kLong,
       R"({
        "train_batch_size": 16, "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
        "gradient_clipping": 1.0, "prescale_gradients": false,
        "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
                 "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
        "wall_clock_breakdown": false,
        "zero_optimization": {"stage": 0, "allgather_partitions": true, "reduce_scatter": true,
          "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": true,
          "contiguous_gradients": true, "cpu_offload": false}})",
       {{"train.global_batch", "16"},
        {"train.log_every", "2000"},
        {"optim.name", "adamw"},
        {"optim.beta1", "0.8"},
        {"optim.weight_decay", "3e-07"},
        {"optim.schedule", "constant"},
        {"optim.warmup_steps", "1000"},
        {"precision.compute", "fp16"},
        {"precision.initial_scale", "32768"},
        {"precision.scale_window", "500"},
        {"parallel.policy", "ddp"},
        {"parallel.overlap", "true"}}},
      {"cifar10, the first tutorial",
       1,
       kLong,
       R"({
        "train_batch_size": 4, "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
        "wall_clock_breakdown": false})",
       {{"train.global_batch", "4"},
        {"train.micro_batch", "0"},
        {"optim.lr", "0.001"},
        {"train.grad_clip", "1"}}},
      {"BERT large, sequences of 128, Lamb",
       64,
       kLong,
       R"({
        "train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "steps_per_print": 100,
        "prescale_gradients": false,
        "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": false,
          "max_coeff": 0.3, "min_coeff": 0.01}},
        "gradient_clipping": 1.0, "wall_clock_breakdown": false, "fp16": {"enabled": true, "loss_scale": 0}})",
       {},
       {"optimizer.type = Lamb", "AdamW"}},
      {"BERT, 1-bit Adam",
       8,
       kLong,
       R"({
        "train_batch_size": 4096, "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "weight_decay": 0.01}},
        "gradient_clipping": 1.0, "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}})",
       {},
       {"optimizer.type = OneBitAdam", "AdamW"}},
      {"BERT base, without bias correction",
       4,
       kLong,
       R"({
        "train_batch_size": 4096, "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": false}},
        "gradient_clipping": 1.0, "fp16": {"enabled": true, "loss_scale": 0}})",
       {},
       {"bias_correction = false", "remove it"}},
      {"SQuAD",
       4,
       "",
       R"({
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": true}},
        "gradient_clipping": 1.0, "fp16": {"enabled": true}})",
       {{"train.global_batch", "24"},
        {"train.micro_batch", "3"},
        {"optim.weight_decay", "0"},
        {"optim.lr", "3e-05"}}},
      {"Megatron GPT-2, ZeRO-1",
       16,
       "",
       R"({
        "train_batch_size": 512, "gradient_accumulation_steps": 1, "steps_per_print": 1,
        "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "max_grad_norm": 1.0}},
        "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "activation_checkpointing": {"partition_activations": false, "contiguous_memory_optimization": false}})",
       {{"train.micro_batch", "32"},
        {"parallel.policy", "zero1"},
        {"train.grad_clip", "1"},
        {"optim.lr", "0.00015"}}},
      {"Megatron GPT-2, ZeRO-2 with partitioned activations",
       8,
       "",
       R"({
        "train_batch_size": 128, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "contiguous_gradients": true, "overlap_comm": true, "reduce_scatter": true,
          "reduce_bucket_size": 50000000, "allgather_bucket_size": 5e8},
        "gradient_clipping": 1.0, "fp16": {"enabled": true, "loss_scale": 0},
        "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false,
          "contiguous_memory_optimization": true, "number_checkpoints": 4, "synchronize_checkpoint_boundary": false,
          "profile": false}})",
       {{"parallel.policy", "zero2"}, {"train.global_batch", "128"}, {"train.micro_batch", "8"}}},
      {"Megatron GPT, the same on too few ranks",
       4,
       "",
       R"({
        "train_batch_size": 128, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2})",
       {},
       {"train_batch_size = 128", "4 data-parallel ranks"}},
      {"Megatron GPT, activations on the host",
       8,
       "",
       R"({
        "train_batch_size": 128, "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true}})",
       {},
       {"activation_checkpointing.cpu_checkpointing = true", "memory.recompute"}},
      {"Megatron GPT 350M in bf16",
       8,
       "",
       R"({
        "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
        "zero_optimization": {"stage": 0}, "gradient_clipping": 1.0, "prescale_gradients": true,
        "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "wall_clock_breakdown": false})",
       {{"precision.compute", "bf16"}, {"precision.accumulate", "fp32"}, {"parallel.policy", "ddp"}}},
      {"transformers, ZeRO-2, everything auto",
       2,
       "",
       R"({
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
          "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false})",
       {{"parallel.policy", "zero2"},
        {"optim.lr", "0.0003"},
        {"optim.beta2", "0.95"},
        {"optim.weight_decay", "0.1"},
        {"train.grad_clip", "1"},
        {"precision.compute", "fp32"},
        {"optim.schedule", "constant"}}},
      {"transformers, ZeRO-3 with offload",
       2,
       "",
       R"({
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
          "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
          "sub_group_size": 1e9, "reduce_bucket_size": "auto"}})",
       {},
       {"zero_optimization.offload_optimizer.device = cpu", "offload"}},
      {"transformers, ZeRO-3 without offload",
       4,
       "train: {micro_batch: 2}",
       R"({
        "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
          "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": true},
          "offload_param": {"device": "none", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
          "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
          "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto"})",
       {{"parallel.policy", "zero3"},
        {"precision.compute", "bf16"},
        {"optim.schedule", "linear"},
        {"checkpoint.final_weights", "true"},
        {"train.micro_batch", "2"}}},
      {"transformers, state on NVMe",
       2,
       "",
       R"({
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme",
          "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}},
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false, "overlap_events": true}})",
       {},
       {"zero_optimization.offload_param.device = nvme"}},
      {"a chat model's fine-tuning, ZeRO-2 in bf16",
       8,
       "",
       R"({
        "bf16": {"enabled": true}, "fp16": {"enabled": false},
        "zero_optimization": {"stage": 2, "overlap_comm": true, "contiguous_gradients": true,
          "sub_group_size": 1e9, "reduce_bucket_size": "auto", "round_robin_gradients": true},
        "gradient_accumulation_steps": 8, "gradient_clipping": 1.0, "steps_per_print": 100,
        "train_micro_batch_size_per_gpu": 2})",
       {{"precision.compute", "bf16"}, {"train.rank_batch", "16"}, {"train.micro_batch", "2"}}},
      {"a chat model's training, ZeRO++",
       8,
       "",
       R"({
        "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4,
          "zero_quantized_weights": false, "zero_quantized_gradients": false, "contiguous_gradients": true},
        "train_micro_batch_size_per_gpu": 4})",
       {{"parallel.policy", "zero3"}, {"parallel.reshard_after_forward", "4"}, {"train.rank_batch", "4"}}},
      {"ZeRO++ with quantized weights",
       8,
       "",
       R"({"zero_optimization": {"stage": 3, "zero_quantized_weights": true}})",
       {},
       {"zero_quantized_weights = true", "precision.fp8"}},
      {"MiCS",
       8,
       "",
       R"({"zero_optimization": {"stage": 3, "mics_shard_size": 4}})",
       {},
       {"mics_shard_size = 4", "fsdp:hybrid_shard"}},
      {"GPT-NeoX 20B",
       96,
       "train: {steps: 150000}",
       R"({
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 1, "allgather_partitions": true, "allgather_bucket_size": 1260000000,
          "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 1260000000, "contiguous_gradients": true},
        "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 12,
          "hysteresis": 2, "min_loss_scale": 1},
        "gradient_clipping": 1.0, "steps_per_print": 2, "wall_clock_breakdown": false})",
       {{"train.rank_batch", "128"},
        {"optim.lr", "9.7e-05"},
        {"precision.initial_scale", "4096"},
        {"parallel.policy", "zero1"}}},
      {"a pipeline of AlexNet",
       4,
       "parallel: {pp: 2}",
       R"({
        "train_batch_size": 256, "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
        "steps_per_print": 10, "wall_clock_breakdown": false})",
       {{"train.global_batch", "256"}, {"train.micro_batch", "8"}, {"optim.weight_decay", "0"}}},
      {"a vision model with SGD",
       8,
       "train: {steps: 90000}",
       R"({
        "train_batch_size": 1024, "optimizer": {"type": "SGD", "params": {"lr": 0.4, "momentum": 0.9, "weight_decay": 1e-4}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 90000, "warmup_num_steps": 5000,
          "warmup_min_ratio": 0.0, "cos_min_ratio": 0.001, "warmup_type": "linear"}},
        "communication_data_type": "fp16", "tensorboard": {"enabled": true, "output_path": "logs", "job_name": "r50"}})",
       {{"optim.name", "sgd"},
        {"optim.momentum", "0.9"},
        {"train.steps", "90000"},
        {"optim.min_lr", "0.0004"},
        {"optim.warmup_steps", "5000"},
        {"parallel.comm_hook", "fp16"}}},
      {"elastic training",
       4,
       "",
       R"({
        "elasticity": {"enabled": true, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1}})",
       {},
       {"elasticity.enabled = true", "--resume"}},
      {"curriculum learning",
       4,
       "",
       R"({
        "train_batch_size": 64, "curriculum_learning": {"enabled": true, "curriculum_type": "seqlen",
          "min_difficulty": 8, "max_difficulty": 1024, "schedule_type": "fixed_linear"}})",
       {},
       {"curriculum_learning.enabled = true"}},
      {"profilers and monitors",
       2,
       "",
       R"({
        "train_batch_size": 8,
        "flops_profiler": {"enabled": true, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": true},
        "comms_logger": {"enabled": true, "verbose": false, "prof_all": true, "debug": false},
        "csv_monitor": {"enabled": true, "output_path": "out", "job_name": "x"}, "wandb": {"enabled": false, "team": "t"}})",
       {{"train.global_batch", "8"}}},
  };
  return files;
}

std::string text_in(Config config, const std::string& key) {
  for (const Field& field : fields(config)) {
    if (field.key == key)
      return std::visit([](const auto& value) { return fmt::format("{}", value); }, value_of(field));
  }
  return "no such key";
}

TEST(DeepSpeedFiles, BecomeWhatTheirProjectsMean) {
  EXPECT_GE(project_files().size(), 20U);
  for (const ProjectFile& file : project_files()) {
    SCOPED_TRACE(file.name);
    const auto resolve = [&] {
      const auto ranks = [&](const Config&) -> std::optional<int64_t> { return file.ranks; };
      return load({.text = file.ours}, {.path = "ds.json", .text = file.json, .ranks = ranks}, Environment())
          .config;
    };
    if (!file.refused_with.empty()) {
      test::expect_refusal(resolve, file.refused_with);
      continue;
    }
    const Config config = resolve();
    for (const auto& [key, value] : file.becomes) EXPECT_EQ(text_in(config, key), value) << key;
  }
}

}  // namespace
}  // namespace trireme::plan
