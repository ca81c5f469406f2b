// Rules between the fields of a config.
#include "trireme/base/error.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/policy.h"

namespace trireme::plan {
namespace {

class Checker {
 public:
  Checker(const Config& config, const Origins& origins)
      : config_(config), model_(config.model), origins_(origins) {}

  void check_all() const {
    check_run_name();
    if (model_.family != "mlp") check_heads();
    check_family_rules();
    check_vocabulary();
    check_schedule();
    check_below_one();
    check_recompute();
    check_loss_scale();
    check_deterministic();
    check_engine();
    check_buckets();
  }

 private:
  /// "model.d_model=100 (--model.d_model)".
  template <typename Value>
  std::string said(const std::string& key, const Value& value) const {
    return fmt::format("{}={} ({})", key, value, origins_.at(key));
  }

  void check_run_name() const {
    if (!config_.name.empty() && config_.name.find('/') == std::string::npos) return;
    throw ConfigError("[plan.config] {} cannot name a directory; use one or more characters without '/'",
                      said("name", config_.name));
  }

  void check_loss_scale() const {
    const PrecisionConfig& precision = config_.precision;
    const std::string& hook = config_.parallel.comm_hook;
    if (scales_loss(precision) && (hook == "int8" || hook == "topk" || hook == "powersgd")) {
      throw ConfigError(
          "[plan.config] {} keeps what it could not send, which an overflow of the scaled loss would spoil "
          "for good; "
          "use none or fp16, or precision.compute=bf16",
          said("parallel.comm_hook", hook));
    }
    if (precision.loss_scale.minimum > precision.loss_scale.initial) {
      throw ConfigError("[plan.config] {} is above {}; lower it",
                        said("precision.min_scale", precision.loss_scale.minimum),
                        said("precision.initial_scale", precision.loss_scale.initial));
    }
  }

  /// What adds in an order that is the backend's to choose.
  void check_deterministic() const {
    if (!config_.train.deterministic) return;
    const std::string asked = said("train.deterministic", config_.train.deterministic);
    if (config_.comm.reduction == "backend") {
      throw ConfigError(
          "[plan.config] {} cannot be honoured with {}, which adds in an order that NCCL or Gloo chooses; "
          "use "
          "comm.reduction=ordered",
          asked, said("comm.reduction", config_.comm.reduction));
    }
    if (config_.parallel.comm_hook == "powersgd") {
      throw ConfigError(
          "[plan.config] {} cannot be honoured with {}, whose factors NCCL or Gloo adds in an order of its "
          "own; use another hook or none",
          asked, said("parallel.comm_hook", config_.parallel.comm_hook));
    }
  }

  void check_recompute() const {
    if (config_.memory.recompute != "cheap" || model_.family != "mlp") return;
    throw ConfigError("[plan.config] {} has nothing to leave out in family mlp; use block or none",
                      said("memory.recompute", config_.memory.recompute));
  }

  void check_heads() const {
    const auto heads = said("model.n_heads", model_.n_heads);
    if (model_.d_model % model_.n_heads != 0) {
      throw ConfigError("[plan.config] {} is no multiple of {}; set model.d_model to {}",
                        said("model.d_model", model_.d_model), heads,
                        (model_.d_model / model_.n_heads + 1) * model_.n_heads);
    }
    if (model_.n_heads % model_.n_kv_heads != 0) {
      throw ConfigError("[plan.config] {} is no multiple of {}; set model.n_kv_heads to a divisor of {}",
                        heads, said("model.n_kv_heads", model_.n_kv_heads), model_.n_heads);
    }
  }

  void check_family_rules() const {
    if (model_.family == "gpt2") {
      check_gpt2();
    } else if (model_.dropout != 0.0) {
      throw ConfigError("[plan.config] {} needs model.family=gpt2, but {}; set model.dropout to 0",
                        said("model.dropout", model_.dropout), said("model.family", model_.family));
    }
    if (model_.family == "llama" && model_.d_model / model_.n_heads % 2 != 0) {
      throw ConfigError(
          "[plan.config] {} / {} = {} is odd, but rotary embeddings turn pairs; make the head size even",
          said("model.d_model", model_.d_model), said("model.n_heads", model_.n_heads),
          model_.d_model / model_.n_heads);
    }
  }

  void check_gpt2() const {
    if (model_.n_kv_heads != model_.n_heads) {
      throw ConfigError(
          "[plan.config] {} differs from {}, but gpt2 has one key and value per head; set it to 0",
          said("model.n_kv_heads", model_.n_kv_heads), said("model.n_heads", model_.n_heads));
    }
    if (model_.max_seq_len < config_.data.seq_len) {
      throw ConfigError(
          "[plan.config] {} has no positions for {}; set model.max_seq_len to 0 or to at least {}",
          said("model.max_seq_len", model_.max_seq_len), said("data.seq_len", config_.data.seq_len),
          config_.data.seq_len);
    }
  }

  void check_vocabulary() const {
    if (config_.data.tokenizer != "byte" || model_.vocab_size >= 256) return;
    throw ConfigError(
        "[plan.config] {} is too small for {}, which makes 256 tokens; set model.vocab_size to 256 or more",
        said("model.vocab_size", model_.vocab_size), said("data.tokenizer", config_.data.tokenizer));
  }

  void check_schedule() const {
    const OptimConfig& optim = config_.optim;
    if (optim.min_lr > optim.lr) {
      throw ConfigError("[plan.config] {} is above {}; lower it", said("optim.min_lr", optim.min_lr),
                        said("optim.lr", optim.lr));
    }
    if (optim.warmup_steps > config_.train.steps) {
      throw ConfigError("[plan.config] {} is above {}; lower it or train longer",
                        said("optim.warmup_steps", optim.warmup_steps),
                        said("train.steps", config_.train.steps));
    }
  }

  void check_below_one() const {
    const OptimConfig& optim = config_.optim;
    const std::pair<const char*, double> decays[] = {{"model.dropout", model_.dropout},
                                                     {"optim.beta1", optim.beta1},
                                                     {"optim.beta2", optim.beta2},
                                                     {"optim.momentum", optim.momentum}};
    for (const auto& [key, value] : decays) {
      if (value >= 1.0) throw ConfigError("[plan.config] {} must be below 1; lower it", said(key, value));
    }
  }

  /// What the engine of this build does not run.
  void check_engine() const {
    const ParallelConfig& parallel = config_.parallel;
    const std::pair<const char*, int64_t> axes[] = {
        {"parallel.tp", parallel.tp}, {"parallel.pp", parallel.pp}, {"parallel.cp", parallel.cp}};
    for (const auto& [key, value] : axes) {
      if (value == 1) continue;
      throw ConfigError(
          "[plan.config] {}: this build's engine splits work along dp_replicate and dp_shard only; set it to "
          "1",
          said(key, value));
    }
  }

  void check_buckets() const {
    const ParallelConfig& parallel = config_.parallel;
    if (parallel.bucket_mib == 0.0) return;
    const bool row_given = parallel.policy == "fsdp" && parallel.sharding != "auto";
    const Policy& policy = find_policy(row_given ? "fsdp:" + parallel.sharding : parallel.policy);
    if (!policy.shard_parameters) return;
    throw ConfigError(
        "[plan.config] {} with {}, which frees parameters by block; set parallel.bucket_mib to 0, or "
        "parallel.policy to ddp, zero1 or zero2",
        said("parallel.bucket_mib", parallel.bucket_mib), said("parallel.policy", parallel.policy));
  }

  const Config& config_;
  const ModelConfig& model_;
  const Origins& origins_;
};

}  // namespace

void check_config(const Config& config, const Origins& origins) {
  Checker(config, origins).check_all();
}

}  // namespace trireme::plan
