#include "trireme/train/checkpointing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/error_of.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/comm/agree.h"
#include "trireme/kernels/device.h"
#include "trireme/plan/saved_copy.h"
#include "trireme/state/state.h"
#include "trireme/state/state_file.h"
#include "trireme/train/run_state.h"

namespace trireme::train {
namespace {

using Json = nlohmann::json;
using checkpoint::PieceSpec;

/// How long rank 0 waits for the others' parts: they may be waiting for it in a collective meanwhile.
constexpr double kShareOfTimeout = 0.5;

struct MyPiece {
  PieceSpec spec;
  at::Tensor values;  ///< of the region, on the device
  bool passes_change_it;
};

using PieceBody = std::function<void(const MyPiece&)>;

/// Visits the pieces of a stage that this rank writes: its share of what it holds.
void visit_pieces(const TrainedStage& stage, const PieceBody& body) {
  using state::HeldBy;
  const auto [replica, replicas] = stage.engine->replica();
  state::visit_sharded_state(*stage.engine, *stage.optimizer, [&](const state::StatePiece& piece) {
    if (piece.held_by == HeldBy::kAllRanks && stage.engine->mesh().dp->rank() != 0) return;
    plan::Region region = piece.region;
    if (piece.held_by == HeldBy::kReplicas) region = plan::share_of(region, replica, replicas);
    if (region.numel() == 0) return;
    const std::string dtype = checkpoint::safetensors_dtype(piece.values.scalar_type(), piece.name);
    body({{piece.name, dtype, piece.shape, region},
          piece.values.narrow(0, region.range.begin - piece.region.range.begin, region.numel()),
          piece.passes_change_it});
  });
}

void visit_pieces(const TrainedModel& model, const PieceBody& body) {
  for (const TrainedStage& stage : model.stages()) visit_pieces(stage, body);
}

std::map<std::string, std::string> metadata_of(const TrainedModel& model) {
  std::map<std::string, std::string> all;
  for (const TrainedStage& stage : model.stages()) all.merge(state::state_metadata(*stage.engine));
  return all;
}

}  // namespace

Checkpointing::Checkpointing(const TrainOptions& options, Parts& parts, precision::LossScaler& scaler)
    : options_(options), config_(parts.config), parts_(parts), scaler_(scaler) {
  agree_on_folder();
  const plan::Device device = parts.on_gpu() ? plan::Device::kCuda : plan::Device::kCpu;
  if (!enabled() || plan::saves_in_place(config_, device)) return;
  copy_.emplace(parts.world->device(),
                plan::saved_copy_bytes(config_, parts.held, parts.mesh.shape, parts.mesh.pp_rank));
}

Checkpointing::~Checkpointing() {
  join();
  if (unsettled_ && !error_.empty()) log_warning("a checkpoint was not written: {}", error_);
}

/// Rank 0 knows the folders and whether to resume, and is the one that commits.
void Checkpointing::agree_on_folder() {
  const bool writes = config_.checkpoint.every > 0 || options_.resume;  // a resumed run's records, at least
  const auto error = error_of([&] {
    if (parts_.is_root() && writes && !options_.checkpoint_dir.empty())
      claim_.emplace(options_.checkpoint_dir);
  });
  comm::Group& ranks = *parts_.mesh.all;
  comm::throw_together(ranks, error, "train.checkpoints");
  const Json mine{{"folder", options_.checkpoint_dir},
                  {"wanted", options_.resume_from},
                  {"resumes", options_.resume},
                  {"generation", claim_ ? claim_->generation() : 0}};
  const Json known = Json::parse(comm::text_of(ranks, 0, parts_.is_root() ? mine.dump() : std::string()));
  folder_ = known["folder"];
  wanted_ = known["wanted"];
  resumes_ = known["resumes"];
  generation_ = known["generation"];
}

void Checkpointing::take_over() {
  if (!uses_folder()) return;
  const auto error = error_of([&] {
    if (!claim_) return;
    store_ = std::make_unique<checkpoint::Store>(std::move(*claim_));
    claim_.reset();
    set_aside_later_ones();
  });
  comm::throw_together(*parts_.mesh.all, error, "train.checkpoints");
}

/// A run that was told to go back must not be found in the branch that it left, however early it ends.
void Checkpointing::set_aside_later_ones() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path wanted = fs::weakly_canonical(wanted_, error);
  if (wanted_.empty() || error || wanted.parent_path() != fs::weakly_canonical(folder_, error)) return;
  std::vector<std::string> aside;
  for (const auto& one : store_->go_back_to(wanted.filename().string())) aside.push_back(one.aside);
  if (wanted.filename().string().ends_with(".undone"))
    log_warning(
        "metrics.jsonl keeps no records of steps that were set aside: up to the step of {} it may have those "
        "of "
        "the branch that the run leaves now",
        wanted.filename().string());
  if (aside.empty()) return;
  log_info("resume  later checkpoints were set aside as {}; '--resume {}/NAME' goes back to one",
           trireme::join(aside, ", "), folder_);
}

bool Checkpointing::can_save(int64_t step) const {
  const bool local = config_.parallel.comm_hook == plan::CommHook::kLocalSgd;
  return enabled() && (!local || step % config_.parallel.local_steps == 0);
}

/// The newest checkpoint of the folder, on all ranks; empty: there is none.
std::string Checkpointing::choose(const std::string& older_than) {
  std::string path;
  const auto error = error_of([&] {
    std::error_code missing;
    if (!parts_.is_root() || !std::filesystem::is_directory(folder_, missing)) return;
    const checkpoint::Newest newest = checkpoint::newest_checkpoint(checkpoint::Folder(folder_), older_than);
    for (const std::string& reason : newest.passed_over) log_warning("resume  skipped {}", reason);
    if (newest.checkpoint) {
      path = newest.checkpoint->path();
    } else if (newest.damaged > 0 || !older_than.empty()) {
      throw DataError(
          "[train.resume] none of the checkpoints in {} can be read; 'trireme ckpt verify' says why. Remove "
          "them to start at step 1",
          folder_);
    }
  });
  comm::throw_together(*parts_.mesh.all, error, "train.resume");
  return comm::text_of(*parts_.mesh.all, 0, path);
}

Checkpointing::Resumed Checkpointing::resume() {
  if (!resumes_) return {};
  if (!wanted_.empty()) return resume_from(wanted_);
  std::string older_than;
  for (;;) {
    const std::string path = choose(older_than);
    if (path.empty()) return {};
    try {
      return resume_from(path);
    } catch (const DataError& error) {
      if (parts_.is_root()) log_warning("resume  {}; trying the previous one", error.what());
    }
    older_than = std::filesystem::path(path).filename();
  }
}

/// Every rank reads its own part, so any of them may find damage; then all throw. What else keeps a rank from
/// reading is no reason to take an older checkpoint, and has a lower exit code.
Checkpointing::Resumed Checkpointing::resume_from(const std::string& path) {
  const auto together = [&](const std::function<void()>& body) {
    comm::throw_together(*parts_.mesh.all, error_of(body), "train.resume");
  };
  std::optional<SavedRun> run;
  together([&] { run.emplace(checkpoint::Checkpoint(path).state(), path); });
  run->check(parts_);
  run->keep_steps(parts_);
  // The config says that all stages together are the checkpoint's model.
  together([&] {
    for (const TrainedStage& stage : parts_.model->stages())
      state::load_state(*stage.engine, *stage.optimizer, path, parts_.model->load_options());
  });
  return restore(*run, path);
}

/// What is not in tensors.
Checkpointing::Resumed Checkpointing::restore(const SavedRun& run, const std::string& path) {
  if (enabled() && !can_save(run.step())) {
    throw ConfigError(
        "[train.resume] {} is from step {}, which is not a multiple of parallel.local_steps={}, so ranks "
        "would save between two averagings; use a divisor of that step, or set checkpoint.every to 0",
        path, run.step(), config_.parallel.local_steps);
  }
  Resumed resumed{.step = run.step(), .loss = run.loss(), .record = run.record()};
  run.restore(parts_, scaler_);
  parts_.open_feed(resumed.step);
  if (parts_.is_root() && options_.announce) log_info("resume  after step {} of {}", resumed.step, path);
  return resumed;
}

/// What this rank is to write, and the pieces as they are now, or are going to be when copy_ has arrived.
checkpoint::ShardSpec Checkpointing::snapshot(int64_t step) {
  const at::NoGradGuard no_grad;
  checkpoint::ShardSpec spec{.rank = parts_.world->rank(),
                             .step = step,
                             .generation = generation_,
                             .pieces = {},
                             .metadata = metadata_of(*parts_.model),
                             .state = rank_state(parts_)};
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
  bool committed = false;
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
      committed = true;
    }
  } catch (const std::exception& error) {
    fail(temporary, error.what());
  }
  writing_ = false;
  writing_.notify_all();
  if (committed) prune();
  pruning_ = false;
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
    store_->prune(config_.checkpoint.keep, [this] { return given_up_ || monotonic_seconds() > read_until_; });
  } catch (const Error& error) {
    log_warning("an old checkpoint was not removed: {}", error.what());
  }
}

double Checkpointing::patience_end() const {
  return monotonic_seconds() + kShareOfTimeout * config_.comm.timeout_s;
}

/// Rank 0 may be reading back for longer than others wait for it: then the next save removes what is older.
void Checkpointing::join() {
  if (!writer_.joinable()) return;
  read_until_ = patience_end();
  writer_.join();
  read_until_ = std::numeric_limits<double>::infinity();
}

/// Compares how the last save ended; false while some rank is `busy` with it.
bool Checkpointing::settle(bool busy) {
  if (!unsettled_) return true;
  if (comm::any_rank(*parts_.mesh.all, busy)) return false;
  pieces_.clear();
  unsettled_ = false;
  if (comm::any_rank(*parts_.mesh.all, !error_.empty())) {
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
  return !comm::any_rank(*parts_.mesh.all, !problem.empty());
}

std::optional<double> Checkpointing::save(const StepRecord& record, bool last) {
  const double begin = monotonic_seconds();
  const auto waited_ms = [begin] { return 1e3 * (monotonic_seconds() - begin); };
  if (last) join();
  if (!settle(writing_ || pruning_)) {
    ++late_;
    return std::nullopt;
  }
  join();
  temporary_ = checkpoint::temporary_name(record.step, generation_, ++attempt_);
  if (!begin_folder(temporary_)) {
    ++failed_;
    return std::nullopt;
  }
  writing_ = true;
  pruning_ = true;
  unsettled_ = true;
  try {
    writer_ = std::thread([this, spec = snapshot(record.step), state = run_state(parts_, scaler_, record)] {
      write(spec, temporary_, state);
    });
  } catch (const EnvironmentError& error) {
    fail(temporary_, error.what());
    writing_ = false;
    pruning_ = false;
  }
  if (last || !config_.checkpoint.async) {
    writing_.wait(true);
    settle(false);
  }
  return waited_ms();
}

void Checkpointing::finish() {
  join();
  settle(false);
  // An attempt may have died between its last save and this; one that had nothing to save does it instead.
  if (!store_ || !enabled() || !resumes_ || written_ > 0) return;
  read_until_ = patience_end();
  prune();
}

bool Checkpointing::has_written() const {
  return comm::any_rank(*parts_.mesh.all, written_ > 0);
}

}  // namespace trireme::train
