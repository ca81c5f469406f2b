#include "trireme/train/run_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/hex.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/strict_json.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/optimizer.h"
#include "trireme/train/program_call.h"
#include "trireme/train/saved_record.h"

namespace trireme::train {
namespace {

using Json = nlohmann::json;

/// Keys without which the same steps cannot go on. What a run may change, such as its ranks, policy, kernels
/// or when it ends, is not among them; of keys for the batch counts what they make (check_batch()), and of
/// the tokenizer what its files hold (check_tokenizer()).
bool must_be_equal(const std::string& key) {
  static const std::set<std::string> keys = {"seed",
                                             "data.seq_len",
                                             "data.val_fraction",
                                             "data.pad",
                                             "data.flip",
                                             "data.least_area",
                                             "data.resized_crop",
                                             "data.mixup",
                                             "data.reset_attention",
                                             "optim.name"};
  static const std::set<std::string> free = {"model.preset",  "model.dropout",   "model.attention",
                                             "model.weights", "adapter.dropout", "adapter.weights"};
  const bool of_model = key.starts_with("model.") || key.starts_with("adapter.");
  return keys.contains(key) || (of_model && !free.contains(key));
}

plan::Config config_of(const Json& run, const std::string& path) {
  const std::string yaml = checkpoint::text_of(run, "config", path);
  return plan::load({.path = {}, .text = yaml, .overrides = {}}, Environment()).config;
}

/// The name and digest of a tokenizer, as a checkpoint keeps them; null: images have none.
Json to_json(const data::Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return nullptr;
  return {{"name", tokenizer->name()}, {"digest", tokenizer->digest()}};
}

/// Ids of another tokenizer mean other text, even where there are as many of them.
void check_tokenizer(const Parts& parts, const Json& run, const std::string& path) {
  const data::Tokenizer* const now = parts.data->tokenizer();
  if (now == nullptr) return;
  const auto saved = run.find("tokenizer");
  const bool is_saved = saved != run.end();  // not in checkpoints of old versions, which read bytes alone
  const auto text_at = [&](const char* key) {
    return is_saved ? checkpoint::text_of(*saved, key, path) : std::string(plan::kByteTokenizer);
  };
  if (text_at("digest") == now->digest()) return;
  throw ConfigError(
      "[train.resume] {} was written by a run with the tokenizer {}, but data.tokenizer={} is {}; set "
      "data.tokenizer to the one before, or start a new run",
      path, text_at("name"), parts.config.data.tokenizer, now->name());
}

void check_config(const Parts& parts, const plan::Config& then, const std::string& path) {
  // Averages of other steps than all are none, so they neither begin here nor end.
  const bool other_state = plan::state_of(then.optim) != plan::state_of(parts.config.optim);
  std::vector<std::string> refused, noted;
  for (const std::string& key : plan::differing_keys(then, parts.config)) {
    if (key == "train.steps" && parts.config.train.epochs > 0) continue;  // nobody has set it
    (must_be_equal(key) || (key == "optim.ema" && other_state) ? refused : noted).push_back(key);
  }
  if (!refused.empty()) {
    throw ConfigError(
        "[train.resume] {} was written by a run with other values of {}; use the same values, or start a new "
        "run",
        path, join(refused, ", "));
  }
  if (!noted.empty() && parts.is_root()) log_info("resume  with changed values of {}", join(noted, ", "));
}

/// Samples of a step, whether train.global_batch says so or train.rank_batch and the ranks.
void check_batch(const Parts& parts, const Json& run, const plan::Config& config_then,
                 const std::string& path) {
  const int64_t now = parts.batch.global_batch;
  const bool is_saved = run.contains("global_batch");  // not in checkpoints of old versions
  const int64_t then =
      is_saved ? checkpoint::count_of(run, "global_batch", path) : config_then.train.global_batch;
  if (then == now) return;
  const int64_t by_rank = parts.config.train.rank_batch;
  std::string fix = fmt::format("train.global_batch={}", then);
  if (by_rank > 0) {
    fix = then % parts.batch.dp_size == 0 ? fmt::format("train.rank_batch={}", then / parts.batch.dp_size)
                                          : fmt::format("train.rank_batch=0 and {}", fix);
  }
  throw ConfigError(
      "[train.resume] {} was written by a run with {} samples per step, but this run has {}{}; set {}", path,
      then, now,
      by_rank > 0
          ? fmt::format(" (train.rank_batch={} x {} data-parallel ranks)", by_rank, parts.batch.dp_size)
          : std::string(),
      fix);
}

/// A run that is to end before its checkpoint would do nothing, and look as if it had.
void check_steps(const Parts& parts, const Json& run, const std::string& path) {
  const int64_t done = checkpoint::count_of(run, "step", path);
  const plan::TrainConfig& train = parts.config.train;
  if (done <= train.steps) return;
  throw ConfigError("[train.resume] {} is from step {}, but this run ends with step {}; raise {}", path, done,
                    train.steps,
                    train.epochs > 0 ? fmt::format("train.epochs={}", train.epochs) : "train.steps");
}

/// Stages need whole steps. Where all steps are whole anyway, there is no difference.
void check_epochs(const Parts& parts, bool ran_on, const std::string& path) {
  const int64_t samples = parts.data->samples(), batch = parts.batch.global_batch;
  if (ran_on || parts.config.parallel.pp == 1 || samples % batch == 0) return;
  throw ConfigError(
      "[train.resume] {} was written by a run whose last step of an epoch is short ({} of {} images), which "
      "steps in stages cannot be: later steps would have other images; go on with parallel.pp=1, or start a "
      "new run",
      path, samples % batch, batch);
}

void check_data(const Parts& parts, const Json& run, const std::string& path) {
  const int64_t samples = checkpoint::count_of(run, "samples", path);
  const std::string then = checkpoint::text_of(run, "data", path), now = hex64(parts.data->digest());
  if (samples == parts.data->samples() && then == now) return;
  throw ConfigError(
      "[train.resume] {} was written by a run on {} samples with digest {}, but data.path or data.mixture "
      "now has {} with "
      "digest {}; use the same data",
      path, samples, then, parts.data->samples(), now);
}

/// Adapters are a change of the weights that they were trained on, and of no others.
void check_base(const Parts& parts, const Json& run, const std::string& path) {
  if (parts.base_digest.empty()) return;
  const std::string then = checkpoint::text_of(run, "base", path);
  if (then == parts.base_digest) return;
  const std::string& weights = parts.config.model.weights;
  throw ConfigError(
      "[train.resume] {} holds adapters of weights with digest {}, but {} has {} in precision.compute={}; "
      "use the "
      "weights and the precision of the run that wrote it",
      path, then, weights.empty() ? fmt::format("seed={}", parts.config.seed) : "model.weights=" + weights,
      parts.base_digest, parts.config.precision.compute);
}

/// Neither states nor reasons need be text.
std::string hex_of(const std::string& bytes) {
  return to_hex(bytes.data(), bytes.size());
}

std::string text_in_hex(const Json& json, const std::string& path) {
  const std::optional<std::string> text = json.is_string() ? from_hex(json.get<std::string>()) : std::nullopt;
  if (!text) checkpoint::fail_json(path, "what it says of callbacks is not hexadecimal");
  return *text;
}

Json callbacks_to_json(const Parts& parts) {
  Json states = Json::array();
  for (const auto& callback : parts.program.callbacks)
    states.push_back(hex_of(call_of_program([&] { return callback->state(); }, "state() of a callback")));
  return {{"states", states},
          {"told_at", parts.callbacks.told_at},
          {"end_reason", hex_of(parts.callbacks.end_reason)}};
}

/// By their order, since they have no names.
void restore_callbacks(Parts& parts, const Json& run, const std::string& path) {
  const auto found = run.find("callbacks");
  if (found == run.end()) return;  // the checkpoint is of an old version
  const Program& program = parts.program;
  const Json& states = checkpoint::value_of(*found, "states", path);
  if (!states.empty() && states.size() != program.callbacks.size()) {
    throw ConfigError(
        "[train.resume] {} was written by a program with {} callbacks, but this one has {}; use the program "
        "that "
        "wrote it, or start a new run",
        path, states.size(), program.callbacks.size());
  }
  for (size_t i = 0; i < states.size(); ++i) {
    const std::string state = text_in_hex(states[i], path);
    call_of_program([&] { program.callbacks[i]->restore(state); }, "restore() of a callback");
  }
  parts.callbacks = {.told_at = checkpoint::count_of(*found, "told_at", path),
                     .end_reason = text_in_hex(checkpoint::value_of(*found, "end_reason", path), path)};
}

Json names_of_metrics(const Program& program) {
  Json names = Json::array();
  for (const Metric& metric : program.metrics) names.push_back(metric.name);
  return names;
}

/// A run may go on without metrics; whoever forgot the program should learn of it.
void warn_of_lost_metrics(const Parts& parts, const Json& run, const std::string& path) {
  const auto then = run.find("metrics");
  if (then == run.end() || !parts.is_root()) return;  // the checkpoint is of an old version
  const Json now = names_of_metrics(parts.program);
  for (const Json& name : *then) {
    if (std::ranges::find(now, name) != now.end()) continue;
    log_warning(
        "resume  {} was written by a program with the metric {}, which this run does not measure; start "
        "that program, if that is not meant",
        path, name.dump());
  }
}

std::string hex_of(const at::Tensor& bytes) {
  return to_hex(bytes.const_data_ptr<uint8_t>(), static_cast<size_t>(bytes.numel()));
}

at::Tensor bytes_of(const std::string& hex, const char* what, const std::string& path) {
  const std::optional<std::string> read = from_hex(hex);
  if (!read) checkpoint::fail_json(path, fmt::format("{} is not hexadecimal", what));
  at::Tensor bytes = at::empty({std::ssize(*read)}, at::kByte);
  std::ranges::copy(*read, bytes.mutable_data_ptr<uint8_t>());
  return bytes;
}

at::Generator generator_of(const c10::Device& device) {
  return at::globalContext().defaultGenerator(device);
}

/// The state that this rank has saved, as far as it goes on; else why not.
struct SavedRandom {
  at::Tensor state;
  const char* lost = nullptr;
};

SavedRandom saved_random(const Parts& parts, const Json& document, const std::string& path) {
  const Json& ranks = checkpoint::value_of(document, "ranks", path);
  const Json& run = checkpoint::value_of(document, "run", path);
  const std::string rank = std::to_string(parts.world->rank());
  if (checkpoint::count_of(run, "ranks", path) != parts.world->size())
    return {{}, "on another number of ranks"};
  if (!ranks.is_object() || !ranks.contains(rank)) return {{}, "from a checkpoint without random numbers"};
  return {
      bytes_of(checkpoint::text_of(ranks.at(rank), "random", path), "the state of a random generator", path)};
}

/// Where it cannot go on with the masks that would have come, it begins new ones, and not those that the run
/// has begun with.
void restore_random(const Parts& parts, const Json& document, int64_t step, const std::string& path) {
  if (!plan::draws_in_training(parts.config.model)) return;
  SavedRandom saved = saved_random(parts, document, path);
  if (saved.state.defined()) {
    at::Generator generator = generator_of(parts.world->device());
    const std::lock_guard lock(generator.mutex());
    // Generators of CPUs and of GPUs have states of other sizes.
    if (saved.state.numel() == generator.get_state().numel()) return generator.set_state(saved.state);
    saved.lost = "on another device";
  }
  if (parts.is_root()) log_info("resume  {}: dropout continues with different masks", saved.lost);
  at::manual_seed(
      static_cast<uint64_t>(parts.config.seed + step * parts.world->size() + parts.world->rank()));
}

/// Rows of steps, of hexadecimal fp32.
Json to_json(const nn::Fp8History& history) {
  const at::Tensor saved = history.saved();
  Json rows = Json::array();
  for (int64_t step = 0; step < saved.size(0); ++step) rows.push_back(hex_of(saved[step].view(at::kByte)));
  return rows;
}

/// Undefined: there is none in it, or one that is no matrix.
at::Tensor history_of(const Json& run, const std::string& path) {
  const auto rows = run.find("fp8_history");
  if (rows == run.end() || !rows->is_array() || rows->empty()) return {};
  std::vector<at::Tensor> steps;
  for (const Json& row : *rows) {
    if (!row.is_string()) checkpoint::fail_json(path, "the FP8 history is not hexadecimal");
    steps.push_back(bytes_of(row.get<std::string>(), "the FP8 history", path));
    if (steps.back().numel() % 4 != 0 || steps.back().numel() != steps.front().numel())
      checkpoint::fail_json(path, "the FP8 history has rows of different or odd sizes");
  }
  return at::stack(steps).view(at::kFloat);
}

void restore_history(Parts& parts, const Json& run, const std::string& path) {
  nn::Fp8History* const history = parts.model->fp8_history();
  if (history == nullptr) return;
  const plan::Config& config = parts.config;
  const auto blocks = [&](int64_t block) {
    return plan::multiplies_in_fp8(config.precision.fp8, block, config.model.n_layers);
  };
  const at::Tensor saved = history_of(run, path);
  if (saved.defined() && history->restore(saved, blocks)) return;
  if (parts.is_root())
    log_warning(
        "resume  {} has no FP8 history for precision.fp8_scaling=delayed; the first step is scaled by its "
        "own values",
        path);
}

/// A run that did not scale has no scale to go on with, and a first scale that is given anew is meant.
bool scale_goes_on(const plan::PrecisionConfig& then, const plan::PrecisionConfig& now) {
  return plan::scales_loss(then) && then.loss_scale.initial == now.loss_scale.initial;
}

Json to_json(const precision::LossScaler::State& state) {
  return {{"scale", state.scale},
          {"patience", state.patience},
          {"good_steps", state.good_steps},
          {"overflows_in_a_row", state.overflows_in_a_row},
          {"skipped", state.skipped}};
}

precision::LossScaler::State scaler_state(const Json& json, const std::string& path) {
  const Json& scale = checkpoint::value_of(json, "scale", path);
  if (!scale.is_number()) checkpoint::fail_json(path, "'scale' is not a number");
  return {.scale = scale.get<double>(),
          .patience = checkpoint::count_of(json, "patience", path),
          .good_steps = checkpoint::count_of(json, "good_steps", path),
          .overflows_in_a_row = checkpoint::count_of(json, "overflows_in_a_row", path),
          .skipped = checkpoint::count_of(json, "skipped", path)};
}

/// Null: there was no validation whose weights were kept.
Json to_json(const BestValidation& best) {
  if (best.step == 0) return nullptr;
  return {{"step", best.step},
          {"score", best.score},
          {"metric", best.monitor.metric},
          {"higher_is_better", best.monitor.higher_is_better}};
}

BestValidation best_validation(const Json& json, const std::string& path) {
  const Json &score = checkpoint::value_of(json, "score", path),
             &higher = checkpoint::value_of(json, "higher_is_better", path);
  if (!score.is_number() || !higher.is_boolean())
    checkpoint::fail_json(path, "'best' has no score, or does not say what is better");
  return {.step = checkpoint::count_of(json, "step", path),
          .score = score.get<double>(),
          .monitor = {.metric = checkpoint::text_of(json, "metric", path), .higher_is_better = higher}};
}

}  // namespace

std::string run_state(const Parts& parts, const precision::LossScaler& scaler, const StepRecord& record) {
  const plan::Config& config = parts.config;
  const int64_t cursor = parts.samples_in(record.step);
  const nn::Fp8History* const history = parts.model->fp8_history();
  const EarlyStop& early_stop = parts.early_stop;
  return Json{{"step", record.step},
              {"cursor", cursor},
              {"tokens", cursor * config.data.seq_len},
              {"loss", record.loss},
              {"record", record_to_json(record)},
              {"global_batch", parts.batch.global_batch},
              {"runs_on", parts.runs_on},
              {"samples", parts.data->samples()},
              {"data", hex64(parts.data->digest())},
              {"tokenizer", to_json(parts.data->tokenizer())},
              {"ranks", parts.world->size()},
              {"mesh", parts.mesh.shape.to_string()},
              {"policy", plan::resolve_policy(config.parallel, parts.mesh.shape).label()},
              {"loss_scaler", to_json(scaler.state())},
              {"callbacks", callbacks_to_json(parts)},
              {"metrics", names_of_metrics(parts.program)},
              {"early_stop", early_stop.is_on() ? early_stop.state() : Json()},
              {"best", to_json(parts.best)},
              {"fp8_history", history != nullptr ? to_json(*history) : Json::array()},
              {"base", parts.base_digest},
              {"config", plan::to_yaml({config, {}})}}
      .dump();
}

std::string rank_state(const Parts& parts) {
  if (!plan::draws_in_training(parts.config.model)) return {};
  at::Generator generator = generator_of(parts.world->device());
  const std::lock_guard lock(generator.mutex());
  return Json{{"random", hex_of(generator.get_state())}}.dump();
}

SavedRun::SavedRun(const std::string& state, std::string path)
    : document_(checkpoint::parse_json(state, path)), path_(std::move(path)) {}

const Json& SavedRun::run() const {
  return checkpoint::value_of(document_, "run", path_);
}

void SavedRun::check(const Parts& parts) const {
  const plan::Config then = config_of(run(), path_);
  check_tokenizer(parts, run(), path_);
  check_config(parts, then, path_);
  check_batch(parts, run(), then, path_);
  check_data(parts, run(), path_);
  check_base(parts, run(), path_);
}

bool SavedRun::ran_on() const {
  const auto ran_on = run().find("runs_on");
  if (ran_on != run().end() && ran_on->is_boolean()) return ran_on->get<bool>();
  return begins_running_on(config_of(run(), path_));  // the checkpoint is of an old version
}

void SavedRun::keep_steps(Parts& parts) const {
  if (plan::reads_images(parts.config.model.family)) {
    check_epochs(parts, ran_on(), path_);
    parts.run_on(ran_on() || begins_running_on(parts.config));
  }
  check_steps(parts, run(), path_);
}

int64_t SavedRun::step() const {
  return checkpoint::count_of(run(), "step", path_);
}

double SavedRun::loss() const {
  const auto loss = run().find("loss");
  return loss != run().end() && loss->is_number() ? loss->get<double>() : 0.0;
}

std::optional<StepRecord> SavedRun::record() const {
  const auto record = run().find("record");
  if (record == run().end()) return std::nullopt;
  return record_from_json(*record, step(), loss(), path_);
}

void SavedRun::restore(Parts& parts, precision::LossScaler& scaler) const {
  if (scale_goes_on(config_of(run(), path_).precision, parts.config.precision))
    scaler.set_state(scaler_state(checkpoint::value_of(run(), "loss_scaler", path_), path_));
  // None: it was off, or the checkpoint is of an old version.
  if (const auto early_stop = run().find("early_stop"); early_stop != run().end() && !early_stop->is_null())
    parts.early_stop.restore(*early_stop, path_);
  if (const auto best = run().find("best"); best != run().end() && !best->is_null())
    parts.best = best_validation(*best, path_);
  restore_callbacks(parts, run(), path_);
  warn_of_lost_metrics(parts, run(), path_);
  restore_random(parts, document_, step(), path_);
  restore_history(parts, run(), path_);
}

}  // namespace trireme::train
