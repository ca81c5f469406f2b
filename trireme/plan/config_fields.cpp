// The table of all fields: the single place where a key, its help, choices and range are written down.
#include "trireme/plan/config.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/presets.h"

namespace trireme::plan {
namespace {

using Choices = std::vector<std::string>;

Field text(std::string key, std::string& value, std::string help, Choices choices = {}) {
  return {std::move(key), &value, std::move(help), std::move(choices), {}, {}};
}

/// `kParse` gives the value of a word, or none; name() or to_text() the word of a value.
template <auto kParse, typename Value>
WordRef word(Value& value) {
  return {&value,
          [](const void* member) {
            const Value& held = *static_cast<const Value*>(member);
            if constexpr (Choice<Value>)
              return std::string(name(held));
            else
              return to_text(held);
          },
          [](void* member, std::string_view text) {
            const std::optional<Value> parsed = kParse(text);
            if (parsed) *static_cast<Value*>(member) = *parsed;
            return parsed.has_value();
          }};
}

template <Choice Enum>
Field choice(std::string key, Enum& value, std::string help) {
  Choices choices(kNames<Enum>.begin(), kNames<Enum>.end());
  return {std::move(key), word<parse<Enum>>(value), std::move(help), std::move(choices), {}, {}};
}

Field reshard(std::string key, ReshardAfterForward& value, std::string help) {
  return {std::move(key),
          word<parse_reshard>(value),
          std::move(help),
          {},
          {},
          {},
          "auto, true, false or a number of ranks, up to 1000000"};
}

Field cut(std::string key, StageCut& value, std::string help) {
  return {std::move(key),
          word<parse_cut>(value),
          std::move(help),
          {},
          {},
          {},
          "cost, even or the number of blocks in each stage, each up to 10000, such as 3,3,2"};
}

Field skip(std::string key, Fp8Skip& value, std::string help) {
  return {std::move(key),
          word<parse_skip>(value),
          std::move(help),
          {},
          {},
          {},
          "none, or first, last and numbers of blocks from 0 on, such as first,last,7"};
}

Field flag(std::string key, bool& value, std::string help) {
  return {std::move(key), &value, std::move(help), {}, {}, {}};
}

/// The largest numbers are far beyond any machine: they keep sums and products of a few of them inside 64
/// bits, so that every whole number has one.
Field number(std::string key, int64_t& value, double min, std::string help, double max) {
  return {std::move(key), &value, std::move(help), {}, min, max};
}

Field number(std::string key, double& value, double min, std::string help, std::optional<double> max = {}) {
  return {std::move(key), &value, std::move(help), {}, min, max};
}

constexpr double kMostSteps = 1e12, kMostRanks = 1e6;
constexpr double kMostSeed = 1e18;  ///< steps x ranks may be added to it

Choices preset_choices() {
  Choices names = {""};
  for (const Preset& preset : presets()) names.push_back(preset.name);
  return names;
}

/// `names` and the labels of rows that are longer than their names.
Choices policy_choices(Choices names) {
  for (const Policy& row : policies()) {
    if (row.sharding != Sharding::kAuto) names.push_back(row.label());
  }
  return names;
}

using Table = std::vector<Field>;

void add_run(Table& table, Config& config) {
  table.push_back(text("name", config.name, "name of the run and of its directory"));
  table.push_back(
      number("seed", config.seed, 0, "seed of initial weights, data order and dropout", kMostSeed));
  table.push_back(choice("device", config.device, "where tensors live; auto: GPUs when there are any"));
}

void add_model(Table& table, ModelConfig& model) {
  table.push_back(
      text("model.preset", model.preset, "built-in model that fills the keys below", preset_choices()));
  table.push_back(choice("model.family", model.family, "architecture"));
  table.push_back(number("model.n_layers", model.n_layers, 1, "blocks", 1e4));
  table.push_back(number("model.d_model", model.d_model, 1, "width of the residual stream", 1e6));
  table.push_back(number("model.n_heads", model.n_heads, 1, "attention heads", 1e6));
  table.push_back(
      number("model.n_kv_heads", model.n_kv_heads, 0, "heads of keys and values; 0: n_heads", 1e6));
  table.push_back(number("model.d_ff", model.d_ff, 0, "width of the feed-forward; 0: 4 * d_model", 1e7));
  table.push_back(number("model.vocab_size", model.vocab_size, 1, "tokens", 1e8));
  table.push_back(number("model.max_seq_len", model.max_seq_len, 0,
                         "longest sequence, positions of gpt2's table; 0: data.seq_len", 1e8));
  table.push_back(flag("model.tie_embeddings", model.tie_embeddings, "the head is the embedding"));
  table.push_back(number("model.dropout", model.dropout, 0, "probability of a zero, gpt2 only; below 1", 1));
  table.push_back(number("model.norm_eps", model.norm_eps, 0, "added to the variance in norms"));
  table.push_back(number("model.rope_theta", model.rope_theta, 1, "base of llama's rotary frequencies"));
  table.push_back(choice("model.rope_scaling", model.rope_scaling,
                         "rotary frequencies for longer texts; llama3: as Llama 3.1, by the keys below"));
  table.push_back(number("model.rope_factor", model.rope_factor, 1,
                         "llama3: how many times longer the longest wavelengths become"));
  table.push_back(number("model.rope_low_freq_factor", model.rope_low_freq_factor, 1e-6,
                         "llama3: wavelengths above rope_original_len / this become longer"));
  table.push_back(number("model.rope_high_freq_factor", model.rope_high_freq_factor, 1e-6,
                         "llama3: wavelengths below rope_original_len / this stay"));
  table.push_back(number("model.rope_original_len", model.rope_original_len, 1,
                         "llama3: tokens a sequence of the first training", 1e8));
  table.push_back(text("model.weights", model.weights,
                       "what training begins with: a Hugging Face folder, a checkpoint or a safetensors "
                       "file; empty: random values of the seed"));
}

/// Sizes keep products of them inside 64 bits.
void add_vision(Table& table, VisionConfig& model) {
  table.push_back(
      number("model.depth", model.depth, 1, "resnet: layers, 18, 34, 50, 101, 152 or 6 n + 2", 1e4));
  table.push_back(number("model.width", model.width, 1,
                         "resnet: channels of the first stage, doubled by each later", 1e5));
  table.push_back(
      choice("model.stem", model.stem, "resnet: before the first block: 3x3, or 7x7 and max pooling"));
  table.push_back(
      choice("model.norm", model.norm,
             "resnet: norms over a rank's micro-batch, over all ranks' or over groups of channels"));
  table.push_back(
      number("model.norm_groups", model.norm_groups, 1, "resnet with group norms: groups of channels", 1e5));
  table.push_back(number("model.channels", model.channels, 1, "of an image", 1e3));
  table.push_back(number("model.image_size", model.image_size, 1, "height and width of an image", 1e4));
  table.push_back(number("model.classes", model.classes, 1, "labels of images", 1e7));
  table.push_back(number("model.label_smoothing", model.label_smoothing, 0,
                         "share of an image's target that all classes divide among them; below 1", 1));
  table.push_back(
      flag("model.channels_last", model.channels_last, "activations of images with channels last in memory"));
}

void add_data(Table& table, DataConfig& data) {
  table.push_back(choice("data.kind", data.kind, "what is read; auto: what the model reads"));
  table.push_back(text("data.path", data.path,
                       "text file, or folder of text or images; builtin: the C++ headers of libtorch, or "
                       "digits drawn from this system's fonts"));
  table.push_back(choice("data.tokenizer", data.tokenizer, "how text becomes tokens"));
  table.push_back(number("data.seq_len", data.seq_len, 1, "tokens a sequence", 1e8));
  table.push_back(
      number("data.val_fraction", data.val_fraction, 0,
             "part kept for validation: of the text, or of each class of images in folders without "
             "a split of their own",
             0.5));
  table.push_back(number("data.pad", data.pad, 0,
                         "images: black pixels at each side, out of which a random crop is taken", 1e3));
  table.push_back(flag("data.flip", data.flip, "images: mirror every second one"));
  table.push_back(flag("data.resized_crop", data.resized_crop,
                       "images: train on a random part of each, resized to model.image_size"));
  table.push_back(number("data.least_area", data.least_area, 1e-3,
                         "images: smallest part of an image that a resized crop shows", 1));
  table.push_back(number("data.mixup", data.mixup, 0,
                         "images: alpha of mixtures of two of them and their labels; 0: none", 1));
  table.push_back(number("data.threads", data.threads, 0,
                         "images: threads of a rank that prepare them; 0: its share of the cores, at most 8",
                         1e3));
}

void add_train(Table& table, TrainConfig& train) {
  table.push_back(number("train.steps", train.steps, 1, "optimizer steps, unless train.epochs says", 1e12));
  table.push_back(number("train.epochs", train.epochs, 0,
                         "passes over the training data; 0: train.steps says how long", 1e9));
  table.push_back(
      number("train.global_batch", train.global_batch, 1, "sequences or images a step over all ranks", 1e9));
  table.push_back(
      number("train.rank_batch", train.rank_batch, 0,
             "sequences or images a step on each data-parallel rank; replaces global_batch unless 0", 1e9));
  table.push_back(number(
      "train.micro_batch", train.micro_batch, 0,
      "sequences or images in one forward pass of a rank; 0: global_batch / data-parallel ranks", 1e9));
  table.push_back(
      number("train.grad_clip", train.grad_clip, 0, "largest global L2 norm of gradients; 0: no clipping"));
  table.push_back(number("train.val_every", train.val_every, 0,
                         "steps between validations; 0: at the end, and with train.epochs after each",
                         kMostSteps));
  table.push_back(
      number("train.profile_steps", train.profile_steps, 0,
             "steps that rank 0 traces (traces/ of the run directory), from step 11 on at the earliest; of a "
             "pipeline all ranks record the step before",
             kMostSteps));
  table.push_back(number("train.val_batches", train.val_batches, 0,
                         "global batches a validation; 0: no validation", 1e9));
  table.push_back(number("train.log_every", train.log_every, 1, "steps between progress lines", kMostSteps));
  table.push_back(
      number("train.sample_tokens", train.sample_tokens, 0, "tokens generated at the end; 0: none", 1e8));
  table.push_back(text("train.sample_prompt", train.sample_prompt, "what the generated text continues"));
  table.push_back(
      choice("train.cuda_graphs", train.cuda_graphs,
             "on GPUs: record forward and backward once and launch them as one piece; auto: where "
             "the GPU waits for its host"));
  table.push_back(flag("train.tune_matmul", train.tune_matmul,
                       "on a GPU: try algorithms for matrix products, keep the fastest with the same bits, "
                       "and for convolutions the fastest"));
  table.push_back(
      flag("train.deterministic", train.deterministic,
           "equal runs end with equal weights on GPUs, too, at the price of slower attention backward"));
}

void add_optim(Table& table, OptimConfig& optim) {
  table.push_back(choice("optim.name", optim.name, "optimizer"));
  table.push_back(choice("optim.state", optim.state,
                         "moments and momentum from step to step: 4, 2 or 1.125 bytes a number, rounded at "
                         "random below 4"));
  table.push_back(number("optim.lr", optim.lr, 0, "peak learning rate"));
  table.push_back(number("optim.min_lr", optim.min_lr, 0, "learning rate at the end of cosine and linear"));
  table.push_back(number("optim.warmup_steps", optim.warmup_steps, 0,
                         "steps from 0 to the peak learning rate", kMostSteps));
  table.push_back(choice("optim.schedule", optim.schedule, "learning rate after warm-up"));
  table.push_back(number("optim.step_every", optim.step_every, 0,
                         "steps: so many steps between drops of the rate; 0: a third of those after warm-up",
                         kMostSteps));
  table.push_back(
      number("optim.step_factor", optim.step_factor, 0, "steps: what a drop multiplies the rate by", 1));
  table.push_back(number("optim.beta1", optim.beta1, 0, "adamw: decay of the first moment; below 1", 1));
  table.push_back(number("optim.beta2", optim.beta2, 0, "adamw: decay of the second moment; below 1", 1));
  table.push_back(number("optim.eps", optim.eps, 0, "adamw: added to the root of the second moment"));
  table.push_back(number("optim.momentum", optim.momentum, 0, "sgd: decay of the velocity; below 1", 1));
  table.push_back(flag("optim.nesterov", optim.nesterov, "sgd: momentum as Nesterov has it"));
  table.push_back(
      number("optim.ema", optim.ema, 0,
             "decay of an average of the parameters, with which validation is done; 0: none; below 1", 1));
  table.push_back(number("optim.weight_decay", optim.weight_decay, 0,
                         "decoupled decay of parameters of two or more dimensions"));
}

void add_parallel(Table& table, ParallelConfig& parallel) {
  Field policy =
      choice("parallel.policy", parallel.policy,
             "what data parallelism shards; a label such as fsdp:no_shard also sets parallel.sharding");
  policy.choices = policy_choices(std::move(policy.choices));
  table.push_back(std::move(policy));
  table.push_back(choice("parallel.sharding", parallel.sharding, "fsdp: which of its rows"));
  table.push_back(
      reshard("parallel.reshard_after_forward", parallel.reshard_after_forward,
              "whether parameters are freed between forward and backward, or over how many ranks they stay "
              "sharded"));
  table.push_back(choice("parallel.reduce_when", parallel.reduce_when,
                         "reduce gradients once a step, or after every micro-batch to hold less of them"));
  table.push_back(flag("parallel.overlap", parallel.overlap, "communicate beside computation (GPU)"));
  table.push_back(number("parallel.prefetch", parallel.prefetch, 0, "units that are gathered ahead", 1e4));
  table.push_back(number("parallel.bucket_mib", parallel.bucket_mib, 0,
                         "size of reduction buckets where parameters stay whole; 0: one a block", 1e6));
  table.push_back(
      choice("parallel.comm_hook", parallel.comm_hook, "how gradients travel smaller than they are"));
  table.push_back(number("parallel.hook_rank", parallel.hook_rank, 1, "powersgd: rank of the factors", 1e6));
  table.push_back(
      number("parallel.hook_density", parallel.hook_density, 1e-6, "topk: share that travels", 1));
  table.push_back(number("parallel.hook_start", parallel.hook_start, 0, "powersgd, topk: plain steps before",
                         kMostSteps));
  table.push_back(number("parallel.local_steps", parallel.local_steps, 1, "local_sgd: steps between averages",
                         kMostSteps));
  table.push_back(
      number("parallel.dp_replicate", parallel.dp_replicate, 1, "copies of the sharded model", kMostRanks));
  table.push_back(
      number("parallel.dp_shard", parallel.dp_shard, 0, "ranks a model is sharded over; 0: all", kMostRanks));
  table.push_back(
      number("parallel.tp", parallel.tp, 1, "tensor-parallel ranks; only 1 works yet", kMostRanks));
  table.push_back(number("parallel.pp", parallel.pp, 1,
                         "ranks of a pipeline, which the layers are shared among", kMostRanks));
  table.push_back(
      number("parallel.cp", parallel.cp, 1, "context-parallel ranks; only 1 works yet", kMostRanks));
}

void add_pipeline(Table& table, PipelineConfig& pipeline) {
  table.push_back(choice("pipeline.schedule", pipeline.schedule,
                         "with parallel.pp: the order in which its ranks run their passes"));
  table.push_back(text("pipeline.file", pipeline.file,
                       "a schedule of your own instead: CSV, as trireme pipeline show --csv writes it"));
  table.push_back(
      choice("pipeline.placement", pipeline.placement, "of pipeline.file: which rank has which stage"));
  table.push_back(number("pipeline.micro_batches", pipeline.micro_batches, 0,
                         "micro-batches of a step; 0: as train.micro_batch says, or about 4 a rank", 1e6));
  table.push_back(number("pipeline.chunks", pipeline.chunks, 1,
                         "stages a rank, of interleaved_1f1b, interleaved_zb and looped_bfs", 1e4));
  table.push_back(cut("pipeline.split", pipeline.split,
                      "where the model is cut: by cost, evenly, or so many blocks each"));
  table.push_back(number("pipeline.ahead", pipeline.ahead, 0,
                         "receive buffers of a stage beyond those that the schedule needs", 1e6));
  table.push_back(flag("pipeline.spread_head", pipeline.spread_head,
                       "every rank computes a share of the vocabulary, and not the last stage all of it"));
}

void add_precision(Table& table, PrecisionConfig& precision) {
  table.push_back(choice("precision.compute", precision.compute, "dtype of parameters and activations"));
  table.push_back(choice("precision.reduce", precision.reduce,
                         "dtype of gradients on the wire; auto: as compute, fp32 for fp16"));
  table.push_back(choice("precision.accumulate", precision.accumulate,
                         "dtype in which gradients of micro-batches are added up: fp32, or as compute"));
  table.push_back(choice("precision.scaling", precision.scaling,
                         "scaling of the loss; auto: dynamic for fp16, else none"));
  LossScaleConfig& scale = precision.loss_scale;
  table.push_back(
      number("precision.initial_scale", scale.initial, 1.0, "dynamic scaling: the first scale", 0x1.0p24));
  table.push_back(number("precision.scale_window", scale.window, 1,
                         "dynamic scaling: finite steps before the scale doubles", kMostSteps));
  table.push_back(number("precision.scale_hysteresis", scale.hysteresis, 1,
                         "dynamic scaling: overflows before it is halved", kMostSteps));
  table.push_back(
      number("precision.min_scale", scale.minimum, 1e-6, "dynamic scaling: the scale never falls below"));
  Fp8Config& fp8 = precision.fp8;
  table.push_back(
      choice("precision.fp8", fp8.recipe, "multiply linear layers of blocks in FP8: what shares a scale"));
  table.push_back(choice("precision.fp8_scaling", fp8.scales,
                         "tensorwise: scales of activations and gradients from what is cast, or delayed: "
                         "from the steps before"));
  table.push_back(
      number("precision.fp8_history", fp8.history, 1, "delayed: steps that a scale looks back", 1024));
  table.push_back(choice("precision.fp8_gradients", fp8.gradients, "fp8: format of gradients of outputs"));
  table.push_back(choice("precision.fp8_fast", fp8.fast,
                         "fp8, but not blockwise: products summed faster with fewer bits"));
  table.push_back(skip("precision.fp8_skip", fp8.skip, "fp8: blocks that are multiplied in bf16"));
  table.push_back(flag("precision.fp8_head", fp8.head, "fp8: the head as well, with e5m2 gradients"));
  table.push_back(
      flag("precision.fp8_gather", fp8.gather,
           "tensorwise: sharded matrices are gathered and kept in FP8; the same bits, fewer bytes"));
  table.push_back(choice("precision.fp8_fallback", fp8.fallback,
                         "where device or shapes have no FP8: end, go on in bf16, or emulate it (CPU)"));
}

void add_memory(Table& table, MemoryConfig& memory) {
  table.push_back(choice(
      "memory.recompute", memory.recompute,
      "what backward computes again instead of keeping it: cheap is norms and activations, auto is that "
      "on GPUs where it costs less than 1%"));
  table.push_back(
      number("memory.recompute_every", memory.recompute_every, 1, "recompute in one of so many blocks", 1e4));
  table.push_back(number("memory.loss_chunk_mib", memory.loss_chunk_mib, 1,
                         "on a GPU logits exist in parts of at most this many MiB", 1e6));
}

void add_checkpoint(Table& table, CheckpointConfig& checkpoint) {
  table.push_back(flag("checkpoint.final_weights", checkpoint.final_weights,
                       "write the weights of the finished run as safetensors"));
  table.push_back(flag("checkpoint.best", checkpoint.best,
                       "keep the weights of the best validation: of the averages where optim.ema is set"));
  table.push_back(number("checkpoint.every", checkpoint.every, 0,
                         "steps between checkpoints that --resume goes on from; 0: none", kMostSteps));
  table.push_back(number("checkpoint.keep", checkpoint.keep, 0, "checkpoints that stay; 0: all", 1e9));
  table.push_back(
      flag("checkpoint.async", checkpoint.async, "training goes on while a checkpoint is written"));
}

void add_comm(Table& table, CommConfig& comm) {
  table.push_back(number("comm.timeout_s", comm.timeout_s, 0.001,
                         "deadline of every wait, in seconds; at most a day", 86400.0));
  table.push_back(flag("comm.peer_memory", comm.peer_memory,
                       "ranks of one host read each other's memory instead of sending messages"));
  table.push_back(choice("comm.gather", comm.gather,
                         "what gathers over peer memory of GPUs: our kernels, or copy engines"));
  table.push_back(choice("comm.reduction", comm.reduction,
                         "who sums gradients: our fixed order in fp32, or the backend in its own"));
}

}  // namespace

std::vector<Field> fields(Config& config) {
  Table table;
  add_run(table, config);
  add_model(table, config.model);
  add_vision(table, config.model.vision);
  add_data(table, config.data);
  add_train(table, config.train);
  add_optim(table, config.optim);
  add_parallel(table, config.parallel);
  add_pipeline(table, config.pipeline);
  add_precision(table, config.precision);
  add_memory(table, config.memory);
  add_checkpoint(table, config.checkpoint);
  add_comm(table, config.comm);
  return table;
}

}  // namespace trireme::plan
