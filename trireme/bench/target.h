#pragma once
// Targets: what the lab measures. A target is one frozen workload and several ways to train it, of which the
// first is the reference for all others. Targets are plain data; adding one is a row in targets/.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::bench {

/// The result that an arm must share with the reference before their times are compared.
enum class Owed {
  kSameWeights,  ///< the digest of the final weights, and every loss
  kSameLosses,   ///< every loss within loss_bound() of the workload's precision, relative
  kNearLosses,   ///< every loss within Arm::bound, relative
  kFiniteLosses  ///< it trains another batch by declaration; its losses are finite
};

/// One way to train the workload of a target.
struct Arm {
  std::string name;
  std::vector<std::string> keys = {};  ///< "section.key=value", over those of the workload
  Owed owed = Owed::kSameWeights;
  double bound = 0.0;      ///< of kNearLosses
  int64_t ranks = 0;       ///< 0: those of the target; an arm that wants more than these is left out
  bool needs_gpu = false;  ///< left out on CPUs
};

/// Arms, and what is different between them.
struct Comparison {
  std::string difference;  ///< in words
  std::string expected;    ///< which arm should be better, and in what
  std::vector<Arm> arms;   ///< the first is the reference; empty: there is no such comparison
};

/// The number that a run comes down to.
enum class Statistic {
  kMedian,  ///< of its steady steps
  kMean     ///< where only some steps have what is compared
};

struct Target {
  std::string name;                   ///< "zero1"; listed as "train:zero1"
  std::vector<std::string> chapters;  ///< the first is its own; the others list it, too
  std::vector<std::string> aliases = {};
  std::string summary;                                ///< one line
  std::vector<std::string> workload;                  ///< keys of all arms
  std::vector<std::string> on_cpu = {}, on_gpu = {};  ///< more of them, by device
  Comparison declared;                                ///< one thing is different
  Comparison documents = {};  ///< what published scripts call baseline and optimized: several things
  std::vector<int64_t> ranks = {2, 4, 8};  ///< numbers of ranks that it takes, the usual one first
  bool needs_gpu = false;                  ///< skipped on CPUs
  std::string on_cpu_with = {};            ///< unless this key is given: "precision.fp8_fallback=emulate"
  Statistic statistic = Statistic::kMedian;
  double limit_s = 300.0;  ///< most seconds of one run
  bool pipelined = false;  ///< parallel.pp is the number of ranks
};

/// All targets, in the order in which they are listed.
const std::vector<Target>& all_targets();

/// Chapters with their targets in order: "labs/train_distributed".
std::vector<std::string> all_chapters();

/// A target by name, and what the name says beside it.
struct Choice {
  const Target* target = nullptr;
  std::optional<int64_t> ranks = {};  ///< "..._2stages"
};

/// The targets of a word: a name with or without "train:", an alias, a file such as "optimized_ddp.py", each
/// with or without its folder, or a chapter, which is all of its targets. Throws ConfigError with the nearest
/// names for any other word, and for what another command measures.
std::vector<Choice> find_targets(const std::string& word);

/// All targets of a chapter. Throws ConfigError with the nearest name where there is none.
std::vector<Choice> targets_of_chapter(const std::string& chapter);

/// "train:zero1".
std::string full_name(const Target& target);

/// "the same weights, bit for bit".
std::string owed_text(const Arm& arm);

/// The relative difference that losses of equal sums in another order may have, by precision.compute.
double loss_bound(const std::string& compute);

/// The arms that run on `device` ("cpu" or "cuda") and on at most `ranks` ranks.
std::vector<Arm> arms_on(const Comparison& comparison, const std::string& device, int64_t ranks);

/// Why `target` does not run on `device` with `ranks` ranks (none: not asked for) and the user's keys; empty:
/// it does.
std::string obstacle(const Target& target, const std::string& device, std::optional<int64_t> ranks,
                     const std::vector<std::string>& keys);

/// All keys of an arm but the user's: the workload's, those of the device, and its own.
std::vector<std::string> keys_of(const Target& target, const Arm& arm, const std::string& device,
                                 int64_t ranks);

/// The number of ranks of `arm` where its target has `ranks`.
inline int64_t ranks_of(const Arm& arm, int64_t ranks) {
  return arm.ranks > 0 ? arm.ranks : ranks;
}

}  // namespace trireme::bench
