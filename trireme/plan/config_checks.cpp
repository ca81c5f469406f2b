// Rules between the fields of a config.
#include <algorithm>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/optimizer.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/saved_copy.h"
#include "trireme/plan/schedule.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/plan/token_split.h"

namespace trireme::plan {
namespace {

class Checker {
 public:
  Checker(const Config& config, const Origins& origins)
      : config_(config), model_(config.model), family_(record_of(config.model.family)), origins_(origins) {}

  void check_all() const {
    check_run_name();
    check_sample();
    if (family_.attends) check_heads();
    if (family_.check != nullptr) family_.check(config_, origins_);
    check_dropout();
    check_rotation();
    check_kind();
    check_schedule();
    check_early_stop();
    check_checkpoints();
    check_below_one();
    check_optimizer();
    check_recompute();
    check_adapter();
    check_loss_scale();
    check_fp8();
    check_deterministic();
    check_tensor_parallel();
    check_context_parallel();
    check_buckets();
    check_hook();
    if (config_.parallel.pp > 1) check_pipeline(config_, origins_);
  }

  void check_vocabulary() const {
    if (config_.data.kind == DataKind::kImages || config_.data.path == kProgramData) return;
    if (config_.data.tokenizer != kByteTokenizer || model_.vocab_size >= 256) return;
    throw ConfigError(
        "[plan.config] {} is too small for {}, which makes 256 tokens; set model.vocab_size to 256 or more",
        said("model.vocab_size", model_.vocab_size), said("data.tokenizer", config_.data.tokenizer));
  }

 private:
  template <typename Value>
  std::string said(const std::string& key, const Value& value) const {
    return plan::said(origins_, key, value);
  }

  void check_run_name() const {
    if (config_.name == "latest") {
      throw ConfigError(
          "[plan.config] {} cannot name a run, because commands take 'latest' for the newest one; choose "
          "another name",
          said("name", config_.name));
    }
    if (!config_.name.empty() && config_.name.find('/') == std::string::npos) return;
    throw ConfigError("[plan.config] {} cannot name a directory; use one or more characters without '/'",
                      said("name", config_.name));
  }

  void check_sample() const {
    const TrainConfig& train = config_.train;
    if (train.sample_tokens == 0 || !train.sample_prompt.empty()) return;
    throw ConfigError(
        "[plan.config] {}, but {} has no text to continue; set a prompt, or set train.sample_tokens to 0",
        said("train.sample_tokens", train.sample_tokens), said("train.sample_prompt", "\"\""));
  }

  void check_loss_scale() const {
    const PrecisionConfig& precision = config_.precision;
    const CommHook hook = config_.parallel.comm_hook;
    if (scales_loss(precision) && keeps_residual(hook)) {
      throw ConfigError(
          "[plan.config] {} carries over what it could not send, and an overflow of the scaled loss would "
          "corrupt that for good; use none or fp16, or precision.compute=bf16",
          said("parallel.comm_hook", hook));
    }
    if (precision.loss_scale.minimum > precision.loss_scale.initial) {
      throw ConfigError("[plan.config] {} is above {}; lower it",
                        said("precision.min_scale", precision.loss_scale.minimum),
                        said("precision.initial_scale", precision.loss_scale.initial));
    }
  }

  /// Shapes and devices are checked elsewhere, since a run may go on without FP8 (plan/fp8.h).
  void check_fp8() const {
    const PrecisionConfig& precision = config_.precision;
    const Fp8Config& fp8 = precision.fp8;
    if (fp8.recipe == Fp8::kOff) return;
    const std::string asked = said("precision.fp8", fp8.recipe);
    if (!family_.attends) {
      throw ConfigError("[plan.config] {} has no layers to multiply in {}; set precision.fp8 to off", asked,
                        said("model.family", model_.family));
    }
    if (precision.compute != Dtype::kBf16) {
      throw ConfigError("[plan.config] {} casts from and sums to bf16, but {}; set precision.compute to bf16",
                        asked, said("precision.compute", precision.compute));
    }
    const CommHook hook = config_.parallel.comm_hook;
    if (hook != CommHook::kNone && hook != CommHook::kLocalSgd) {
      throw ConfigError(
          "[plan.config] {} with {}: gradients computed in 8 bits are not compressed again for sending; set "
          "parallel.comm_hook to none",
          asked, said("parallel.comm_hook", hook));
    }
    check_fp8_scales(asked, hook);
    for (const int64_t block : fp8.skip.blocks) {
      if (block < model_.n_layers) continue;
      throw ConfigError("[plan.config] {} lists block {}, but with {} the last block is {}; remove it",
                        said("precision.fp8_skip", to_text(fp8.skip)), block,
                        said("model.n_layers", model_.n_layers), model_.n_layers - 1);
    }
  }

  void check_fp8_scales(const std::string& asked, CommHook hook) const {
    const Fp8Config& fp8 = config_.precision.fp8;
    if (fp8.scales != Fp8Scales::kDelayed) return;
    const std::string delayed = said("precision.fp8_scaling", fp8.scales);
    if (fp8.recipe != Fp8::kTensorwise) {
      throw ConfigError(
          "[plan.config] {} with {}: scales per row or block always come from the tensor that is cast; set "
          "precision.fp8=tensorwise or precision.fp8_scaling=dynamic",
          delayed, asked);
    }
    if (hook == CommHook::kLocalSgd) {
      throw ConfigError(
          "[plan.config] {} compares magnitudes across ranks after every step, but with {} ranks do not "
          "communicate in every step; set precision.fp8_scaling=dynamic",
          delayed, said("parallel.comm_hook", hook));
    }
  }

  /// Settings whose sums have an order that is the backend's to choose.
  void check_deterministic() const {
    if (!config_.train.deterministic) return;
    const std::string asked = said("train.deterministic", config_.train.deterministic);
    if (config_.comm.reduction == Reduction::kBackend) {
      throw ConfigError(
          "[plan.config] {} is not possible with {}, where NCCL or Gloo chooses the order of summation; use "
          "comm.reduction=ordered",
          asked, said("comm.reduction", config_.comm.reduction));
    }
    if (config_.parallel.comm_hook == CommHook::kPowerSgd) {
      throw ConfigError(
          "[plan.config] {} is not possible with {}, whose factors NCCL or Gloo sums in its own order; use "
          "another hook or none",
          asked, said("parallel.comm_hook", config_.parallel.comm_hook));
    }
  }

  void check_recompute() const {
    const std::string asked = said("memory.recompute", config_.memory.recompute);
    if (config_.memory.recompute == Recompute::kCheap && family_.cheap_bytes == nullptr) {
      throw ConfigError("[plan.config] {} has nothing to recompute in family {}; use block or none", asked,
                        model_.family);
    }
    if (config_.memory.recompute != Recompute::kAllButAttention) return;
    if (!family_.attends) {
      throw ConfigError("[plan.config] {} finds no attention in family {}; use block or none", asked,
                        model_.family);
    }
    if (model_.dropout > 0.0) {
      throw ConfigError(
          "[plan.config] {} cannot keep the output of attention with {}; use block, cheap or none", asked,
          said("model.dropout", model_.dropout));
    }
  }

  /// Attention that keeps its scores: those of all heads and tokens, which nobody has along cp.
  void check_attention() const {
    if (model_.attention == AttentionKind::kAuto || reads_images(model_.family)) return;
    const std::string asked = said("model.attention", model_.attention);
    if (!family_.attends)
      throw ConfigError("[plan.config] {} has no effect: {} has no attention over tokens; remove it", asked,
                        said("model.family", model_.family));
    const auto refuse = [&](const std::string& other) {
      throw ConfigError("[plan.config] {} cannot be combined with {}; set model.attention=auto", asked,
                        other);
    };
    if (config_.parallel.cp > 1) refuse(said("parallel.cp", config_.parallel.cp));
    if (config_.data.reset_attention) refuse(said("data.reset_attention", true));
    if (config_.memory.recompute == Recompute::kAllButAttention)
      refuse(said("memory.recompute", config_.memory.recompute));
  }

  void check_nf4() const {
    const std::string base = said("adapter.base", model_.adapter.base);
    if (config_.precision.fp8.recipe != Fp8::kOff)
      throw ConfigError(
          "[plan.config] {} is decoded to the dtype of computation, and {} casts weights of bf16; set "
          "precision.fp8 to off, or adapter.base to model",
          base, said("precision.fp8", config_.precision.fp8.recipe));
  }

  void check_adapter() const {
    static constexpr std::string_view kKeys[] = {"adapter.rank",    "adapter.alpha",   "adapter.targets",
                                                 "adapter.dropout", "adapter.weights", "adapter.base"};
    const std::string kind = said("adapter.kind", model_.adapter.kind);
    if (model_.adapter.kind == AdapterKind::kNone) return refuse_keys(kKeys, "adapters", kind);
    if (!family_.attends)
      throw ConfigError(
          "[plan.config] {}, but models of family {} have no layers that adapters fit; use gpt2 or llama",
          kind, model_.family);
    check_targets(model_, said("adapter.targets", model_.adapter.targets));
    if (model_.adapter.base == AdapterBase::kNf4) check_nf4();
    if (config_.memory.recompute == Recompute::kCheap && model_.adapter.dropout > 0.0)
      throw ConfigError(
          "[plan.config] {} keeps what it reads of the outputs of norms, so {} would save nothing; use block "
          "or none",
          said("adapter.dropout", model_.adapter.dropout),
          said("memory.recompute", config_.memory.recompute));
    if (config_.parallel.reshard_after_forward.kind == ReshardAfterForward::Kind::kOver)
      throw ConfigError(
          "[plan.config] {} gathers frozen weights from all ranks of a shard, not from those of {}; use "
          "true or false",
          kind, said("parallel.reshard_after_forward", to_text(config_.parallel.reshard_after_forward)));
  }

  void check_heads() const {
    const auto heads = said("model.n_heads", model_.n_heads);
    if (model_.head_dim == 0 && model_.d_model % model_.n_heads != 0) {
      throw ConfigError(
          "[plan.config] {} is not a multiple of {}; set model.d_model to {}, or model.head_dim",
          said("model.d_model", model_.d_model), heads,
          (model_.d_model / model_.n_heads + 1) * model_.n_heads);
    }
    if (model_.n_heads % model_.n_kv_heads != 0) {
      throw ConfigError("[plan.config] {} is not a multiple of {}; set model.n_kv_heads to a divisor of {}",
                        heads, said("model.n_kv_heads", model_.n_kv_heads), model_.n_heads);
    }
  }

  void check_dropout() const {
    if (model_.dropout == 0.0 || family_.drops) return;
    std::vector<std::string> dropping;
    for (const ModelFamily family : all_values<ModelFamily>()) {
      if (record_of(family).drops) dropping.emplace_back(name(family));
    }
    throw ConfigError("[plan.config] {} needs model.family={}, but {}; set model.dropout to 0",
                      said("model.dropout", model_.dropout), join(dropping, " or "),
                      said("model.family", model_.family));
  }

  void check_rotation() const {
    if (model_.rope_scaling == RopeScaling::kNone || family_.rotates) return;
    throw ConfigError("[plan.config] {}, but {} has no rotary positions; set model.rope_scaling to none",
                      said("model.rope_scaling", model_.rope_scaling), said("model.family", model_.family));
  }

  /// Keys that would have no effect, as they are for something else than was chosen; a config that states
  /// their defaults is none the worse.
  template <typename Keys>
  void refuse_keys(const Keys& keys, const std::string& meant_for, const std::string& chosen) const {
    Config given = config_, defaults;
    const std::vector<Field> values = fields(given), unset = fields(defaults);
    for (const std::string_view key : keys) {
      const auto field = std::ranges::find(values, key, &Field::key);
      const auto unset_field = unset.begin() + (field - values.begin());
      if (value_of(*field) == value_of(*unset_field)) continue;
      throw ConfigError("[plan.config] {} is for {}, but {}; remove it",
                        said(field->key, format_value(*field)), meant_for, chosen);
    }
  }

  void check_optimizer() const {
    for (const OptimizerName other : all_values<OptimizerName>()) {
      if (other == config_.optim.name) continue;
      refuse_keys(record_of(other).keys, fmt::format("optim.name={}", other),
                  said("optim.name", config_.optim.name));
    }
  }

  /// Keys of conversations.
  void check_format() const {
    const DataConfig& data = config_.data;
    if (data.format != DataFormat::kChat && !data.chat_template.empty())
      throw ConfigError("[plan.config] {} has no effect with {}; set data.format=chat or remove it",
                        said("data.chat_template", data.chat_template), said("data.format", data.format));
    if (data.format == DataFormat::kText && data.loss_on != DataConfig{}.loss_on)
      throw ConfigError(
          "[plan.config] {} has no effect with {}; set data.format=chat or answers, or remove it",
          said("data.loss_on", data.loss_on), said("data.format", data.format));
  }

  /// Documents that are kept apart.
  void check_reset_attention() const {
    if (!config_.data.reset_attention || config_.data.kind != DataKind::kText) return;
    const std::string reset = said("data.reset_attention", true);
    if (!family_.attends)
      throw ConfigError("[plan.config] {} has no effect: {} has no attention over tokens; remove it", reset,
                        said("model.family", model_.family));
    if (config_.parallel.cp > 1 && config_.parallel.cp_kind == CpKind::kRing)
      throw ConfigError(
          "[plan.config] {} cannot be combined with {}, which keeps no documents apart; set "
          "parallel.cp_kind=ulysses",
          reset, said("parallel.cp_kind", config_.parallel.cp_kind));
  }

  void check_mixture() const {
    const DataConfig& data = config_.data;
    if (data.mixture.sources.empty()) return;
    const std::string mixture = fmt::format("data.mixture ({})", origins_.at("data.mixture"));
    if (data.kind == DataKind::kImages)
      throw ConfigError("[plan.config] {} has texts, but {} reads images; remove it", mixture,
                        said("model.family", model_.family));
    if (config_.train.epochs > 0) {
      throw ConfigError(
          "[plan.config] {} has sources that end their epochs at different times, so {} says no length; set "
          "train.steps",
          mixture, said("train.epochs", config_.train.epochs));
    }
    if (data.path == DataConfig{}.path) return;
    throw ConfigError("[plan.config] {} and {} both say what is read; remove one of them", mixture,
                      said("data.path", data.path));
  }

  /// Keys of models and data of the other kind.
  void check_kind() const {
    static constexpr std::string_view kOfText[] = {"model.attention",
                                                   "model.norm_eps",
                                                   "model.rope_theta",
                                                   "model.rope_factor",
                                                   "model.rope_low_freq_factor",
                                                   "model.rope_original_len",
                                                   "model.rope_high_freq_factor",
                                                   "data.format",
                                                   "data.loss_on",
                                                   "data.chat_template",
                                                   "data.reset_attention"};
    static constexpr std::string_view kOfImages[] = {
        "model.depth",           "model.width",         "model.stem",       "model.norm",
        "model.norm_groups",     "model.channels",      "model.image_size", "model.classes",
        "model.label_smoothing", "model.channels_last", "data.pad",         "data.flip",
        "data.resized_crop",     "data.least_area",     "data.mixup",       "data.threads"};
    check_format();
    check_reset_attention();
    check_attention();
    check_mixture();
    const std::string family = said("model.family", model_.family);
    if (config_.data.kind == DataKind::kText) return refuse_keys(kOfImages, "image models", family);
    refuse_keys(kOfText, "text models", family);
    const DataConfig& data = config_.data;
    if (data.least_area != DataConfig{}.least_area && !data.resized_crop) {
      throw ConfigError(
          "[plan.config] {} has no effect without data.resized_crop; set that to true or remove it",
          said("data.least_area", data.least_area));
    }
  }

  /// A loss that is to end a run must be measured in its course.
  void check_early_stop() const {
    const TrainConfig& train = config_.train;
    if (!train.monitor.empty() && train.early_stop == 0 && !config_.checkpoint.best) {
      throw ConfigError(
          "[plan.config] {} has no effect without train.early_stop or checkpoint.best; set one of them or "
          "remove "
          "it",
          said("train.monitor", train.monitor));
    }
    if (train.early_stop == 0) {
      if (train.early_stop_min_delta == 0.0) return;
      throw ConfigError("[plan.config] {} has no effect without train.early_stop; set that or remove it",
                        said("train.early_stop_min_delta", train.early_stop_min_delta));
    }
    if (train.val_batches == 0) {
      throw ConfigError(
          "[plan.config] {} ends a run by its validation loss, but {} turns validation off; raise "
          "train.val_batches",
          said("train.early_stop", train.early_stop), said("train.val_batches", train.val_batches));
    }
    const DataConfig& data = config_.data;
    if (data.kind == DataKind::kText && data.val_fraction == 0.0) {
      throw ConfigError(
          "[plan.config] {} ends a run by its validation loss, but with {} nothing is held out; raise it",
          said("train.early_stop", train.early_stop), said("data.val_fraction", 0.0));
    }
    if (train.val_every > 0 || train.epochs > 0) return;
    throw ConfigError(
        "[plan.config] {} ends a run by its validation loss, but {} validates only at its end; set "
        "train.val_every, or train.epochs",
        said("train.early_stop", train.early_stop), said("train.val_every", train.val_every));
  }

  /// A checkpoint has one value of each weight, and ranks of local SGD agree on it when they have averaged.
  void check_checkpoints() const {
    if (config_.checkpoint.best && config_.train.val_batches == 0) {
      throw ConfigError(
          "[plan.config] {} keeps the weights of the best validation, but {} turns validation off; raise "
          "train.val_batches",
          said("checkpoint.best", true), said("train.val_batches", config_.train.val_batches));
    }
    const CommHook hook = config_.parallel.comm_hook;
    const int64_t every = config_.checkpoint.every, local_steps = config_.parallel.local_steps;
    if (hook != CommHook::kLocalSgd) return;
    if (every > 0) check_averaged("checkpoint.every", every);
    if (!config_.checkpoint.best) return;
    if (config_.train.val_every == 0) {
      throw ConfigError(
          "[plan.config] {} saves weights at the end of an epoch, but with {} the weights of ranks differ "
          "there; set train.val_every to a multiple of {}",
          said("checkpoint.best", true), said("parallel.comm_hook", hook),
          said("parallel.local_steps", local_steps));
    }
    if (config_.optim.ema > 0.0) {
      throw ConfigError(
          "[plan.config] {} saves the averaged weights of {}, but with {} every rank has its own average; "
          "set optim.ema to 0 or checkpoint.best to false",
          said("checkpoint.best", true), said("optim.ema", config_.optim.ema),
          said("parallel.comm_hook", hook));
    }
    check_averaged("train.val_every", config_.train.val_every);
  }

  /// Weights are kept every so many steps, with local SGD.
  void check_averaged(const std::string& key, int64_t every) const {
    const CommHook hook = config_.parallel.comm_hook;
    const int64_t local_steps = config_.parallel.local_steps;
    if (every % local_steps != 0) {
      throw ConfigError(
          "[plan.config] {} is not a multiple of {}: with {} the weights of ranks differ between averagings; "
          "set {} to {}",
          said(key, every), said("parallel.local_steps", local_steps), said("parallel.comm_hook", hook), key,
          (every / local_steps + 1) * local_steps);
    }
    if (scales_loss(config_.precision)) {
      throw ConfigError(
          "[plan.config] {} saves weights with {} and loss scaling, but a rank that skips a step on overflow "
          "averages later than the others; use precision.compute=bf16, or save only the final weights",
          said(key, every), said("parallel.comm_hook", hook));
    }
  }

  void check_schedule() const {
    const OptimConfig& optim = config_.optim;
    if (optim.min_lr > optim.lr) {
      throw ConfigError("[plan.config] {} is above {}; lower it", said("optim.min_lr", optim.min_lr),
                        said("optim.lr", optim.lr));
    }
    check_steps_keys();
    check_range_keys();
    if (optim.nesterov && optim.momentum == 0.0) {
      throw ConfigError(
          "[plan.config] {} needs momentum, but {}; raise optim.momentum or remove optim.nesterov",
          said("optim.nesterov", optim.nesterov), said("optim.momentum", optim.momentum));
    }
    if (config_.train.epochs == 0 && optim.warmup_steps > config_.train.steps) {
      throw ConfigError(
          "[plan.config] {} is above {}; set optim.warmup_steps={} or less, or train.steps={} or more",
          said("optim.warmup_steps", optim.warmup_steps), said("train.steps", config_.train.steps),
          config_.train.steps, optim.warmup_steps);
    }
  }

  /// Keys of a schedule that is not the config's would have no effect.
  void check_steps_keys() const {
    const OptimConfig& optim = config_.optim;
    if (optim.schedule == LrSchedule::kSteps) return;
    const OptimConfig unset;
    const auto refuse = [&](const std::string& given) {
      throw ConfigError("[plan.config] {} is for optim.schedule=steps, but {}; remove it", given,
                        said("optim.schedule", optim.schedule));
    };
    if (optim.step_every != unset.step_every) refuse(said("optim.step_every", optim.step_every));
    if (optim.step_factor != unset.step_factor) refuse(said("optim.step_factor", optim.step_factor));
  }

  /// A range test rises by one factor a step, from its first step on.
  void check_range_keys() const {
    const OptimConfig& optim = config_.optim;
    if (optim.schedule != LrSchedule::kRange) return;
    if (optim.min_lr <= 0.0)
      throw ConfigError("[plan.config] {} begins at optim.min_lr, but {}; set it above 0, such as 1e-7",
                        said("optim.schedule", optim.schedule), said("optim.min_lr", optim.min_lr));
    if (optim.warmup_steps > 0)
      throw ConfigError("[plan.config] {} begins at optim.min_lr, but {}; set it to 0",
                        said("optim.schedule", optim.schedule),
                        said("optim.warmup_steps", optim.warmup_steps));
  }

  void check_below_one() const {
    const OptimConfig& optim = config_.optim;
    const std::pair<const char*, double> decays[] = {
        {"model.dropout", model_.dropout},  {"adapter.dropout", model_.adapter.dropout},
        {"optim.beta1", optim.beta1},       {"optim.beta2", optim.beta2},
        {"optim.momentum", optim.momentum}, {"optim.ema", optim.ema}};
    for (const auto& [key, value] : decays) {
      if (value >= 1.0) throw ConfigError("[plan.config] {} must be below 1; lower it", said(key, value));
    }
  }

  /// A ring takes any heads, and lengths of which each rank has two pieces.
  void check_tokens_are_shared(const std::string& cp, CpKind kind) const {
    const int64_t tp = config_.parallel.tp, ranks = config_.parallel.cp, length = config_.data.seq_len,
                  ring = length_multiple(config_.parallel, CpKind::kRing),
                  multiple = length_multiple(config_.parallel, kind), heads = model_.n_heads / tp,
                  kv = std::max<int64_t>(1, complete(model_, length).n_kv_heads / tp);
    if (kind == CpKind::kUlysses && !can_share_heads(heads, kv, ranks)) {
      const bool divides = length % ring == 0;
      const std::string or_ring =
          divides ? " (parallel.cp_kind=ring)" : fmt::format(" with data.seq_len a multiple of {}", ring);
      throw ConfigError(
          "[plan.config] {} ranks cannot share {} heads and {} key and value heads{}, of which each computes "
          "attention for some; use a divisor of the heads, {}",
          cp, heads, kv, tp > 1 ? fmt::format(" of a rank along tp ({})", said("parallel.tp", tp)) : "",
          config_.data.reset_attention
              ? fmt::format("since {} knows no ring attention", said("data.reset_attention", true))
              : "or ring attention" + or_ring);
    }
    if (length % multiple != 0) {
      throw ConfigError(
          "[plan.config] {} x tp={} does not divide {}{}, but ranks have equal parts of each sequence; make "
          "data.seq_len a multiple of {}",
          cp, tp, said("data.seq_len", length),
          kind == CpKind::kRing ? " into two pieces for each rank of a ring" : "", multiple);
    }
  }

  /// What ranks along cp cannot share.
  void check_context_parallel() const {
    const int64_t ranks = config_.parallel.cp;
    if (ranks == 1) return;
    const std::string cp = said("parallel.cp", ranks);
    if (!family_.attends)
      throw ConfigError(
          "[plan.config] {}: models of family {} have no attention over tokens; use gpt2 or llama", cp,
          model_.family);
    check_tokens_are_shared(cp, settled_cp_kind(config_));
    const auto refuse = [&](const std::string& with, std::string_view why) {
      throw ConfigError("[plan.config] {} cannot be combined with {}: {}", cp, with, why);
    };
    if (model_.dropout > 0.0)
      refuse(said("model.dropout", model_.dropout),
             "attention would drop other weights than on one rank; set model.dropout to 0");
    if (config_.pipeline.spread_head)
      refuse(said("pipeline.spread_head", true), "set pipeline.spread_head to false");
    if (const CommHook hook = config_.parallel.comm_hook; hook == CommHook::kLocalSgd)
      refuse(
          said("parallel.comm_hook", hook),
          "ranks that have one sequence would compute it with different weights; set parallel.comm_hook to "
          "none");
  }

  /// Products in pieces, which are those of cut layers, and not in FP8.
  void check_async_tp() const {
    if (!config_.parallel.async_tp) return;
    const std::string asked = said("parallel.async_tp", true);
    if (config_.parallel.tp == 1)
      throw ConfigError("[plan.config] {} has no effect: {} cuts no layer; set parallel.tp, or remove it",
                        asked, said("parallel.tp", config_.parallel.tp));
    if (!config_.parallel.overlap)
      throw ConfigError("[plan.config] {} cannot be combined with {}; remove one of them", asked,
                        said("parallel.overlap", false));
    if (config_.precision.fp8.recipe != Fp8::kOff)
      throw ConfigError(
          "[plan.config] {} cannot be combined with {}, whose products need the scale of all rows; remove "
          "one "
          "of them",
          asked, said("precision.fp8", config_.precision.fp8.recipe));
  }

  /// What ranks along tp cannot share, or do not keep alike.
  void check_tensor_parallel() const {
    check_async_tp();
    const int64_t ranks = config_.parallel.tp;
    if (ranks == 1) return;
    const std::string tp = said("parallel.tp", ranks);
    if (const std::string obstacle = split_obstacle(complete(model_, config_.data.seq_len), ranks);
        !obstacle.empty())
      throw ConfigError("[plan.config] {}: {}", tp, obstacle);
    if (config_.data.seq_len % ranks != 0) {
      throw ConfigError(
          "[plan.config] {} does not divide {}, but ranks have equal rows of tokens between layers; make "
          "data.seq_len a multiple of it",
          tp, said("data.seq_len", config_.data.seq_len));
    }
    const auto refuse = [&](const std::string& with, std::string_view why) {
      throw ConfigError("[plan.config] {} cannot be combined with {}: {}", tp, with, why);
    };
    if (config_.pipeline.spread_head)
      refuse(said("pipeline.spread_head", true),
             "both cut the vocabulary; set pipeline.spread_head to false");
    if (config_.precision.fp8.recipe != Fp8::kOff && config_.precision.fp8.head)
      refuse(said("precision.fp8_head", true),
             "the head multiplies its part of the vocabulary in bf16; set precision.fp8_head to false");
    if (config_.precision.compute == Dtype::kFp16)
      refuse(said("precision.compute", config_.precision.compute),
             "sums in a fixed order take bf16 or fp32; set precision.compute to bf16");
    if (const CommHook hook = config_.parallel.comm_hook; !keeps_copies_equal(hook))
      refuse(said("parallel.comm_hook", hook),
             "copies of norms would drift apart; set parallel.comm_hook to none, fp16 or local_sgd");
    if (config_.comm.reduction == Reduction::kBackend)
      refuse(said("comm.reduction", config_.comm.reduction),
             "ranks would add up the gradients of copies in other orders, and these would drift apart; set "
             "comm.reduction to ordered");
  }

  void check_buckets() const {
    const ParallelConfig& parallel = config_.parallel;
    if (parallel.bucket_mib == 0.0) return;
    if (!row_of(parallel).shard_parameters) return;
    throw ConfigError(
        "[plan.config] {} cannot be used with {}, which frees parameters block by block; set "
        "parallel.bucket_mib to 0, or parallel.policy to ddp, zero1 or zero2",
        said("parallel.bucket_mib", parallel.bucket_mib), said("parallel.policy", parallel.policy));
  }

  void check_hook() const {
    const ParallelConfig& parallel = config_.parallel;
    const Policy& policy = row_of(parallel);
    const std::string_view obstacle = hook_obstacle(policy, parallel.comm_hook);
    if (obstacle.empty()) return;
    throw ConfigError("[plan.config] {} cannot be combined with {}: {}",
                      said("parallel.comm_hook", parallel.comm_hook), said("parallel.policy", policy.label()),
                      obstacle);
  }

  const Config& config_;
  const ModelConfig& model_;
  const ModelFamilyRecord& family_;
  const Origins& origins_;
};

}  // namespace

void check_config(const Config& config, const Origins& origins, bool tokenizes) {
  const Checker checker(config, origins);
  checker.check_all();
  if (tokenizes) checker.check_vocabulary();
}

void check_config(const Config& config) {
  Config keys = config;
  Origins origins;
  for (const Field& field : fields(keys)) origins[field.key] = "changed by the program";
  check_config(config, origins);
}

}  // namespace trireme::plan
