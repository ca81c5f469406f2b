// Translates DeepSpeed's keys: each by its row of the table, and those that depend on each other together.
#include "trireme/plan/deepspeed.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <span>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/deepspeed_keys.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

using Type = DeepSpeedType;
using Effect = DeepSpeedEffect;
using Given = DeepSpeedValue;
using Strings = std::vector<std::string>;

constexpr size_t kMostJsonBytes = size_t{1} << 20;

std::string lower_case(std::string word) {
  std::ranges::transform(word, word.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return word;
}

/// Every whole number is a number.
bool is_of(Type given, Type wanted) {
  return wanted == Type::kAny || given == wanted || (given == Type::kWhole && wanted == Type::kNumber);
}

std::string_view in_words(Type type) {
  static constexpr std::string_view kWords[] = {"true or false",     "a whole number", "a number",
                                                "a list of numbers", "a word",         "a value"};
  return kWords[static_cast<size_t>(type)];
}

/// DeepSpeed's name of an optimizer in lower case, and ours.
struct OptimizerType {
  std::string_view name;
  OptimizerName ours;
};
constexpr OptimizerType kOptimizerTypes[] = {{"adam", OptimizerName::kAdamW},
                                             {"adamw", OptimizerName::kAdamW},
                                             {"fusedadam", OptimizerName::kAdamW},
                                             {"sgd", OptimizerName::kSgd}};

/// A parameter of optimizers, and the value that counts where a file leaves it out; empty: none, it is no
/// parameter of that optimizer.
struct OptimizerParameter {
  std::string_view name, ours, of_adam, of_sgd;
};
constexpr OptimizerParameter kOptimizerParameters[] = {{"lr", "optim.lr", "0.001", "0.001"},
                                                       {"eps", "optim.eps", "1e-08", ""},
                                                       {"weight_decay", "optim.weight_decay", "0", "0"},
                                                       {"momentum", "optim.momentum", "", "0"},
                                                       {"nesterov", "optim.nesterov", "", "false"}};

/// PyTorch's own AdamW, which torch_adam asks for, decays where a file leaves the decay out.
constexpr std::string_view kDecayOfTorch = "0.01";

/// DeepSpeed's name of a schedule in lower case, and ours.
struct SchedulerType {
  std::string_view name;
  LrSchedule ours;
};
constexpr SchedulerType kSchedulerTypes[] = {{"warmuplr", LrSchedule::kConstant},
                                             {"warmupdecaylr", LrSchedule::kLinear},
                                             {"warmupcosinelr", LrSchedule::kCosine}};

/// Keys that choose the dtype of parameters and activations.
constexpr std::pair<const char*, std::string_view> kDtypeSwitches[] = {
    {"fp16.enabled", "fp16"}, {"bf16.enabled", "bf16"}, {"bfloat16.enabled", "bf16"}};

class Translation {
 public:
  Translation(const DeepSpeedFile& file, const Config& ours, std::vector<Given> values)
      : file_(file), ours_(ours), values_(std::move(values)) {}

  DeepSpeedConfig translate() {
    // First: parameters of a type that is not here are unknown, which is beside the point.
    const OptimizerType* const optimizer = type_in<OptimizerType>(
        "optimizer", kOptimizerTypes, "Trireme has AdamW (also as Adam, FusedAdam) and SGD; choose one");
    const SchedulerType* const scheduler = type_in<SchedulerType>(
        "scheduler", kSchedulerTypes, "there are WarmupLR, WarmupDecayLR and WarmupCosineLR; choose one");
    for (const Given& value : values_) apply(value);
    settle_batch();
    if (optimizer != nullptr) settle_optimizer(*optimizer, *find("optimizer.type"));
    if (scheduler != nullptr) settle_schedule(*scheduler, *find("scheduler.type"));
    settle_precision();
    settle_wire();
    settle_tensor_parallel();
    settle_policy();
    note_what_is_left_out();
    for (auto& [about, keys] : grouped_notes_)
      result_.notes.push_back(fmt::format("{}: {}: {}", file_.path, join(keys, ", "), about));
    return std::move(result_);
  }

 private:
  // ---- looking up and saying

  const Given* find(const std::string& key) const {
    const auto found = std::ranges::find(values_, key, &Given::key);
    return found == values_.end() ? nullptr : &*found;
  }
  /// None where the file leaves `key` out or open.
  const Given* closed(const std::string& key) const {
    const Given* const value = find(key);
    return value == nullptr || value->open ? nullptr : value;
  }
  bool is_open(const std::string& key) const {
    const Given* const value = find(key);
    return value != nullptr && value->open;
  }
  bool is_true(const std::string& key) const {
    const Given* const value = closed(key);
    return value != nullptr && value->text == "true";
  }
  bool has_section(const std::string& prefix) const {
    return std::ranges::any_of(values_, [&](const Given& value) { return value.key.starts_with(prefix); });
  }

  void set(std::string key, std::string value, const std::string& why) {
    std::erase_if(result_.settings, [&](const DeepSpeedSetting& setting) { return setting.key == key; });
    result_.settings.push_back({std::move(key), std::move(value), fmt::format("{}: {}", file_.path, why)});
  }

  /// Keys with the same remark share a note.
  void note(const std::string& what, std::string_view about) {
    const auto group = std::ranges::find(grouped_notes_, about, &std::pair<std::string, Strings>::first);
    if (group != grouped_notes_.end())
      group->second.push_back(what);
    else
      grouped_notes_.push_back({std::string(about), {what}});
  }
  void note(const Given& value, std::string_view about) { note(value.key + "=" + value.text, about); }

  [[noreturn]] void refuse(const Given& value, std::string_view why) const {
    throw ConfigError("[plan.deepspeed] {}: {} = {}: {}", file_.path, value.key, value.text, why);
  }

  /// Our value of `key` without the file, "optim.lr=0.003".
  std::string as_ours(const std::string& key) const {
    Config config = ours_;
    for (const Field& field : fields(config)) {
      if (field.key == key) return fmt::format("{}={}", key, format_value(field));
    }
    throw LogicError("[plan.deepspeed] there is no key {}", key);
  }

  // ---- keys by themselves

  void apply(const Given& value) {
    if (value.text == "{}" && has_rows_below(value.key)) return;
    const DeepSpeedKey* const row = find_deepspeed_key(value.key);
    if (row == nullptr) refuse_unknown(value);
    if (row->effect == Effect::kRefused) refuse(value, row->about);
    if (value.open) return keep_ours(*row, value);
    if (!is_of(value.type, row->type))
      refuse(value, fmt::format("this is not {}; correct it", in_words(row->type)));
    switch (row->effect) {
      case Effect::kSets:
        return set(std::string(row->ours), in_our_words(*row, value), value.key);
      case Effect::kOnly:
        if (value.text != row->accepted) refuse(value, row->about);
        return note(value, "as it is here");
      case Effect::kNeedless:
        return note(value, row->about);
      case Effect::kTogether:
      case Effect::kRefused:
        return;
    }
  }

  static bool has_rows_below(const std::string& section) {
    return std::ranges::any_of(deepspeed_keys(),
                               [&](const DeepSpeedKey& row) { return row.key.starts_with(section + "."); });
  }

  std::string in_our_words(const DeepSpeedKey& row, const Given& value) const {
    if (row.words.empty()) return value.text;
    Strings theirs;
    for (const auto& [word, ours] : row.words) {
      if (word == value.text) return std::string(ours);
      theirs.emplace_back(word);
    }
    refuse(value, "it must be one of " + join(theirs, ", "));
  }

  void keep_ours(const DeepSpeedKey& row, const Given& value) {
    if (row.ours.empty()) return note(value, row.effect == Effect::kOnly ? "as it is here" : row.about);
    Strings kept;
    for (const std::string& key : split(row.ours, ','))
      kept.push_back(as_ours(key.substr(key.find_first_not_of(' '))));
    note(fmt::format("{}={} ({})", value.key, value.text, join(kept, ", ")),
         "stays as the other sources of the config have it");
  }

  [[noreturn]] void refuse_unknown(const Given& value) const {
    Strings keys;
    for (const DeepSpeedKey& row : deepspeed_keys()) keys.emplace_back(row.key);
    const std::string near = nearest_name(value.key, keys);
    refuse(value, fmt::format("unknown key{}; correct or remove it",
                              near.empty() ? "" : fmt::format(", did you mean '{}'?", near)));
  }

  // ---- the batch: train_batch_size = micro-batch x accumulation x data-parallel ranks

  /// 0: it is left out or open.
  int64_t count(const std::string& key) const {
    const Given* const value = closed(key);
    if (value == nullptr) return 0;
    constexpr double kMost = 1e9;  // as of train.global_batch
    if (value->number < 1.0 || value->number > kMost)
      refuse(*value, fmt::format("it must be 1 to {}; correct it", kMost));
    return static_cast<int64_t>(value->number);
  }

  void settle_batch() {
    const std::string all_key = "train_batch_size", micro_key = "train_micro_batch_size_per_gpu",
                      steps_key = "gradient_accumulation_steps";
    const int64_t all = count(all_key), micro = count(micro_key), steps = count(steps_key);
    if (all == 0 && micro == 0 && steps == 0) return;
    if (all > 0) {
      set_batch(all, 0, all_key);
      if (micro > 0) return set_micro_batch(all, micro, steps, micro_key);
      if (steps > 0) return set_micro_batch(all, share(all, steps), steps, steps_key);
      return set("train.micro_batch", "0", all_key);
    }
    if (micro == 0) {
      const int64_t ranks = data_parallel_ranks(steps_key, steps);
      const int64_t all_of_ours =
          ours_.train.rank_batch > 0 ? ours_.train.rank_batch * ranks : ours_.train.global_batch;
      return set("train.micro_batch", std::to_string(share(all_of_ours, steps)), steps_key);
    }
    set("train.micro_batch", std::to_string(micro), micro_key);
    const bool ours_says_how_many = steps == 0 && (is_open(all_key) || is_open(steps_key));
    if (!ours_says_how_many) set_batch(0, micro * std::max<int64_t>(steps, 1), micro_key);
  }

  /// Either of all ranks, or of each.
  void set_batch(int64_t global, int64_t of_rank, const std::string& why) {
    if (global > 0) set("train.global_batch", std::to_string(global), why);
    set("train.rank_batch", std::to_string(of_rank), why);
  }

  void set_micro_batch(int64_t all, int64_t micro, int64_t steps, const std::string& why) {
    const std::optional<int64_t> ranks = known_ranks();
    const int64_t of_one_step = micro * ranks.value_or(1);
    const int64_t quotient = all % of_one_step == 0 ? all / of_one_step : 0;  // 0: there is none
    const bool fits = quotient > 0 && (steps == 0 || (ranks ? quotient == steps : quotient % steps == 0));
    if (!fits) {
      throw ConfigError(
          "[plan.deepspeed] {}: train_batch_size = {}: it is not train_micro_batch_size_per_gpu {} x "
          "gradient_accumulation_steps {} x {} data-parallel ranks; correct one of the three, or the number "
          "of ranks (-n)",
          file_.path, all, micro, steps > 0 ? std::to_string(steps) : "(any)",
          ranks ? std::to_string(*ranks) : "(any)");
    }
    set("train.micro_batch", std::to_string(micro), why);
  }

  /// The micro-batch of `all` samples in so many steps on each rank.
  int64_t share(int64_t all, int64_t steps) const {
    const int64_t ranks = data_parallel_ranks("gradient_accumulation_steps", steps);
    if (all % ranks == 0 && all / ranks % steps == 0) return all / ranks / steps;
    throw ConfigError(
        "[plan.deepspeed] {}: gradient_accumulation_steps = {}: a batch of {} cannot be divided among {} "
        "micro-batches on {} data-parallel ranks; change one of the three",
        file_.path, steps, all, steps, ranks);
  }

  std::optional<int64_t> known_ranks() const {
    const std::optional<int64_t> ranks = file_.ranks ? file_.ranks(ours_) : std::nullopt;
    return ranks ? std::optional(MeshShape::fit(ours_.parallel, *ranks).dp_size()) : std::nullopt;
  }

  int64_t data_parallel_ranks(const std::string& key, int64_t value) const {
    if (const std::optional<int64_t> ranks = known_ranks()) return *ranks;
    throw ConfigError(
        "[plan.deepspeed] {}: {} = {}: the micro-batch that it makes depends on the number of ranks; give it "
        "with -n, or set train_micro_batch_size_per_gpu",
        file_.path, key, value);
  }

  // ---- optimizer and learning rate

  /// The row of a section's type; none: there is no such section.
  template <typename Row>
  const Row* type_in(const std::string& section, std::span<const Row> rows, std::string_view choices) const {
    if (!has_section(section + ".")) return nullptr;
    const Given* const type = closed(section + ".type");
    if (type == nullptr) {
      throw ConfigError("[plan.deepspeed] {}: {}: it has no type; {}", file_.path, section, choices);
    }
    const auto found = std::ranges::find(rows, lower_case(type->text), &Row::name);
    if (found == rows.end()) refuse(*type, choices);
    return &*found;
  }

  void settle_optimizer(const OptimizerType& row, const Given& type) {
    set("optim.name", std::string(name(row.ours)), type.key);
    for (const OptimizerParameter& parameter : kOptimizerParameters) set_parameter(parameter, row, type);
    set_betas(row, type);
    check_decay(row, type);
  }

  void set_parameter(const OptimizerParameter& parameter, const OptimizerType& row, const Given& type) {
    const std::string key = fmt::format("optimizer.params.{}", parameter.name);
    std::string_view left_out = row.ours == OptimizerName::kAdamW ? parameter.of_adam : parameter.of_sgd;
    if (parameter.name == "weight_decay" && is_true("optimizer.params.torch_adam") && decays_beside())
      left_out = kDecayOfTorch;
    const Given* const value = find(key);
    if (left_out.empty()) {
      if (value != nullptr) refuse(*value, fmt::format("{} has no such parameter; remove it", type.text));
      return;
    }
    if (value == nullptr)
      set(std::string(parameter.ours), std::string(left_out), key + " is left out");
    else if (!value->open)
      set(std::string(parameter.ours), value->text, key);
  }

  /// Whether Adam is AdamW.
  bool decays_beside() const {
    const Given* const mode = closed("optimizer.params.adam_w_mode");
    return mode == nullptr || mode->text == "true" || lower_case(find("optimizer.type")->text) == "adamw";
  }

  void set_betas(const OptimizerType& row, const Given& type) {
    const std::string key = "optimizer.params.betas";
    const Given* const value = find(key);
    if (row.ours != OptimizerName::kAdamW) {
      if (value != nullptr) refuse(*value, fmt::format("{} has no such parameter; remove it", type.text));
      return;
    }
    if (value != nullptr && value->open) return;
    if (value != nullptr && value->numbers.size() != 2) refuse(*value, "there must be two; correct them");
    const std::vector<double> betas = value != nullptr ? value->numbers : std::vector<double>{0.9, 0.999};
    const std::string why = value != nullptr ? key : key + " is left out";
    set("optim.beta1", fmt::format("{}", betas[0]), why);
    set("optim.beta2", fmt::format("{}", betas[1]), why);
  }

  /// Adam adds the decay to the gradient (L2) only where adam_w_mode says so, and then it is not AdamW.
  void check_decay(const OptimizerType& row, const Given& type) {
    const double decay = number_of("optim.weight_decay", ours_.optim.weight_decay);
    const Given* const mode = closed("optimizer.params.adam_w_mode");
    if (mode != nullptr && row.ours != OptimizerName::kAdamW)
      refuse(*mode, fmt::format("{} has no such parameter; remove it", type.text));
    if (decay > 0.0 && mode != nullptr && !decays_beside()) {
      refuse(*mode, fmt::format("weight decay ({}) in the gradient of Adam (L2) is not here; set it to true "
                                "for AdamW, or weight_decay to 0",
                                decay));
    }
    if (mode != nullptr) note(*mode, "without L2 decay both modes are AdamW");
    if (decay > 0.0) {
      note(fmt::format("optimizer.params.weight_decay={}", decay),
           "it decays parameters of two or more dimensions; DeepSpeed decays all that a program's groups "
           "name, by default also biases and norms");
    }
  }

  /// The value of a setting of the file, else `otherwise`.
  std::string text_of(const std::string& key, std::string otherwise) const {
    const auto found = std::ranges::find(result_.settings, key, &DeepSpeedSetting::key);
    return found == result_.settings.end() ? std::move(otherwise) : found->value;
  }
  double number_of(const std::string& key, double otherwise) const {
    return std::stod(text_of(key, fmt::format("{}", otherwise)));
  }

  void settle_schedule(const SchedulerType& row, const Given& type) {
    check_scheduler_parameters(row, type);
    set("optim.schedule", std::string(name(row.ours)), type.key);
    set_closed("scheduler.params.warmup_max_lr", "optim.lr");
    set_closed("scheduler.params.total_num_steps", "train.steps");
    set_least_rate(row);
    settle_warm_up(row);
  }

  void set_closed(const std::string& theirs, const std::string& ours) {
    if (const Given* const value = closed(theirs)) set(ours, value->text, theirs);
  }

  void check_scheduler_parameters(const SchedulerType& row, const Given& type) const {
    const bool is_cosine = row.ours == LrSchedule::kCosine, is_constant = row.ours == LrSchedule::kConstant;
    const std::pair<const char*, bool> rules[] = {{"warmup_min_lr", !is_cosine},
                                                  {"warmup_max_lr", !is_cosine},
                                                  {"warmup_min_ratio", is_cosine},
                                                  {"cos_min_ratio", is_cosine},
                                                  {"total_num_steps", !is_constant}};
    for (const auto& [word, belongs] : rules) {
      const Given* const value = find(fmt::format("scheduler.params.{}", word));
      if (value != nullptr && !belongs)
        refuse(*value, fmt::format("{} has no such parameter; remove it", type.text));
    }
    if (!is_constant && find("scheduler.params.total_num_steps") == nullptr)
      refuse(type, "it needs params.total_num_steps; add it (\"auto\": train.steps)");
  }

  void set_least_rate(const SchedulerType& row) {
    constexpr double kLeftOut = 1e-4;
    if (row.ours != LrSchedule::kCosine) return set("optim.min_lr", "0", "scheduler.type");
    const std::string key = "scheduler.params.cos_min_ratio";
    const Given* const value = find(key);
    if (value != nullptr && value->open) return;
    const double lr = number_of("optim.lr", ours_.optim.lr);
    set("optim.min_lr", fmt::format("{:.12g}", lr * (value != nullptr ? value->number : kLeftOut)),
        value != nullptr ? key : key + " is left out");
  }

  void settle_warm_up(const SchedulerType& row) {
    const std::string steps_key = "scheduler.params.warmup_num_steps";
    const Given* const steps = find(steps_key);
    if (steps == nullptr) set("optim.warmup_steps", "1000", steps_key + " is left out");
    set_closed(steps_key, "optim.warmup_steps");
    const Given* const shape = closed("scheduler.params.warmup_type");
    if (shape != nullptr && shape->text != "linear" && shape->text != "log")
      refuse(*shape, "it must be linear or log");
    if (shape != nullptr && shape->text == "linear") {
      note(*shape, "step k of a warm-up of w steps has k / w of the rate; DeepSpeed's has (k - 2) / w");
    } else {
      note(shape != nullptr ? "scheduler.params.warmup_type=log"
                            : "scheduler.params.warmup_type is left out (log)",
           "the warm-up is linear: step k of w has k / w of the rate, DeepSpeed's log(k - 1) / log(w), which "
           "rises sooner");
    }
    const Given* const least = closed(row.ours == LrSchedule::kCosine ? "scheduler.params.warmup_min_ratio"
                                                                      : "scheduler.params.warmup_min_lr");
    if (least != nullptr && least->number > 0.0)
      note(*least, "the warm-up rises from 0 to optim.lr, not from this rate");
  }

  void settle_tensor_parallel() {
    const Given* const ranks = closed("tensor_parallel.autotp_size");
    if (ranks != nullptr && ranks->number > 0.0) set("parallel.tp", ranks->text, ranks->key);
  }

  // ---- precision

  void settle_precision() {
    std::string_view compute;  // empty: none is enabled
    bool some_is_open = false;
    for (const auto& [key, dtype] : kDtypeSwitches) {
      some_is_open = some_is_open || is_open(key);
      if (!is_true(key)) continue;
      if (!compute.empty() && compute != dtype)
        refuse(*find(key), fmt::format("{} is enabled as well; disable one of them", compute));
      compute = dtype;
      set("precision.compute", std::string(compute), key);
    }
    for (const auto& [key, dtype] : kDtypeSwitches) {
      if (compute.empty() && !some_is_open && find(key) != nullptr) set("precision.compute", "fp32", key);
    }
    settle_loss_scale();
    settle_sum_dtype();
  }

  /// Sums of micro-batches are in fp32 or in the dtype of the parameters.
  void settle_sum_dtype() {
    const Given* const dtype = closed("data_types.grad_accum_dtype");
    if (dtype == nullptr) return;
    const std::string compute = text_of("precision.compute", std::string(name(ours_.precision.compute)));
    if (dtype->text != "fp32" && dtype->text != compute)
      refuse(*dtype, fmt::format("gradients are summed in fp32, or as they are computed ({})", compute));
    set("precision.accumulate", dtype->text == "fp32" ? "fp32" : "compute", dtype->key);
  }

  void settle_loss_scale() {
    const Given* const fixed = closed("fp16.loss_scale");
    if (fixed != nullptr && fixed->number < 0.0) refuse(*fixed, "it must be 0 (dynamic) or more; correct it");
    if (fixed != nullptr && fixed->number > 0.0) return fix_loss_scale(*fixed);
    if (fixed != nullptr) set("precision.scaling", "auto", fixed->key);
    if (const Given* const power = closed("fp16.initial_scale_power")) {
      constexpr double kMost = 24.0;
      if (power->number < 0.0 || power->number > kMost)
        refuse(*power, "the initial scale is 2 to this power, and at most 2^24; set 0 to 24");
      set("precision.initial_scale", std::to_string(int64_t{1} << static_cast<int>(power->number)),
          power->key);
    }
    set_closed("fp16.loss_scale_window", "precision.scale_window");
    set_closed("fp16.hysteresis", "precision.scale_hysteresis");
    set_closed("fp16.min_loss_scale", "precision.min_scale");
  }

  /// A dynamic scale that cannot move: it never doubles, and it is its own least value.
  void fix_loss_scale(const Given& fixed) {
    constexpr const char* kLongest = "1000000000000";
    if (is_true("fp16.enabled")) set("precision.scaling", "dynamic", fixed.key);
    set("precision.initial_scale", fixed.text, fixed.key);
    set("precision.min_scale", fixed.text, fixed.key);
    set("precision.scale_window", kLongest, fixed.key);
    for (const char* key :
         {"fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"}) {
      if (const Given* const value = closed(key)) note(*value, "fp16.loss_scale is fixed");
    }
  }

  // ---- what travels, and what is sharded

  void settle_wire() {
    const Given* const dtype = closed("communication_data_type");
    if (dtype == nullptr) return;
    const std::map<std::string, std::pair<std::string, std::string>> ours = {
        {"fp32", {"precision.reduce", "fp32"}},
        {"bf16", {"precision.reduce", "bf16"}},
        {"bfp16", {"precision.reduce", "bf16"}},
        {"fp16", {"parallel.comm_hook", "fp16"}}};
    const auto found = ours.find(dtype->text);
    if (found == ours.end()) refuse(*dtype, "it must be one of fp32, bf16, bfp16, fp16");
    set(found->second.first, found->second.second, dtype->key);
  }

  void settle_policy() {
    const auto found = std::ranges::find(result_.settings, "parallel.policy", &DeepSpeedSetting::key);
    const bool is_zero3 = text_of("parallel.policy", "") == "zero3";
    // A sharding that another source chose for fsdp is not for the policies that have a stage.
    if (found != result_.settings.end())
      result_.settings.push_back({"parallel.sharding", "auto", found->why});
    const Given* const ranks = closed("zero_optimization.zero_hpz_partition_size");
    if (ranks == nullptr) return;
    if (ranks->number > 1.0 && is_zero3)
      set("parallel.reshard_after_forward", ranks->text, ranks->key);
    else
      note(*ranks, "above 1 with stage 3 it is parallel.reshard_after_forward; otherwise it has no effect");
  }

  /// DeepSpeed's defaults that are not ours, where the result depends on them.
  void note_what_is_left_out() {
    if (find("gradient_clipping") == nullptr && find("optimizer.params.max_grad_norm") == nullptr)
      note("gradient_clipping is left out",
           as_ours("train.grad_clip") + " stays; DeepSpeed does not clip then");
    if (!has_section("scheduler.")) {
      note("scheduler is left out",
           as_ours("optim.schedule") + " stays; DeepSpeed leaves the rate to the program then");
    }
  }

  const DeepSpeedFile& file_;
  const Config& ours_;
  std::vector<Given> values_;
  DeepSpeedConfig result_;
  std::vector<std::pair<std::string, Strings>> grouped_notes_;  ///< remark, keys that it is on
};

std::string read_json_file(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) {
    throw ConfigError("[plan.deepspeed] {}: {}; give a JSON file", path,
                      std::filesystem::exists(path) ? "it is no file" : "there is no such file");
  }
  return read_text_file(path, kMostJsonBytes);
}

/// A control character in a value or a file's name must not end the comment.
std::string as_comment(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char letter) { return letter < 0x20; }, '?');
  return "# " + text;
}

/// For the table of readers.
std::string becomes(const DeepSpeedKey& row) {
  switch (row.effect) {
    case Effect::kSets:
    case Effect::kTogether:
      return fmt::format("`{}`", row.ours);
    case Effect::kNeedless:
      return "nothing is needed";
    case Effect::kOnly:
      return fmt::format("only `{}`", row.accepted);
    case Effect::kRefused:
      break;
  }
  return "refused";
}

/// "0: ddp, 1: zero1" where there are words.
std::string remark_on(const DeepSpeedKey& row) {
  Strings words;
  for (const auto& [theirs, ours] : row.words) words.push_back(fmt::format("{}: `{}`", theirs, ours));
  return words.empty() ? std::string(row.about) : join(words, ", ");
}

}  // namespace

DeepSpeedConfig read_deepspeed(const DeepSpeedFile& file, const Config& ours) {
  DeepSpeedFile named = file;
  if (named.path.empty()) named.path = "<text>";
  const std::string text = file.text.empty() ? read_json_file(file.path) : file.text;
  return Translation(named, ours, read_deepspeed_values(text, named.path)).translate();
}

std::string to_yaml(const DeepSpeedConfig& config) {
  std::string yaml;
  for (const std::string& note : config.notes) yaml += as_comment(note) + "\n";
  std::map<std::string, std::string> sections;
  for (const DeepSpeedSetting& setting : config.settings) {
    const size_t dot = setting.key.find('.');
    sections[setting.key.substr(0, dot)] +=
        fmt::format("  {}: {}  {}\n", setting.key.substr(dot + 1), setting.value, as_comment(setting.why));
  }
  for (const auto& [section, lines] : sections) yaml += fmt::format("{}:\n{}", section, lines);
  return yaml;
}

std::string describe_deepspeed_keys() {
  std::string text = "| DeepSpeed | Trireme | |\n| --- | --- | --- |\n";
  for (const DeepSpeedKey& row : deepspeed_keys())
    text += fmt::format("| `{}` | {} | {} |\n", row.key, becomes(row), remark_on(row));
  return text;
}

}  // namespace trireme::plan
