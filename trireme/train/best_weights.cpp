#include "trireme/train/best_weights.h"

#include <charconv>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::train {
namespace {

constexpr const char* kMonitorNote = "monitor";
constexpr const char* kDirectionNote = "higher_is_better";

std::string direction_of(const Monitor& monitor) {
  return monitor.higher_is_better ? "true" : "false";
}

/// Throws DataError when the note is none of ours.
template <typename Number>
Number number_in(const state::Notes& notes, const char* key, const std::string& path) {
  Number number = {};
  if (const auto note = notes.find(key); note != notes.end()) {
    const char* const end = note->second.data() + note->second.size();
    if (const auto read = std::from_chars(note->second.data(), end, number);
        read.ec == std::errc() && read.ptr == end)
      return number;
  }
  throw DataError("[train.best_weights] {} has no {}", path, key);
}

}  // namespace

BestWeights::BestWeights(std::string path, int64_t done, const comm::Mesh& mesh, Monitor monitor)
    : path_(std::move(path)), monitor_(std::move(monitor)), is_root_(mesh.world->rank() == 0) {
  if (done == 0) return;
  double step = 0.0, score = 0.0;
  if (is_root_ && std::filesystem::exists(path_)) {
    try {
      const state::Notes notes = state::read_notes(path_);
      score = number_in<double>(notes, "score", path_);
      const auto noted = number_in<int64_t>(notes, "step", path_);
      // Weights that were the best by another metric are replaced; files of old versions do not name theirs.
      const auto is = [&notes](const char* key, const std::string& value) {
        const auto note = notes.find(key);
        return note == notes.end() || note->second == value;
      };
      const bool comparable = std::isfinite(score) && is(kMonitorNote, monitor_.metric) &&
                              is(kDirectionNote, direction_of(monitor_));
      step = comparable && noted <= done ? static_cast<double>(noted) : 0.0;
      if (noted > done) put_aside(noted, done);
    } catch (const Error& error) {
      log_warning("the best weights so far are unknown: {}; the next validation replaces them", error.what());
    }
  }
  const auto at_root = comm::gather_scalars(*mesh.all, {step, score}).front();
  step_ = static_cast<int64_t>(at_root[0]);
  if (step_ > 0) score_ = at_root[1];
}

void BestWeights::put_aside(int64_t step, int64_t done) const {
  std::error_code error;
  std::filesystem::rename(path_, aside(), error);
  if (error) {
    log_warning(
        "the best weights so far are of step {}, which comes again after step {}, and cannot be put aside: "
        "{}; the next validation replaces them",
        step, done, error.message());
  } else {
    log_info(
        "resume  the best weights so far are of step {}, which comes again after step {}; they stay in {} "
        "until the next validation",
        step, done, aside());
  }
}

void BestWeights::keep(int64_t step, const Validation& found, TrainedModel& model) {
  const double score = monitor_.score_of(found);
  if (!std::isfinite(score) || (score_ && score <= *score_)) return;
  try {
    model.save_weights(path_, {{"step", fmt::format("{}", step)},
                               {"score", fmt::format("{}", score)},
                               {kMonitorNote, monitor_.metric},
                               {kDirectionNote, direction_of(monitor_)},
                               {"val_loss", fmt::format("{}", found.loss)}});
  } catch (const EnvironmentError& error) {
    if (is_root_) log_warning("the best weights so far are not saved: {}; training continues", error.what());
    return;
  }
  score_ = score;
  step_ = step;
  std::error_code error;
  if (is_root_) std::filesystem::remove(aside(), error);
}

}  // namespace trireme::train
