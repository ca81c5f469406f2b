#pragma once
// The choices of a config: one enum a question, with the words that YAML and the command line use for its
// values. Text becomes a value once, when a config is read; the rest of the code switches over values.
#include <fmt/core.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

namespace trireme::plan {

/// The words for the values of an enum, in the order of the enumerators. Specialised below each enum.
template <typename Enum>
inline constexpr auto kNames = nullptr;

template <typename Enum>
concept Choice = std::is_enum_v<Enum> && requires {
  kNames<Enum>.size();
};

template <Choice Enum>
constexpr std::string_view name(Enum value) {
  return kNames<Enum>[static_cast<size_t>(value)];
}

/// The value of a word; none when it is no word of this enum.
template <Choice Enum>
constexpr std::optional<Enum> parse(std::string_view word) {
  for (size_t i = 0; i < kNames<Enum>.size(); ++i) {
    if (kNames<Enum>[i] == word) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

/// All values of an enum in their order.
template <Choice Enum>
constexpr auto all_values() {
  std::array<Enum, kNames<Enum>.size()> values{};
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<Enum>(i);
  return values;
}

/// Where tensors live.
enum class Device { kAuto, kCpu, kCuda };
template <>
inline constexpr auto kNames<Device> = std::to_array<std::string_view>({"auto", "cpu", "cuda"});

/// Which record describes the model: of plan/model_family.h, or, where it reads images, of
/// plan/vision_model.h.
enum class ModelFamily { kGpt2, kLlama, kMlp, kResNet, kLeNet };
template <>
inline constexpr auto kNames<ModelFamily> = std::to_array<std::string_view>({"gpt2", "llama", "mlp", "resnet",
                                                                             "lenet"});
constexpr bool reads_images(ModelFamily family) {
  return family == ModelFamily::kResNet || family == ModelFamily::kLeNet;
}

/// The layers of a residual network before its first block.
enum class ImageStem {
  kCifar,    ///< 3x3, for images of some 32 pixels
  kImageNet  ///< 7x7 and a maximum over 3x3, each with stride 2
};
template <>
inline constexpr auto kNames<ImageStem> = std::to_array<std::string_view>({"cifar", "imagenet"});

/// The norm behind each convolution of a residual network.
enum class ImageNorm {
  kBatch,      ///< over the samples of a rank's micro-batch
  kSyncBatch,  ///< over those of all data-parallel ranks
  kGroup       ///< over groups of channels of one sample (Wu and He 2018)
};
template <>
inline constexpr auto kNames<ImageNorm> = std::to_array<std::string_view>({"batch", "sync_batch", "group"});

/// The data that a run reads; kAuto: the kind that its model reads.
enum class DataKind { kAuto, kText, kImages };
template <>
inline constexpr auto kNames<DataKind> = std::to_array<std::string_view>({"auto", "text", "images"});

/// The kind of records in training text: running text, prompts with answers, or conversations.
enum class DataFormat { kText, kAnswers, kChat };
template <>
inline constexpr auto kNames<DataFormat> = std::to_array<std::string_view>({"text", "answers", "chat"});

/// The tokens of prompts with answers, or of conversations, whose loss counts.
enum class LossOn { kAnswers, kAll };
template <>
inline constexpr auto kNames<LossOn> = std::to_array<std::string_view>({"answers", "all"});

/// How rotary frequencies change for texts longer than those that a model was first trained on; kLlama3: as
/// Llama 3.1 does it.
enum class RopeScaling { kNone, kLlama3 };
template <>
inline constexpr auto kNames<RopeScaling> = std::to_array<std::string_view>({"none", "llama3"});

/// Whether passes are recorded as CUDA graphs; kAuto: where a GPU waits for its host.
enum class CudaGraphs { kAuto, kOff, kOn };
template <>
inline constexpr auto kNames<CudaGraphs> = std::to_array<std::string_view>({"auto", "off", "on"});

/// Which record of plan/optimizer.h describes the optimizer.
enum class OptimizerName { kAdamW, kSgd };
template <>
inline constexpr auto kNames<OptimizerName> = std::to_array<std::string_view>({"adamw", "sgd"});

/// The learning rate after warm-up.
enum class LrSchedule { kCosine, kLinear, kConstant, kSteps, kRange };
template <>
inline constexpr auto kNames<LrSchedule> = std::to_array<std::string_view>({"cosine", "linear", "constant",
                                                                            "steps", "range"});

/// The policies of data parallelism: the rows of plan/policy.h by name; fsdp has several.
enum class PolicyName { kDdp, kZero1, kZero2, kZero3, kFsdp };
template <>
inline constexpr auto kNames<PolicyName> = std::to_array<std::string_view>({"ddp", "zero1", "zero2", "zero3",
                                                                            "fsdp"});

/// Which of the rows of fsdp; kAuto: the row that suits the mesh.
enum class Sharding { kAuto, kFullShard, kShardGradOp, kNoShard, kHybridShard, kHybridShardZero2 };
template <>
inline constexpr auto kNames<Sharding> = std::to_array<std::string_view>(
    {"auto", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"});

/// When gradients are reduced. kOncePerStep keeps whole gradients between micro-batches (fp32);
/// kEveryMicroBatch keeps only what the policy says, for one reduction each.
enum class ReduceWhen { kOncePerStep, kEveryMicroBatch };
template <>
inline constexpr auto kNames<ReduceWhen> = std::to_array<std::string_view>({"once", "every_micro_batch"});

/// How gradients travel smaller than they are; parallel/compression.h has them.
enum class CommHook {
  kNone,
  kFp16,      ///< fp16 on the wire, summed in fp32
  kInt8,      ///< int8 with a scale per 256 elements, error feedback
  kTopK,      ///< the largest elements only, error feedback
  kPowerSgd,  ///< matrices as products of two thin ones (Vogels et al. 2019), error feedback, warm start
  kLocalSgd   ///< no gradients travel; parameters are averaged every so many steps (Stich 2019)
};
template <>
inline constexpr auto kNames<CommHook> = std::to_array<std::string_view>({"none", "fp16", "int8", "topk",
                                                                          "powersgd", "local_sgd"});
/// Elements that share a scale of four bytes under kInt8.
inline constexpr int64_t kInt8ScaleBlock = 256;
/// Whether gradients are reduced plainly in the first steps (parallel.hook_start).
constexpr bool starts_late(CommHook hook) {
  return hook == CommHook::kTopK || hook == CommHook::kPowerSgd;
}

/// The exchange of ranks along cp for attention.
enum class CpKind {
  kAuto,     ///< that which sends fewer bytes, of those that the heads and the length allow
  kUlysses,  ///< tokens for heads, and back (Jacobs et al. 2023)
  kRing      ///< keys and values go around (Liu et al. 2023)
};
template <>
inline constexpr auto kNames<CpKind> = std::to_array<std::string_view>({"auto", "ulysses", "ring"});

/// The way in which blocks compute attention: with the fastest kernels that fit, which keep no scores, or as
/// its formula has it, in products and a softmax whose scores are kept for backward.
enum class AttentionKind { kAuto, kEager };
template <>
inline constexpr auto kNames<AttentionKind> = std::to_array<std::string_view>({"auto", "eager"});

/// In how many bits an optimizer keeps its numbers for each element. Formats with fewer bits than fp32 are
/// rounded to at random; kInt8: eight neighbours share a power of two (kernels/moment_format.h).
enum class OptimState { kFp32, kBf16, kInt8 };
template <>
inline constexpr auto kNames<OptimState> = std::to_array<std::string_view>({"fp32", "bf16", "int8"});

/// The dtype of parameters and activations.
enum class Dtype { kFp32, kBf16, kFp16 };
template <>
inline constexpr auto kNames<Dtype> = std::to_array<std::string_view>({"fp32", "bf16", "fp16"});

/// Which elements share a scale where linear layers are multiplied in FP8.
enum class Fp8 {
  kOff,
  kTensorwise,  ///< all of a tensor
  kRowwise,     ///< a row of an operand, along which products are summed
  kBlockwise    ///< 1 x 128 of activations and gradients, 128 x 128 of weights (DeepSeek-V3, 2024)
};
template <>
inline constexpr auto kNames<Fp8> = std::to_array<std::string_view>({"off", "tensorwise", "rowwise",
                                                                     "blockwise"});

/// Where the scales of activations and gradients come from: from the tensor that is cast, or from the largest
/// magnitudes of earlier steps, so that a tensor need not be read before it is cast.
enum class Fp8Scales { kDynamic, kDelayed };
template <>
inline constexpr auto kNames<Fp8Scales> = std::to_array<std::string_view>({"dynamic", "delayed"});

/// The format of gradients of outputs in FP8.
enum class Fp8Gradients { kE4m3, kE5m2 };
template <>
inline constexpr auto kNames<Fp8Gradients> = std::to_array<std::string_view>({"e4m3", "e5m2"});

/// Which products in FP8 are summed faster, with fewer bits.
enum class Fp8Fast { kNone, kForward, kAll };
template <>
inline constexpr auto kNames<Fp8Fast> = std::to_array<std::string_view>({"none", "forward", "all"});

/// The behaviour of a run whose device or shapes have no FP8; kEmulate: a CPU computes the same numbers.
enum class Fp8Fallback { kAbort, kBf16, kEmulate };
template <>
inline constexpr auto kNames<Fp8Fallback> = std::to_array<std::string_view>({"abort", "bf16", "emulate"});

/// The dtype in which gradients of several micro-batches are added up.
enum class SumDtype { kFp32, kCompute };
template <>
inline constexpr auto kNames<SumDtype> = std::to_array<std::string_view>({"fp32", "compute"});

/// The dtype of gradients on the wire; kAuto: that of parameters, but fp32 for fp16.
enum class ReduceDtype { kAuto, kFp32, kBf16 };
template <>
inline constexpr auto kNames<ReduceDtype> = std::to_array<std::string_view>({"auto", "fp32", "bf16"});

/// Scaling of the loss; kAuto: dynamic for fp16, else none.
enum class LossScaling { kAuto, kDynamic, kNone };
template <>
inline constexpr auto kNames<LossScaling> = std::to_array<std::string_view>({"auto", "dynamic", "none"});

/// The kind of adapter that is trained in place of a model's weights; kNone: the weights are.
enum class AdapterKind { kNone, kLora, kDora };
template <>
inline constexpr auto kNames<AdapterKind> = std::to_array<std::string_view>({"none", "lora", "dora"});

/// The form in which matrices of blocks under adapters are held; kModel: in the dtype of computation; kNf4:
/// in four bits (base/nf4_format.h).
enum class AdapterBase { kModel, kNf4 };
template <>
inline constexpr auto kNames<AdapterBase> = std::to_array<std::string_view>({"model", "nf4"});

/// The activations that backward computes again instead of keeping them; kCheap: outputs of norms and
/// activations, but not attention and matrix products; kBlock: all of a block; kAllButAttention: all of it
/// but the output of its attention; kAuto: kCheap or kNone, as settle_recompute() decides.
enum class Recompute { kAuto, kNone, kCheap, kAllButAttention, kBlock };
template <>
inline constexpr auto kNames<Recompute> = std::to_array<std::string_view>({"auto", "none", "cheap",
                                                                           "all_but_attention", "block"});
constexpr bool computes_blocks_again(Recompute recompute) {
  return recompute == Recompute::kAllButAttention || recompute == Recompute::kBlock;
}

/// Who copies the bytes of an all-gather over peer memory of GPUs: kernels, or copy engines.
enum class GatherBy { kAuto, kKernels, kCopies };
template <>
inline constexpr auto kNames<GatherBy> = std::to_array<std::string_view>({"auto", "kernels", "copies"});

/// Who sums gradients over ranks: our own fixed tree in fp32, or the backend in its order and the wire's
/// dtype.
enum class Reduction { kOrdered, kBackend };
template <>
inline constexpr auto kNames<Reduction> = std::to_array<std::string_view>({"ordered", "backend"});

/// The order in which the ranks of a pipeline run their passes (plan/schedule.h).
enum class ScheduleName {
  kGpipe,
  k1F1B,
  kInterleaved1F1B,
  kLoopedBfs,
  kZbH1,
  kZbH2,
  kInterleavedZb,
  kZbV,
  kVHalf,
  kVMin,
  kDualPipe,
  kDualPipeV
};
template <>
inline constexpr auto kNames<ScheduleName> =
    std::to_array<std::string_view>({"gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2",
                                     "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe", "dualpipe_v"});

/// Which rank of a pipeline has which of the stages.
enum class Placement {
  kLoop,    ///< stage s on rank s mod ranks
  kV,       ///< two a rank, there and back: rank r has r and 2 ranks - 1 - r
  kTwoWays  ///< two copies of the model in opposite directions; the second half of the micro-batches takes
            ///< the second, whose stage s is on rank ranks - 1 - s
};
template <>
inline constexpr auto kNames<Placement> = std::to_array<std::string_view>({"loop", "v", "two_ways"});

}  // namespace trireme::plan

template <trireme::plan::Choice Enum>
struct fmt::formatter<Enum, char> : fmt::formatter<std::string_view, char> {
  template <typename Context>
  auto format(Enum value, Context& context) const {
    return fmt::formatter<std::string_view, char>::format(trireme::plan::name(value), context);
  }
};
