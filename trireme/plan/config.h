#pragma once
// The configuration of a run: plain structs, and one table that names every field once. YAML, command-line
// overrides, `config show`, the JSON schema and --help all come from that table.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "trireme/plan/choices.h"

namespace trireme {
class Environment;
}

namespace trireme::plan {

/// A model of images.
struct VisionConfig {
  ModelFamily family = ModelFamily::kResNet;  ///< one that reads_images()
  /// resnet: layers with weights. 18, 34, 50, 101 and 152 have the four stages of torchvision's; 8, 14, 20
  /// and other 6 n + 2 the three of the networks for CIFAR-10.
  int64_t depth = 20;
  int64_t width = 16;                  ///< resnet: channels of the first stage, doubled by each later one
  ImageStem stem = ImageStem::kCifar;  ///< resnet
  ImageNorm norm = ImageNorm::kBatch;  ///< resnet
  int64_t norm_groups = 8;             ///< resnet with group norm: groups of channels
  int64_t channels = 3;                ///< of an image
  int64_t image_size = 32;             ///< height and width of an image
  int64_t classes = 10;
  double label_smoothing = 0.0;  ///< share of a target that is spread over all classes in training
  bool channels_last = true;     ///< activations as (B, H, W, C) in memory
};

/// Adapters that are trained while the weights stay as they are (plan/adapter.h).
struct AdapterConfig {
  AdapterKind kind = AdapterKind::kNone;
  int64_t rank = 16;
  double alpha = 32.0;  ///< their product is multiplied by alpha / rank
  /// The linear layers of blocks that have one: "all", or their names, separated by commas.
  std::string targets = "all";
  double dropout = 0.0;      ///< of what A reads, in training
  std::string weights = "";  ///< a folder of PEFT with what training begins with; empty: B is zero
  AdapterBase base = AdapterBase::kModel;
};

struct ModelConfig {
  std::string preset = "";  ///< a built-in name; its values fill the fields below unless they are given
  ModelFamily family = ModelFamily::kGpt2;
  int64_t n_layers = 4;
  int64_t d_model = 128;
  int64_t n_heads = 4;
  int64_t n_kv_heads = 0;  ///< 0: as many as n_heads
  int64_t head_dim = 0;    ///< width of a head; 0: d_model / n_heads
  int64_t d_ff = 0;        ///< 0: 4 * d_model
  int64_t vocab_size = 256;
  int64_t max_seq_len = 0;  ///< longest sequence, positions of gpt2's table; 0: data.seq_len
  bool tie_embeddings = true;
  double dropout = 0.0;
  AttentionKind attention = AttentionKind::kAuto;
  double norm_eps = 1e-5;
  double rope_theta = 500000.0;
  RopeScaling rope_scaling = RopeScaling::kNone;
  double rope_factor = 8.0;            ///< llama3: how much longer the longest wavelengths become
  double rope_low_freq_factor = 1.0;   ///< llama3: wavelengths above rope_original_len / this become longer
  double rope_high_freq_factor = 4.0;  ///< llama3: those below rope_original_len / this stay
  int64_t rope_original_len = 8192;    ///< llama3: tokens a sequence of the first training
  std::string weights = "";            ///< what training begins with; empty: random values of the seed
  AdapterConfig adapter = {};
  VisionConfig vision = {};  ///< counts instead of what is above where `family` reads images
};

/// The value of data.path that stands for the data of a program of one's own.
inline constexpr const char* kProgramData = "program";

/// The value of data.tokenizer with which each byte of text is a token.
inline constexpr const char* kByteTokenizer = "byte";

/// A text of several that a run reads.
struct MixtureSource {
  std::string name;
  std::string path = {};  ///< as data.path has it
  double weight = 1.0;    ///< beside those of the others
  bool operator==(const MixtureSource&) const = default;
};

/// Sources by rising names; empty: data.path is the only one.
struct Mixture {
  std::vector<MixtureSource> sources = {};
  bool operator==(const Mixture&) const = default;
};
/// One line of JSON, which is YAML, too; empty without sources.
std::string to_text(const Mixture& mixture);
/// The other way round, from any YAML; none for what is no mapping. Throws ConfigError naming the source
/// whose entry is wrong.
std::optional<Mixture> parse_mixture(std::string_view text);

struct DataConfig {
  DataKind kind = DataKind::kAuto;
  /// A file or folder; "builtin": the C++ headers of libtorch, or digits drawn from the system's fonts;
  /// "program": what the program that trains has (train/program.h).
  std::string path = "builtin";
  Mixture mixture = {};                    ///< texts instead of `path`
  std::string tokenizer = kByteTokenizer;  ///< or the path of a file or folder
  DataFormat format = DataFormat::kText;
  LossOn loss_on = LossOn::kAnswers;  ///< of other formats than kText
  std::string chat_template = {};     ///< a file, of kChat; empty: the template beside the tokenizer
  int64_t seq_len = 128;              ///< 1 of images
  bool reset_attention = false;       ///< documents in a sequence are kept apart
  double val_fraction = 0.02;
  // Images alone: what training varies (data/images/transform.h, data/images/loader.h).
  int64_t pad = 0;
  bool flip = false;
  bool resized_crop = false;
  double least_area = 0.08;
  double mixup = 0.0;
  int64_t threads = 0;  ///< of each rank that prepare batches; 0: cores of a rank, at most 8
};

struct TrainConfig {
  int64_t steps = 100;        ///< where there are no epochs; at the start of a run with them, what they make
  int64_t epochs = 0;         ///< passes over the training data; 0: `steps` says how long
  int64_t global_batch = 16;  ///< samples (sequences, images) per optimizer step over all ranks
  int64_t rank_batch = 0;   ///< the same on each data-parallel rank, instead of global_batch; 0: that counts
  int64_t micro_batch = 0;  ///< samples per forward on one rank; 0: global_batch / data-parallel ranks
  double grad_clip = 1.0;   ///< global L2 norm; 0: no clipping
  int64_t val_every = 0;    ///< steps between validations; 0: at the end, and of each epoch
  int64_t profile_steps = 0;  ///< steps that rank 0 traces, after the warm-up
  int64_t val_batches = 16;   ///< global batches per validation; 0: no validation
  int64_t early_stop = 0;     ///< validations no better than the best before that end a run; 0: none do
  double early_stop_min_delta = 0.0;  ///< by how much a validation loss must be lower to be better
  std::string monitor = "";           ///< what else than the loss tells which validation is better
  int64_t fast_dev_run = 0;           ///< steps of a run that tries everything once; 0: a real run
  int64_t log_every = 10;
  int64_t sample_tokens = 0;  ///< length of the text generated at the end; 0: none
  std::string sample_prompt = "\n";
  /// kOn: a GPU that trains alone replays recorded passes; kAuto: only where it waits for its host
  CudaGraphs cuda_graphs = CudaGraphs::kAuto;
  std::string step_program =
      "";                      ///< a file of programs that ranks run instead of the planned ones; empty: none
  bool tune_matmul = true;     ///< on a GPU, matrix products by the fastest algorithm with the same bits
  bool deterministic = false;  ///< equal runs end with equal weights on GPUs, too; tune_matmul is off then
};

/// optim.weight_decay where nobody says it. AdamW shrinks weights beside its step (decoupled decay), and 0.1
/// is what language models are trained with. SGD adds the decay to the gradient (L2), where 0.1 would hold
/// weights near 0, and its users expect none.
constexpr double usual_weight_decay(OptimizerName name) {
  return name == OptimizerName::kAdamW ? 0.1 : 0.0;
}

struct OptimConfig {
  OptimizerName name = OptimizerName::kAdamW;
  OptimState state = OptimState::kFp32;
  double lr = 3e-4;
  double min_lr = 0.0;
  int64_t warmup_steps = 0;
  LrSchedule schedule = LrSchedule::kCosine;
  int64_t step_every =
      0;  ///< steps schedule only: steps between drops of the rate; 0: a third of those after warm-up
  double step_factor = 0.1;  ///< steps schedule only: what a drop multiplies the rate by
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double momentum = 0.9;  ///< sgd only
  bool nesterov = false;  ///< sgd only
  double ema = 0.0;       ///< decay of the average of parameters over steps; 0: none is kept
  double weight_decay = usual_weight_decay(name);  ///< of the parameters whose ParamSpec::decays
};

/// Whether parameters that are sharded are freed between forward and backward.
struct ReshardAfterForward {
  enum class Kind {
    kAsPolicy,  ///< auto
    kFree,      ///< true
    kKeep,      ///< false
    kOver       ///< they stay sharded over `ranks` neighbouring ranks
  };
  Kind kind = Kind::kAsPolicy;
  int64_t ranks = 0;  ///< kOver only
  bool operator==(const ReshardAfterForward&) const = default;
};
/// "auto", "true", "false" or the number of ranks.
std::string to_text(const ReshardAfterForward& reshard);
/// The other way round; none for other words and for less than 1 rank.
std::optional<ReshardAfterForward> parse_reshard(std::string_view text);

struct ParallelConfig {
  PolicyName policy = PolicyName::kFsdp;
  Sharding sharding = Sharding::kAuto;
  ReshardAfterForward reshard_after_forward = {};
  ReduceWhen reduce_when = ReduceWhen::kOncePerStep;
  bool overlap = true;   ///< communication beside computation, on devices that can
  int64_t prefetch = 1;  ///< units gathered ahead
  CommHook comm_hook = CommHook::kNone;
  int64_t hook_rank = 4;       ///< powersgd
  double hook_density = 0.01;  ///< topk
  int64_t hook_start = 10;     ///< powersgd, topk: plain steps before
  int64_t local_steps = 8;     ///< local_sgd: steps between averages
  double bucket_mib = 0.0;     ///< size of reduction buckets; 0: a unit is a block
  int64_t dp_replicate = 1;
  int64_t dp_shard = 0;  ///< 0: all ranks that the other axes leave
  int64_t tp = 1;
  int64_t pp = 1;
  int64_t cp = 1;
  CpKind cp_kind = CpKind::kAuto;
  bool async_tp = false;  ///< products of cut layers in pieces, beside the transfers of other pieces
};

/// Where a model is cut into the stages of a pipeline.
struct StageCut {
  enum class Kind {
    kCost,   ///< where the rank that computes most computes least, also inside blocks
    kEven,   ///< as many blocks in each stage, or one more
    kBlocks  ///< so many blocks in each; the head goes with the last one
  };
  Kind kind = Kind::kCost;
  std::vector<int64_t> blocks = {};  ///< kBlocks only, by stage
  bool operator==(const StageCut&) const = default;
};
/// "cost", "even" or numbers of blocks, "3,3,2".
std::string to_text(const StageCut& cut);
/// The other way round; none for other words.
std::optional<StageCut> parse_cut(std::string_view text);

/// For parallel.pp above 1.
struct PipelineConfig {
  ScheduleName schedule = ScheduleName::k1F1B;
  std::string file = "";                   ///< a schedule as CSV, instead; empty: none
  Placement placement = Placement::kLoop;  ///< of the stages of `file`
  int64_t micro_batches = 0;               ///< a step, of each pipeline; 0: as train.micro_batch says
  int64_t chunks = 2;                      ///< stages a rank, of schedules that leave it open
  StageCut split = {};
  int64_t ahead = 1;         ///< receive buffers beyond those that the schedule needs
  bool spread_head = false;  ///< every rank has some rows of the head's weight
};

/// Dynamic scaling of the loss, so that gradients stay inside the range of fp16.
struct LossScaleConfig {
  double initial = 65536.0;
  int64_t window = 1000;   ///< finite steps in a row before the scale doubles
  int64_t hysteresis = 2;  ///< overflows before it is halved
  double minimum = 1.0;
};

/// Blocks whose linear layers stay as precision.compute has them.
struct Fp8Skip {
  bool first = false, last = false;
  std::vector<int64_t> blocks = {};
  bool operator==(const Fp8Skip&) const = default;
};
/// "none", or "first", "last" and numbers of blocks from 0 on with commas between.
std::string to_text(const Fp8Skip& skip);
/// The other way round; none for other words.
std::optional<Fp8Skip> parse_skip(std::string_view text);

/// Products of the linear layers of blocks in FP8, and of the head. Embeddings, norms and attention have
/// none.
struct Fp8Config {
  Fp8 recipe = Fp8::kOff;
  Fp8Scales scales = Fp8Scales::kDynamic;
  int64_t history = 16;  ///< steps that delayed scales look back
  Fp8Gradients gradients = Fp8Gradients::kE4m3;
  Fp8Fast fast = Fp8Fast::kForward;
  Fp8Skip skip = {};
  bool head = false;
  bool gather = true;  ///< tensorwise: matrices of blocks are gathered as the bytes that are multiplied
  Fp8Fallback fallback = Fp8Fallback::kAbort;
};

struct PrecisionConfig {
  Dtype compute = Dtype::kFp32;
  ReduceDtype reduce = ReduceDtype::kAuto;
  SumDtype accumulate = SumDtype::kFp32;
  LossScaling scaling = LossScaling::kAuto;
  LossScaleConfig loss_scale = {};
  Fp8Config fp8 = {};
};

inline constexpr int64_t kFp32Bytes = 4;
/// Bytes of an element.
inline int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kFp32 ? kFp32Bytes : 2;
}
/// Whether the loss is scaled dynamically: precision.scaling with auto resolved.
inline bool scales_loss(const PrecisionConfig& precision) {
  if (precision.scaling != LossScaling::kAuto) return precision.scaling == LossScaling::kDynamic;
  return precision.compute == Dtype::kFp16;
}
/// precision.reduce with auto resolved.
inline Dtype wire_dtype(const PrecisionConfig& precision) {
  switch (precision.reduce) {
    case ReduceDtype::kFp32:
      return Dtype::kFp32;
    case ReduceDtype::kBf16:
      return Dtype::kBf16;
    case ReduceDtype::kAuto:
      break;
  }
  return precision.compute == Dtype::kFp16 ? Dtype::kFp32 : precision.compute;
}

struct MemoryConfig {
  Recompute recompute = Recompute::kAuto;
  int64_t recompute_every = 1;    ///< of so many blocks one
  int64_t loss_chunk_mib = 1024;  ///< most that logits take at once on a GPU
};

struct CheckpointConfig {
  bool final_weights = true;  ///< write the weights of the finished run as safetensors
  bool best = false;          ///< and those of the best validation so far
  int64_t every = 0;          ///< steps between checkpoints; 0: none are written
  int64_t keep = 2;           ///< how many of them stay; 0: all
  bool async = true;          ///< training goes on while one is written
};

struct CommConfig {
  double timeout_s = 300.0;  ///< deadline of every wait
  bool peer_memory = true;   ///< ranks of one host read each other's memory
  GatherBy gather = GatherBy::kAuto;
  Reduction reduction = Reduction::kOrdered;
};

struct Config {
  std::string name = "run";
  int64_t seed = 42;
  Device device = Device::kAuto;
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimConfig optim;
  ParallelConfig parallel;
  PipelineConfig pipeline;
  PrecisionConfig precision;
  MemoryConfig memory;
  CheckpointConfig checkpoint;
  CommConfig comm;
};

/// A member that is written as a word and kept as a value of its own type.
struct WordRef {
  void* member;
  std::string (*read)(const void* member);
  bool (*write)(void* member, std::string_view word);  ///< false: `word` means nothing to it
};

/// A field's place and rules. The pointers lead into the Config that fields() was called with.
struct Field {
  std::string key;  ///< "train.steps"
  std::variant<int64_t*, double*, bool*, std::string*, WordRef> value;
  std::string help;                  ///< one line, with unit
  std::vector<std::string> choices;  ///< words and strings only; empty: any that can be read
  std::optional<double> min, max;    ///< numbers only, inclusive
  std::string form = {};             ///< words without choices: what can be read
  bool is_mapping = false;           ///< a word that YAML may have as a mapping
};

/// The value of a field as it is written; that of a word is a string.
std::variant<int64_t, double, bool, std::string> value_of(const Field& field);

/// "integer", "number", "boolean" or "string": how JSON schema calls the type of value_of().
std::string_view type_name(const Field& field);

/// The table. Order is the order of `config show`.
std::vector<Field> fields(Config& config);

/// Where a value came from: "default", "preset gpt-tiny", "configs/quickstart.yaml:5:3", "--train.steps",
/// "TRIREME__TRAIN__STEPS", "derived: 4 * model.d_model".
using Origins = std::map<std::string, std::string>;

struct ResolvedConfig {
  Config config;
  Origins origins;  ///< one entry per key
  /// A sentence each about what one source said and another has replaced.
  std::vector<std::string> notes = {};
};

/// The user's settings, in rising precedence: file < environment (TRIREME__SECTION__KEY) < overrides. A
/// preset stands before the keys of the source that names it, and replaces the shape of the model that
/// sources before that one gave.
struct ConfigSources {
  std::string path = "";                    ///< a YAML file; empty: none
  std::string text = "";                    ///< YAML text instead of a file, named "<text>" in messages
  std::vector<std::string> overrides = {};  ///< "section.key=value", without dashes
  bool tokenizes = true;  ///< false: tokens are random, and no tokenizer limits their number
};

/// Reads, merges and checks. Throws ConfigError (exit 2) that names key, value, line:column, nearest name or
/// range.
ResolvedConfig load(const ConfigSources& sources, const Environment& environment);

/// YAML that load() reads back to the same Config, every key present.
std::string to_yaml(const ResolvedConfig& resolved, bool with_origins = false);

/// Keys whose values differ, in the order of the table.
std::vector<std::string> differing_keys(const Config& a, const Config& b);

/// JSON schema (draft 2020-12) of the YAML file, for editors.
std::string json_schema();

/// The rules between fields that load() applies, for a config that a program has changed. Throws ConfigError.
void check_config(const Config& config);

/// The fields of `table` with `word` in their key, in any case and with hyphens for underscores; empty: all.
std::vector<Field> fields_named(std::vector<Field> table, std::string_view word);

/// One line a key of `table`: name, type, default, range or choices, help. For --help and docs.
std::string describe_fields(const std::vector<Field>& table);

}  // namespace trireme::plan
