#include "trireme/train/checkpointing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/checkpoint/strict_json.h"
#include "trireme/kernels/device.h"
#include "trireme/parallel/state.h"
#include "trireme/parallel/state_file.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/optimizer.h"
#include "trireme/plan/saved_copy.h"
#include "trireme/train/saved_record.h"
#include "trireme/train/stop.h"

namespace trireme::train {
namespace {

using Json = nlohmann::json;
using checkpoint::PieceSpec;
using checkpoint::Region;

/// How long rank 0 waits for the others' parts: they may be waiting for it in a collective meanwhile.
constexpr double kShareOfTimeout = 0.5;

/// Rank 0's text, on every rank.
std::string text_of_root(comm::Group& group, std::string text) {
  const auto size =
      static_cast<int64_t>(comm::gather_scalars(group, {static_cast<double>(text.size())}).front().front());
  if (size == 0) return {};
  text.resize(static_cast<size_t>(size));
  at::Tensor bytes = at::from_blob(text.data(), {size}, at::kByte).to(group.device(), at::kByte, false, true);
  group.broadcast(bytes, 0);
  const at::Tensor here = bytes.to(at::kCPU);
  return {static_cast<const char*>(here.const_data_ptr()), static_cast<size_t>(size)};
}

struct MyPiece {
  PieceSpec spec;
  at::Tensor values;  ///< of the region, on the device
  bool passes_change_it;
};

using PieceBody = std::function<void(const MyPiece&)>;

/// A piece of some rows as one of the whole tensor.
parallel::StatePiece in_whole(parallel::StatePiece piece, const parallel::RowsOf& rows) {
  const int64_t first = rows.first * (c10::multiply_integers(piece.shape) / piece.shape.front());
  piece.shape.front() = rows.all;
  piece.range = {piece.range.begin + first, piece.range.end + first};
  return piece;
}

/// What this rank writes of a part: its share of what it holds.
void visit_pieces(const TrainedModel::Part& part, const PieceBody& body) {
  using parallel::HeldBy;
  const auto [replica, replicas] = part.engine->replica();
  parallel::visit_sharded_state(*part.engine, *part.optimizer, [&](const parallel::StatePiece& piece) {
    if (!piece.param.empty() && piece.param == part.saved_elsewhere) return;
    const auto rows = part.rows.find(piece.param);
    if (rows != part.rows.end() && piece.shape.empty() && rows->second.first > 0) return;
    const parallel::StatePiece held =
        rows == part.rows.end() || piece.shape.empty() ? piece : in_whole(piece, rows->second);
    if (held.held_by == HeldBy::kAllRanks && part.engine->mesh().dp_rank != 0) return;
    Region region = Region::flat(held.shape, held.range);
    if (held.held_by == HeldBy::kReplicas) region = checkpoint::share_of(region, replica, replicas);
    if (region.numel() == 0) return;
    body(
        {{held.name, checkpoint::safetensors_dtype(held.values.scalar_type(), held.name), held.shape, region},
         held.values.narrow(0, region.range.begin - held.range.begin, region.numel()),
         held.passes_change_it});
  });
}

void visit_pieces(const TrainedModel& model, const PieceBody& body) {
  for (const TrainedModel::Part& part : model.parts()) visit_pieces(part, body);
}

std::map<std::string, std::string> metadata_of(const TrainedModel& model) {
  std::map<std::string, std::string> all;
  for (const TrainedModel::Part& part : model.parts()) all.merge(parallel::state_metadata(*part.engine));
  return all;
}

/// Keys without which the same steps cannot go on. What a run may change, such as its ranks, policy, kernels
/// or when it ends, is not among them.
bool must_be_equal(const std::string& key) {
  static const std::set<std::string> keys = {
      "seed",       "data.tokenizer",     "data.seq_len",     "data.val_fraction",
      "data.pad",   "data.flip",          "data.least_area",  "data.resized_crop",
      "data.mixup", "train.global_batch", "train.rank_batch", "optim.name"};
  static const std::set<std::string> free = {"model.preset", "model.dropout", "model.weights"};
  return keys.contains(key) || (key.starts_with("model.") && !free.contains(key));
}

plan::Config config_of(const Json& state, const std::string& path) {
  const std::string yaml = checkpoint::text_of(state, "config", path);
  return plan::load({.path = {}, .text = yaml, .overrides = {}}, Environment()).config;
}

void check_config(const Parts& parts, const plan::Config& then, const std::string& path) {
  // Averages of other steps than all are none, so they neither begin here nor end.
  const bool other_state = plan::state_of(then.optim) != plan::state_of(parts.config.optim);
  std::vector<std::string> refused, noted;
  for (const std::string& key : plan::differing_keys(then, parts.config))
    (must_be_equal(key) || (key == "optim.ema" && other_state) ? refused : noted).push_back(key);
  if (!refused.empty()) {
    throw ConfigError(
        "[train.resume] {} was written by a run with other values of {}; use the same values, or start a new "
        "run",
        path, join(refused, ", "));
  }
  if (!noted.empty() && parts.is_root()) log_info("resume  with changed values of {}", join(noted, ", "));
}

/// With train.rank_batch other ranks make other steps.
void check_batch(const Parts& parts, const Json& state, const std::string& path) {
  if (!state.contains("global_batch")) return;
  const int64_t then = checkpoint::count_of(state, "global_batch", path), now = parts.batch.global_batch;
  if (then == now) return;
  throw ConfigError(
      "[train.resume] {} was written by a run with {} samples per step, but this run has {}; use as many "
      "ranks as before, or set train.rank_batch={}",
      path, then, now, then / parts.batch.dp_size);
}

/// A run that is to end before its checkpoint would do nothing, and look as if it had.
void check_steps(const Parts& parts, const Json& state, const std::string& path) {
  const int64_t done = checkpoint::count_of(state, "step", path);
  const plan::TrainConfig& train = parts.config.train;
  if (done <= train.steps) return;
  throw ConfigError("[train.resume] {} is from step {}, but this run ends with step {}; raise {}", path, done,
                    train.steps,
                    train.epochs > 0 ? fmt::format("train.epochs={}", train.epochs) : "train.steps");
}

void check_data(const Parts& parts, const Json& state, const std::string& path) {
  const int64_t samples = checkpoint::count_of(state, "samples", path);
  const std::string then = checkpoint::text_of(state, "data", path), now = hex64(parts.data->digest());
  if (samples == parts.data->samples() && then == now) return;
  throw ConfigError(
      "[train.resume] {} was written by a run on {} samples with digest {}, but data.path now has {} with "
      "digest {}; use the same data",
      path, samples, then, parts.data->samples(), now);
}

std::string to_hex(const at::Tensor& bytes) {
  std::string hex;
  const auto* next = bytes.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < bytes.numel(); ++i) hex += fmt::format("{:02x}", next[i]);
  return hex;
}

at::Tensor from_hex(const std::string& hex, const char* what, const std::string& path) {
  if (hex.size() % 2 != 0 || hex.find_first_not_of("0123456789abcdef") != std::string::npos)
    checkpoint::fail_json(path, fmt::format("{} is not hexadecimal", what));
  at::Tensor bytes = at::empty({static_cast<int64_t>(hex.size() / 2)}, at::kByte);
  for (size_t i = 0; i < hex.size() / 2; ++i)
    bytes.mutable_data_ptr<uint8_t>()[i] = static_cast<uint8_t>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  return bytes;
}

at::Generator generator_of(const c10::Device& device) {
  return at::globalContext().defaultGenerator(device);
}

/// Dropout's, of this rank; nothing else of a run draws from it.
std::string random_state(const Parts& parts) {
  if (parts.config.model.dropout == 0.0) return {};
  at::Generator generator = generator_of(parts.world->device());
  const std::lock_guard lock(generator.mutex());
  return Json{{"random", to_hex(generator.get_state())}}.dump();
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
      from_hex(checkpoint::text_of(ranks.at(rank), "random", path), "the state of a random generator", path)};
}

/// Where it cannot go on with the masks that would have come, it begins new ones, and not those that the run
/// has begun with.
void restore_random(const Parts& parts, const Json& document, int64_t step, const std::string& path) {
  if (parts.config.model.dropout == 0.0) return;
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
  for (int64_t step = 0; step < saved.size(0); ++step) rows.push_back(to_hex(saved[step].view(at::kByte)));
  return rows;
}

/// Undefined: there is none in it, or one that is no matrix.
at::Tensor history_of(const Json& run, const std::string& path) {
  const auto rows = run.find("fp8_history");
  if (rows == run.end() || !rows->is_array() || rows->empty()) return {};
  std::vector<at::Tensor> steps;
  for (const Json& row : *rows) {
    if (!row.is_string()) checkpoint::fail_json(path, "the FP8 history is not hexadecimal");
    steps.push_back(from_hex(row.get<std::string>(), "the FP8 history", path));
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

}  // namespace

Checkpointing::Checkpointing(const TrainOptions& options, Parts& parts, precision::LossScaler& scaler)
    : options_(options), config_(parts.config), parts_(parts), scaler_(scaler) {
  agree_on_folder();
  const plan::Device device = parts.on_gpu() ? plan::Device::kCuda : plan::Device::kCpu;
  if (!enabled() || plan::saves_in_place(config_, device)) return;
  copy_.emplace(parts.world->device(),
                plan::saved_copy_bytes(config_, parts.facts, parts.mesh.shape, parts.mesh.pp_rank));
}

Checkpointing::~Checkpointing() {
  join();
  if (unsettled_ && !error_.empty()) log_warning("a checkpoint was not written: {}", error_);
}

/// Rank 0 knows the folders and whether to resume, and is the one that commits.
void Checkpointing::agree_on_folder() {
  std::exception_ptr error;
  const bool writes = config_.checkpoint.every > 0 || options_.resume;  // a resumed run's records, at least
  if (parts_.is_root() && writes && !options_.checkpoint_dir.empty()) {
    try {
      store_ = std::make_unique<checkpoint::Store>(options_.checkpoint_dir);
    } catch (const Error&) {
      error = std::current_exception();
    }
  }
  Json known{{"folder", options_.checkpoint_dir},
             {"wanted", options_.resume_from},
             {"resumes", options_.resume},
             {"generation", store_ ? store_->generation() : 0},
             {"failed", error != nullptr}};
  known = Json::parse(text_of_root(*parts_.mesh.all, parts_.is_root() ? known.dump() : std::string()));
  if (error) std::rethrow_exception(error);
  if (known["failed"].get<bool>()) throw FailedElsewhere(ExitCode::kEnvironment, 0);
  folder_ = known["folder"];
  wanted_ = known["wanted"];
  resumes_ = known["resumes"];
  generation_ = known["generation"];
}

bool Checkpointing::can_save(int64_t step) const {
  const bool local = config_.parallel.comm_hook == plan::CommHook::kLocalSgd;
  return enabled() && (!local || step % config_.parallel.local_steps == 0);
}

bool Checkpointing::any_rank(bool mine) const {
  const auto ranks = comm::gather_scalars(*parts_.mesh.all, {mine ? 1.0 : 0.0});
  return std::ranges::any_of(ranks, [](const std::vector<double>& rank) { return rank[0] > 0.0; });
}

/// The newest checkpoint of the folder, on all ranks; empty: there is none.
std::string Checkpointing::choose(const std::string& older_than) {
  std::string path;
  std::error_code error;
  if (parts_.is_root() && std::filesystem::is_directory(folder_, error)) {
    const checkpoint::Newest newest = checkpoint::newest_checkpoint(checkpoint::Folder(folder_), older_than);
    for (const std::string& reason : newest.passed_over) log_warning("resume  skipped {}", reason);
    if (newest.checkpoint) {
      path = newest.checkpoint->path();
    } else if (newest.damaged > 0 || !older_than.empty()) {
      path = "?";
    }
  }
  return text_of_root(*parts_.mesh.all, path);
}

Checkpointing::Resumed Checkpointing::resume() {
  if (!resumes_) return {};
  if (!wanted_.empty()) return resume_from(wanted_);
  std::string older_than;
  for (;;) {
    const std::string path = choose(older_than);
    if (path.empty()) return {};
    if (path == "?") {
      throw DataError(
          "[train.resume] none of the checkpoints in {} can be read; 'trireme ckpt list' says why. Remove "
          "them to start at step 1",
          folder_);
    }
    try {
      return resume_from(path);
    } catch (const DataError& error) {
      if (parts_.is_root()) log_warning("resume  {}; trying the previous one", error.what());
    }
    older_than = std::filesystem::path(path).filename();
  }
}

/// Every rank reads its own part, so any of them may find damage; then all throw DataError. What else keeps a
/// rank from reading is no reason to take an older checkpoint.
Checkpointing::Resumed Checkpointing::resume_from(const std::string& path) {
  std::string state, problem;
  bool damaged = false;
  const auto attempt = [&](const auto& body) {
    problem.clear();
    damaged = false;
    try {
      body();
    } catch (const ConfigError&) {
      throw;  // the same on all ranks
    } catch (const Error& error) {
      problem = error.what();
      damaged = dynamic_cast<const DataError*>(&error) != nullptr;
      if (!parts_.is_root()) log_warning("resume  {}", problem);  // rank 0 knows that it was another rank
    }
    if (!any_rank(!problem.empty())) return;
    const bool unreadable = any_rank(!problem.empty() && !damaged);
    if (problem.empty()) problem = fmt::format("[train.resume] another rank cannot read {}", path);
    if (unreadable) throw EnvironmentError("{}", problem);
    throw DataError("{}", problem);
  };
  attempt([&] { state = checkpoint::Checkpoint(path).state(); });
  const Json document = checkpoint::parse_json(state, path);
  const Json& run = checkpoint::value_of(document, "run", path);
  check_config(parts_, config_of(run, path), path);
  check_steps(parts_, run, path);
  check_batch(parts_, run, path);
  check_data(parts_, run, path);
  // A stage leaves to others what is theirs; that all together are the checkpoint's model says the config.
  const bool staged = config_.parallel.pp > 1;
  attempt([&] {
    for (const TrainedModel::Part& part : parts_.model->parts())
      parallel::load_state(*part.engine, *part.optimizer, path, {.unexpected = staged, .rows = part.rows});
  });
  return restore(path, state);
}

/// What is not in tensors.
Checkpointing::Resumed Checkpointing::restore(const std::string& path, const std::string& state) {
  const Json document = checkpoint::parse_json(state, path);
  const Json& run = checkpoint::value_of(document, "run", path);
  Resumed resumed{.step = checkpoint::count_of(run, "step", path)};
  if (enabled() && !can_save(resumed.step)) {
    throw ConfigError(
        "[train.resume] {} is from step {}, which is not a multiple of parallel.local_steps={}, so ranks "
        "would save between two averagings; use a divisor of that step, or set checkpoint.every to 0",
        path, resumed.step, config_.parallel.local_steps);
  }
  if (const auto loss = run.find("loss"); loss != run.end() && loss->is_number()) resumed.loss = *loss;
  if (const auto record = run.find("record"); record != run.end())
    resumed.record = record_from_json(*record, resumed.step, resumed.loss, path);
  if (scale_goes_on(config_of(run, path).precision, config_.precision))
    scaler_.set_state(scaler_state(checkpoint::value_of(run, "loss_scaler", path), path));
  restore_random(parts_, document, resumed.step, path);
  restore_history(parts_, run, path);
  parts_.open_feed(resumed.step);
  if (parts_.is_root() && options_.announce) log_info("resume  after step {} of {}", resumed.step, path);
  return resumed;
}

std::string Checkpointing::run_state(const StepRecord& record) const {
  const int64_t cursor = parts_.data->samples_in(record.step, parts_.batch.global_batch);
  const nn::Fp8History* const history = parts_.model->fp8_history();
  return Json{{"step", record.step},
              {"cursor", cursor},
              {"tokens", cursor * config_.data.seq_len},
              {"loss", record.loss},
              {"record", record_to_json(record)},
              {"global_batch", parts_.batch.global_batch},
              {"samples", parts_.data->samples()},
              {"data", hex64(parts_.data->digest())},
              {"ranks", parts_.world->size()},
              {"mesh", parts_.mesh.shape.to_string()},
              {"policy", plan::resolve_policy(config_.parallel, parts_.mesh.shape).label()},
              {"loss_scaler", to_json(scaler_.state())},
              {"fp8_history", history != nullptr ? to_json(*history) : Json::array()},
              {"config", plan::to_yaml({config_, {}})}}
      .dump();
}

/// What this rank is to write, and the pieces as they are now, or are going to be when copy_ has arrived.
checkpoint::ShardSpec Checkpointing::snapshot(int64_t step) {
  const at::NoGradGuard no_grad;
  checkpoint::ShardSpec spec{.rank = parts_.world->rank(),
                             .step = step,
                             .generation = generation_,
                             .pieces = {},
                             .metadata = metadata_of(*parts_.model),
                             .state = random_state(parts_)};
  if (parts_.on_gpu()) kernels::synchronize_gpu();  // updates run on streams of their own
  const auto visit = [&](const StateCopy::Add& add) {
    spec.pieces.clear();
    visit_pieces(*parts_.model, [&](const MyPiece& piece) {
      spec.pieces.push_back(piece.spec);
      add(piece.values, piece.passes_change_it);
    });
  };
  pieces_.clear();
  if (copy_) {
    pieces_ = copy_->take(visit);
  } else {
    visit([this](const at::Tensor& values, bool) { pieces_.push_back(values.contiguous()); });
  }
  return spec;
}

/// The thread: nothing here communicates but through the folder.
void Checkpointing::write(const checkpoint::ShardSpec& spec, const std::string& temporary,
                          const std::string& state) {
  try {
    if (copy_) copy_->wait();
    const checkpoint::Folder folder(folder_ + "/" + temporary);
    checkpoint::write_shard(folder, spec, [&](size_t piece) { return pieces_[piece].const_data_ptr(); });
    if (store_) {
      store_->commit({.temporary = temporary,
                      .step = spec.step,
                      .ranks = parts_.world->size(),
                      .state = state,
                      .seconds = kShareOfTimeout * config_.comm.timeout_s,
                      .cancelled = [this] { return given_up_.load(); }});
      ++written_;
      prune();
    }
  } catch (const std::exception& error) {
    fail(temporary, error.what());
  }
  writing_ = false;
}

/// Ends the save under way; rank 0 hears that it waits in vain.
void Checkpointing::fail(const std::string& temporary, const std::string& reason) {
  error_ = reason;
  checkpoint::report_failure(folder_ + "/" + temporary, parts_.world->rank(), reason);
  if (store_) store_->abandon(temporary);
}

/// What cannot be removed is no fault of what was saved.
void Checkpointing::prune() {
  try {
    store_->prune(config_.checkpoint.keep);
  } catch (const Error& error) {
    log_warning("an old checkpoint was not removed: {}", error.what());
  }
}

void Checkpointing::join() {
  if (writer_.joinable()) writer_.join();
  pieces_.clear();
}

/// Compares how the last save ended; false while some rank still writes.
bool Checkpointing::settle() {
  if (!unsettled_) return true;
  const bool writing = writing_;
  if (any_rank(writing)) return false;
  join();
  unsettled_ = false;
  if (any_rank(!error_.empty())) {
    ++failed_;
    if (!error_.empty()) log_warning("a checkpoint was not written: {}; training continues", error_);
    if (store_) store_->abandon(temporary_);  // others may have written to it after this rank's thread did so
  }
  error_.clear();
  return true;
}

bool Checkpointing::begin_folder(const std::string& temporary) {
  std::string problem;
  if (store_) {
    try {
      store_->begin(temporary);
    } catch (const Error& error) {
      problem = error.what();
      log_warning("checkpoints cannot be written: {}; training continues", problem);
    }
  }
  return !any_rank(!problem.empty());
}

std::optional<double> Checkpointing::save(const StepRecord& record, bool last) {
  const double begin = monotonic_seconds();
  const auto waited_ms = [begin] { return 1e3 * (monotonic_seconds() - begin); };
  if (last) join();
  if (!settle()) {
    ++late_;
    return std::nullopt;
  }
  temporary_ = checkpoint::temporary_name(record.step, generation_, ++attempt_);
  if (!begin_folder(temporary_)) {
    ++failed_;
    return std::nullopt;
  }
  writing_ = true;
  unsettled_ = true;
  try {
    writer_ = std::thread(
        [this, spec = snapshot(record.step), state = run_state(record)] { write(spec, temporary_, state); });
  } catch (const EnvironmentError& error) {
    fail(temporary_, error.what());
    writing_ = false;
  }
  if (last || !config_.checkpoint.async) finish();
  return waited_ms();
}

void Checkpointing::finish() {
  join();
  settle();
  // An attempt may have died between its last save and this; one that had nothing to save does it instead.
  if (store_ && enabled() && resumes_ && written_ == 0) prune();
}

bool Checkpointing::has_written() const {
  return any_rank(written_ > 0);
}

}  // namespace trireme::train
