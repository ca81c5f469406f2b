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
          "auto, true, false, or a number of ranks up to 1000000"};
}

Field cut(std::string key, StageCut& value, std::string help) {
  return {std::move(key),
          word<parse_cut>(value),
          std::move(help),
          {},
          {},
          {},
          "cost, even, or the number of blocks of each stage (up to 10000), such as 3,3,2"};
}

Field skip(std::string key, Fp8Skip& value, std::string help) {
  return {std::move(key),
          word<parse_skip>(value),
          std::move(help),
          {},
          {},
          {},
          "none, or a list of first, last and block numbers from 0, such as first,last,7"};
}

Field mixture(std::string key, Mixture& value, std::string help) {
  return {std::move(key),
          word<parse_mixture>(value),
          std::move(help),
          {},
          {},
          {},
          "{NAME: {path: TEXT, weight: NUMBER}, ...}",
          /*is_mapping=*/true};
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
  table.push_back(text("name", config.name, "name of the run and its directory"));
  table.push_back(
      number("seed", config.seed, 0, "seed of the initial weights, the data order and dropout", kMostSeed));
  table.push_back(choice("device", config.device, "where to train; auto: on GPUs if there are any"));
}

void add_model(Table& table, ModelConfig& model) {
  table.push_back(
      text("model.preset", model.preset, "built-in model that sets the keys below", preset_choices()));
  table.push_back(choice("model.family", model.family, "architecture"));
  table.push_back(number("model.n_layers", model.n_layers, 1, "blocks", 1e4));
  table.push_back(number("model.d_model", model.d_model, 1, "width of the residual stream", 1e6));
  table.push_back(number("model.n_heads", model.n_heads, 1, "attention heads", 1e6));
  table.push_back(number("model.n_kv_heads", model.n_kv_heads, 0, "key and value heads; 0: n_heads", 1e6));
  table.push_back(
      number("model.head_dim", model.head_dim, 0, "width of an attention head; 0: d_model / n_heads", 1e5));
  table.push_back(
      number("model.d_ff", model.d_ff, 0, "width of the feed-forward layer; 0: 4 * d_model", 1e7));
  table.push_back(number("model.vocab_size", model.vocab_size, 1, "tokens", 1e8));
  table.push_back(number("model.max_seq_len", model.max_seq_len, 0,
                         "longest sequence, which sizes gpt2's position table; 0: data.seq_len", 1e8));
  table.push_back(
      flag("model.tie_embeddings", model.tie_embeddings, "the head shares the weights of the embedding"));
  table.push_back(number("model.dropout", model.dropout, 0, "dropout probability (gpt2 only); below 1", 1));
  table.push_back(choice("model.attention", model.attention,
                         "how attention is computed; auto: the fastest kernels that fit; eager: products and "
                         "a softmax that keep every score, to compare with"));
  table.push_back(number("model.norm_eps", model.norm_eps, 0, "epsilon added to the variance in norms"));
  table.push_back(number("model.rope_theta", model.rope_theta, 1, "llama: base of the rotary frequencies"));
  table.push_back(choice("model.rope_scaling", model.rope_scaling,
                         "llama: scaling of rotary frequencies for longer contexts; llama3: as in Llama 3.1, "
                         "set by the keys below"));
  table.push_back(number("model.rope_factor", model.rope_factor, 1,
                         "llama3: factor by which the longest wavelengths grow"));
  table.push_back(number("model.rope_low_freq_factor", model.rope_low_freq_factor, 1e-6,
                         "llama3: wavelengths above rope_original_len / this are scaled"));
  table.push_back(number("model.rope_high_freq_factor", model.rope_high_freq_factor, 1e-6,
                         "llama3: wavelengths below rope_original_len / this are unchanged"));
  table.push_back(number("model.rope_original_len", model.rope_original_len, 1,
                         "llama3: sequence length of the original pretraining, in tokens", 1e8));
  table.push_back(text("model.weights", model.weights,
                       "initial weights: a run, a Hugging Face folder, a checkpoint or a safetensors file; "
                       "empty: random values from the seed"));
}

void add_adapter(Table& table, AdapterConfig& adapter) {
  table.push_back(
      choice("adapter.kind", adapter.kind,
             "train low-rank adapters and leave the model's weights as they are; dora: also the length "
             "of each row of the weights that they make"));
  table.push_back(number("adapter.rank", adapter.rank, 1, "rank of an adapter's two matrices", 1e5));
  table.push_back(
      number("adapter.alpha", adapter.alpha, 1e-6, "an adapter's output is multiplied by alpha / rank"));
  table.push_back(
      text("adapter.targets", adapter.targets,
           "linear layers of blocks that get an adapter: all, or names separated by commas, such as "
           "q_proj,v_proj (llama) or c_attn (gpt2)"));
  table.push_back(number("adapter.dropout", adapter.dropout, 0,
                         "dropout probability of the input of adapters, in training; below 1", 1));
  table.push_back(
      text("adapter.weights", adapter.weights,
           "adapters that training begins with: a folder of PEFT; empty: new ones, which change nothing "
           "at first"));
  table.push_back(choice("adapter.base", adapter.base,
                         "how the matrices of blocks under adapters are held: as precision.compute says, or "
                         "in 4 bits and a scale every 64 elements"));
}

/// Sizes keep products of them inside 64 bits.
void add_vision(Table& table, VisionConfig& model) {
  table.push_back(number("model.depth", model.depth, 1,
                         "resnet: number of layers: 18, 34, 50, 101, 152 or 6 n + 2", 1e4));
  table.push_back(number("model.width", model.width, 1,
                         "resnet: channels of the first stage, doubled in each later one", 1e5));
  table.push_back(
      choice("model.stem", model.stem,
             "resnet: layers before the first block: a 3x3 convolution, or a 7x7 one and max pooling"));
  table.push_back(
      choice("model.norm", model.norm,
             "resnet: batch norm over a rank's micro-batch, over those of all ranks, or group norm"));
  table.push_back(number("model.norm_groups", model.norm_groups, 1,
                         "resnet with group norm: number of channel groups", 1e5));
  table.push_back(number("model.channels", model.channels, 1, "channels of an image", 1e3));
  table.push_back(number("model.image_size", model.image_size, 1, "height and width of an image", 1e4));
  table.push_back(number("model.classes", model.classes, 1, "number of image classes", 1e7));
  table.push_back(number("model.label_smoothing", model.label_smoothing, 0,
                         "share of an image's target that is spread evenly over all classes; below 1", 1));
  table.push_back(flag("model.channels_last", model.channels_last,
                       "keep image activations in the channels-last memory format"));
}

void add_data(Table& table, DataConfig& data) {
  table.push_back(choice("data.kind", data.kind, "kind of training data; auto: what the model reads"));
  table.push_back(text(
      "data.path", data.path,
      "text file, JSON Lines (FILE.jsonl#FIELD), or folder of text or images; builtin: the C++ headers of "
      "libtorch, or digits drawn from this system's fonts; program: what a program of yours has"));
  table.push_back(
      mixture("data.mixture", data.mixture,
              "several texts in place of data.path, each with a share of the samples by its weight"));
  table.push_back(text("data.tokenizer", data.tokenizer,
                       "byte, or how text is turned into tokens otherwise: a tokenizer.json, a SentencePiece "
                       ".model, a published .tiktoken, or a folder with tokenizer.json, tokenizer.model, or "
                       "both vocab.json and merges.txt"));
  table.push_back(
      choice("data.format", data.format,
             "text; answers: JSON Lines with a prompt and an answer each; chat: with conversations, "
             "which a chat template writes"));
  table.push_back(choice("data.loss_on", data.loss_on,
                         "data.format=answers and chat: learn the answers alone, or prompts as well"));
  table.push_back(
      text("data.chat_template", data.chat_template,
           "data.format=chat: file with a Jinja chat template; empty: the one beside data.tokenizer"));
  table.push_back(number("data.seq_len", data.seq_len, 1, "tokens per sequence", 1e8));
  table.push_back(flag("data.reset_attention", data.reset_attention,
                       "keep documents in a sequence apart: attention stays within each, and positions begin "
                       "at 0 in it"));
  table.push_back(number("data.val_fraction", data.val_fraction, 0,
                         "fraction held out for validation: of the text, or of each image class in folders "
                         "without their own split",
                         0.5));
  table.push_back(number("data.pad", data.pad, 0,
                         "images: black pixels added on each side before a random crop is taken", 1e3));
  table.push_back(flag("data.flip", data.flip, "images: mirror them with probability 1/2"));
  table.push_back(flag("data.resized_crop", data.resized_crop,
                       "images: train on a random part of each, resized to model.image_size"));
  table.push_back(number("data.least_area", data.least_area, 1e-3,
                         "images: smallest fraction of the area that a resized crop shows", 1));
  table.push_back(number("data.mixup", data.mixup, 0,
                         "images: alpha of mixup, which blends two images and their labels; 0: none", 1));
  table.push_back(number("data.threads", data.threads, 0,
                         "images: loader threads per rank; 0: its share of the cores, at most 8", 1e3));
}

void add_train(Table& table, TrainConfig& train) {
  table.push_back(number("train.steps", train.steps, 1, "optimizer steps, unless train.epochs is set", 1e12));
  table.push_back(
      number("train.epochs", train.epochs, 0, "passes over the training data; 0: run for train.steps", 1e9));
  table.push_back(number("train.global_batch", train.global_batch, 1,
                         "sequences or images per step over all ranks", 1e9));
  table.push_back(
      number("train.rank_batch", train.rank_batch, 0,
             "sequences or images per step on each data-parallel rank; replaces global_batch unless 0", 1e9));
  table.push_back(number("train.micro_batch", train.micro_batch, 0,
                         "sequences or images per forward pass of a rank; 0: global_batch / data-parallel "
                         "ranks, with parallel.pp "
                         "divided by pipeline.micro_batches or into about 4 micro-batches per rank",
                         1e9));
  table.push_back(number("train.grad_clip", train.grad_clip, 0,
                         "global L2 norm to which gradients are clipped; 0: no clipping"));
  table.push_back(number("train.val_every", train.val_every, 0,
                         "steps between validations; 0: at the end, and with train.epochs after every epoch",
                         kMostSteps));
  table.push_back(number("train.profile_steps", train.profile_steps, 0,
                         "steps to profile on rank 0 (in traces/ of the run directory), from step 11 at the "
                         "earliest; in a pipeline all ranks record the step before",
                         kMostSteps));
  table.push_back(number("train.val_batches", train.val_batches, 0,
                         "global batches per validation; 0: no validation", 1e9));
  table.push_back(
      number("train.early_stop", train.early_stop, 0,
             "validations in a row without a better loss, or train.monitor, after which the run ends; 0: "
             "it does not",
             kMostSteps));
  table.push_back(number("train.early_stop_min_delta", train.early_stop_min_delta, 0,
                         "train.early_stop: by how much it must be better than the last one that counted"));
  table.push_back(text("train.monitor", train.monitor,
                       "what train.early_stop and checkpoint.best compare: loss, top1, top5, loss/NAME of a "
                       "source of data.mixture, or a metric of your program; empty: loss, and top1 for "
                       "checkpoint.best of images"));
  table.push_back(
      number("train.fast_dev_run", train.fast_dev_run, 0,
             "try the whole way in so many steps: training, validation, saving, resuming, sampling; "
             "0: a real run",
             1000));
  table.push_back(number("train.log_every", train.log_every, 1, "steps between progress lines", kMostSteps));
  table.push_back(
      number("train.sample_tokens", train.sample_tokens, 0, "tokens generated at the end; 0: none", 1e8));
  table.push_back(text("train.sample_prompt", train.sample_prompt, "prompt for the generated text"));
  table.push_back(choice("train.cuda_graphs", train.cuda_graphs,
                         "on GPUs: record forward and backward once and replay them as CUDA graphs; auto: "
                         "where the GPU waits for the host"));
  table.push_back(
      text("train.step_program", train.step_program,
           "your own order of a step instead, in the form of trireme plan step --text --all-ranks"));
  table.push_back(flag("train.tune_matmul", train.tune_matmul,
                       "on a GPU: time algorithms and keep the fastest, for matrix products only among those "
                       "with the same bits"));
  table.push_back(
      flag("train.deterministic", train.deterministic,
           "identical runs give identical weights on GPUs too, at the price of a slower attention backward"));
}

void add_optim(Table& table, OptimConfig& optim) {
  table.push_back(choice("optim.name", optim.name, "optimizer"));
  table.push_back(choice(
      "optim.state", optim.state,
      "storage of moments and momentum: 4, 2 or 1.125 bytes per value, with stochastic rounding below 4"));
  table.push_back(number("optim.lr", optim.lr, 0, "peak learning rate"));
  table.push_back(number("optim.min_lr", optim.min_lr, 0,
                         "final learning rate of cosine and linear; first one of range"));
  table.push_back(
      number("optim.warmup_steps", optim.warmup_steps, 0,
             "steps in which the learning rate rises from 0 to its peak; cut to a run that epochs or "
             "a later source shorten",
             kMostSteps));
  table.push_back(choice("optim.schedule", optim.schedule, "course of the learning rate after warm-up"));
  table.push_back(
      number("optim.step_every", optim.step_every, 0,
             "schedule steps: steps between drops of the learning rate; 0: a third of those after warm-up",
             kMostSteps));
  table.push_back(
      number("optim.step_factor", optim.step_factor, 0, "schedule steps: factor of each drop", 1));
  table.push_back(number("optim.beta1", optim.beta1, 0, "adamw: decay of the first moment; below 1", 1));
  table.push_back(number("optim.beta2", optim.beta2, 0, "adamw: decay of the second moment; below 1", 1));
  table.push_back(number("optim.eps", optim.eps, 0, "adamw: epsilon added to the root of the second moment"));
  table.push_back(number("optim.momentum", optim.momentum, 0, "sgd: momentum; below 1", 1));
  table.push_back(flag("optim.nesterov", optim.nesterov, "sgd: Nesterov momentum"));
  table.push_back(number(
      "optim.ema", optim.ema, 0,
      "decay of an exponential moving average of the weights, which validation uses; 0: none; below 1", 1));
  table.push_back(
      number("optim.weight_decay", optim.weight_decay, 0,
             "weight decay of parameters of two or more dimensions: adamw shrinks them beside its "
             "step (decoupled), sgd adds it to the gradient (L2); where it is not given, adamw has "
             "0.1 and sgd 0"));
}

void add_parallel(Table& table, ParallelConfig& parallel) {
  Field policy =
      choice("parallel.policy", parallel.policy,
             "what data parallelism shards; a label such as fsdp:no_shard also sets parallel.sharding");
  policy.choices = policy_choices(std::move(policy.choices));
  table.push_back(std::move(policy));
  table.push_back(choice("parallel.sharding", parallel.sharding, "fsdp: sharding strategy"));
  table.push_back(reshard(
      "parallel.reshard_after_forward", parallel.reshard_after_forward,
      "free parameters between forward and backward; a number: keep them sharded over so many ranks"));
  table.push_back(
      choice("parallel.reduce_when", parallel.reduce_when,
             "reduce gradients once per step, or after every micro-batch, which takes less memory"));
  table.push_back(flag("parallel.overlap", parallel.overlap, "overlap communication with computation (GPU)"));
  table.push_back(
      number("parallel.prefetch", parallel.prefetch, 0, "units that are gathered ahead of their use", 1e4));
  table.push_back(number("parallel.bucket_mib", parallel.bucket_mib, 0,
                         "size of gradient buckets where parameters are not sharded; 0: one per block", 1e6));
  table.push_back(
      choice("parallel.comm_hook", parallel.comm_hook, "compression of gradients for communication"));
  table.push_back(number("parallel.hook_rank", parallel.hook_rank, 1, "powersgd: rank of the factors", 1e6));
  table.push_back(number("parallel.hook_density", parallel.hook_density, 1e-6,
                         "topk: fraction of the gradients that is sent", 1));
  table.push_back(number("parallel.hook_start", parallel.hook_start, 0,
                         "powersgd, topk: uncompressed steps at the start", kMostSteps));
  table.push_back(number("parallel.local_steps", parallel.local_steps, 1,
                         "local_sgd: steps between averagings", kMostSteps));
  table.push_back(
      number("parallel.dp_replicate", parallel.dp_replicate, 1, "copies of the sharded model", kMostRanks));
  table.push_back(number("parallel.dp_shard", parallel.dp_shard, 0,
                         "ranks that a model is sharded over; 0: all", kMostRanks));
  table.push_back(number("parallel.tp", parallel.tp, 1,
                         "tensor-parallel ranks: each has a part of every layer", kMostRanks));
  table.push_back(
      number("parallel.pp", parallel.pp, 1, "pipeline-parallel ranks, which share the layers", kMostRanks));
  table.push_back(number("parallel.cp", parallel.cp, 1,
                         "context-parallel ranks: each has some tokens of every sequence", kMostRanks));
  table.push_back(
      flag("parallel.async_tp", parallel.async_tp,
           "multiply what tp cuts in pieces, while other pieces are gathered or summed up; products "
           "of fewer rows may round otherwise"));
  table.push_back(choice("parallel.cp_kind", parallel.cp_kind,
                         "what these exchange for attention: tokens for heads (ulysses), or keys and values "
                         "around a ring; auto sends fewer bytes"));
}

void add_pipeline(Table& table, PipelineConfig& pipeline) {
  table.push_back(
      choice("pipeline.schedule", pipeline.schedule, "schedule of the passes when parallel.pp is above 1"));
  table.push_back(text("pipeline.file", pipeline.file,
                       "your own schedule instead, as a CSV in the form of trireme pipeline show --csv"));
  table.push_back(
      choice("pipeline.placement", pipeline.placement, "placement of stages on ranks for pipeline.file"));
  table.push_back(number("pipeline.micro_batches", pipeline.micro_batches, 0,
                         "micro-batches per step; 0: from train.micro_batch, or about 4 per rank", 1e6));
  table.push_back(number("pipeline.chunks", pipeline.chunks, 1,
                         "stages per rank, for interleaved_1f1b, interleaved_zb and looped_bfs", 1e4));
  table.push_back(cut("pipeline.split", pipeline.split,
                      "how the model is cut into stages: by cost, evenly, or by given numbers of blocks"));
  table.push_back(number("pipeline.ahead", pipeline.ahead, 0,
                         "extra receive buffers per stage, beyond those that the schedule needs", 1e6));
  table.push_back(flag(
      "pipeline.spread_head", pipeline.spread_head,
      "spread the head: every rank computes a share of the vocabulary, instead of the last stage all of it"));
}

void add_precision(Table& table, PrecisionConfig& precision) {
  table.push_back(choice("precision.compute", precision.compute, "dtype of parameters and activations"));
  table.push_back(choice("precision.reduce", precision.reduce,
                         "dtype in which gradients are sent; auto: as compute, but fp32 for fp16"));
  table.push_back(choice("precision.accumulate", precision.accumulate,
                         "dtype in which gradients of micro-batches are accumulated: fp32, or as compute"));
  table.push_back(
      choice("precision.scaling", precision.scaling, "loss scaling; auto: dynamic for fp16, otherwise none"));
  LossScaleConfig& scale = precision.loss_scale;
  table.push_back(
      number("precision.initial_scale", scale.initial, 1.0, "dynamic scaling: initial scale", 0x1.0p24));
  table.push_back(number("precision.scale_window", scale.window, 1,
                         "dynamic scaling: finite steps before the scale doubles", kMostSteps));
  table.push_back(number("precision.scale_hysteresis", scale.hysteresis, 1,
                         "dynamic scaling: overflows before the scale is halved", kMostSteps));
  table.push_back(number("precision.min_scale", scale.minimum, 1e-6, "dynamic scaling: lowest scale"));
  Fp8Config& fp8 = precision.fp8;
  table.push_back(
      choice("precision.fp8", fp8.recipe, "compute the linear layers of blocks in FP8: what shares a scale"));
  table.push_back(
      choice("precision.fp8_scaling", fp8.scales,
             "tensorwise: take the scale of an activation, a gradient or a weight from the tensor that "
             "is cast, or (delayed) from earlier steps"));
  table.push_back(number("precision.fp8_history", fp8.history, 1,
                         "delayed: number of earlier steps that a scale is taken from", 1024));
  table.push_back(choice("precision.fp8_gradients", fp8.gradients, "fp8: format of output gradients"));
  table.push_back(
      choice("precision.fp8_fast", fp8.fast, "fp8, except blockwise: faster accumulation with fewer bits"));
  table.push_back(skip("precision.fp8_skip", fp8.skip, "fp8: blocks that stay in bf16"));
  table.push_back(flag("precision.fp8_head", fp8.head, "fp8: the head too, with e5m2 gradients"));
  table.push_back(
      flag("precision.fp8_gather", fp8.gather,
           "tensorwise: gather and keep sharded matrices in FP8; the same results with fewer bytes"));
  table.push_back(
      choice("precision.fp8_fallback", fp8.fallback,
             "if the device or the shapes do not support FP8: abort, continue in bf16, or emulate it (CPU)"));
}

void add_memory(Table& table, MemoryConfig& memory) {
  table.push_back(choice("memory.recompute", memory.recompute,
                         "what backward recomputes instead of keeping it in memory; cheap: norms and "
                         "activations; block: whole blocks; all_but_attention: whole blocks, but for the "
                         "output of attention; auto: cheap on GPUs where it costs less than 1%"));
  table.push_back(number("memory.recompute_every", memory.recompute_every, 1,
                         "recompute in one of this many blocks", 1e4));
  table.push_back(number("memory.loss_chunk_mib", memory.loss_chunk_mib, 1,
                         "on a GPU: compute the logits in chunks of at most this many MiB", 1e6));
}

void add_checkpoint(Table& table, CheckpointConfig& checkpoint) {
  table.push_back(flag("checkpoint.final_weights", checkpoint.final_weights,
                       "save the weights of the finished run as safetensors"));
  table.push_back(
      flag("checkpoint.best", checkpoint.best,
           "save the weights of the best validation: for text the lowest loss, for images the most "
           "correct (with optim.ema the averaged weights)"));
  table.push_back(number("checkpoint.every", checkpoint.every, 0,
                         "steps between the checkpoints for --resume; 0: none", kMostSteps));
  table.push_back(number("checkpoint.keep", checkpoint.keep, 0, "checkpoints to keep; 0: all", 1e9));
  table.push_back(flag("checkpoint.async", checkpoint.async, "train on while a checkpoint is written"));
}

void add_comm(Table& table, CommConfig& comm) {
  table.push_back(number("comm.timeout_s", comm.timeout_s, 0.001,
                         "timeout of every wait for other ranks, in seconds; at most a day", 86400.0));
  table.push_back(flag("comm.peer_memory", comm.peer_memory,
                       "ranks of one host read each other's memory instead of sending messages"));
  table.push_back(choice("comm.gather", comm.gather,
                         "what gathers over GPU peer memory: Trireme's kernels, or the copy engines"));
  table.push_back(
      choice("comm.reduction", comm.reduction,
             "how gradients are summed: in fp32 in a fixed order, or by the backend in its own order"));
}

}  // namespace

std::vector<Field> fields(Config& config) {
  Table table;
  add_run(table, config);
  add_model(table, config.model);
  add_vision(table, config.model.vision);
  add_adapter(table, config.model.adapter);
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
