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

BestWeights::BestWeights(std::string path, int64_t done, const comm::Mesh& mesh, Monitor monitor,
                         BestValidation& best)
    : path_(std::move(path)), is_root_(mesh.world->rank() == 0), best_(best) {
  if (done == 0 || best_.monitor != monitor) best_ = {};
  best_.monitor = std::move(monitor);
  if (done == 0) return;
  const Found mine = is_root_ ? find(done) : Found();
  const bool lost = mine.step == 0 && is_root_ && !std::filesystem::exists(aside());
  const auto at_root =
      comm::gather_scalars(*mesh.all, {static_cast<double>(mine.step), mine.score, lost ? 1.0 : 0.0}).front();
  step_ = static_cast<int64_t>(at_root[0]);
  if (step_ > 0) best_.step = step_, best_.score = at_root[1];
  if (at_root[2] != 0.0) best_.step = 0;  // nobody has those weights any more: the next ones replace them
}

BestWeights::Found BestWeights::find(int64_t done) const {
  if (!std::filesystem::exists(path_)) return {};
  try {
    const state::Notes notes = state::read_notes(path_);
    const Found found{number_in<int64_t>(notes, "step", path_), number_in<double>(notes, "score", path_)};
    // Weights that were the best by another metric are replaced; files of old versions do not name theirs.
    const auto is = [&notes](const char* key, const std::string& value) {
      const auto note = notes.find(key);
      return note == notes.end() || note->second == value;
    };
    const bool comparable = std::isfinite(found.score) && is(kMonitorNote, best_.monitor.metric) &&
                            is(kDirectionNote, direction_of(best_.monitor));
    if (comparable && are_ours(found, done)) return found;
    if (comparable || found.step > done) put_aside(found.step, done);
  } catch (const Error& error) {
    log_warning("the best weights so far are unknown: {}; the next validation replaces them", error.what());
  }
  return {};
}

/// A checkpoint is written before the validation that follows its step. Those of old versions know no best
/// one.
bool BestWeights::are_ours(const Found& found, int64_t done) const {
  if (found.step > done) return false;
  if (best_.step == 0 || (found.step == best_.step && found.score == best_.score)) return true;
  return found.step == done && found.score > best_.score;
}

void BestWeights::put_aside(int64_t step, int64_t done) const {
  std::error_code error;
  std::filesystem::rename(path_, aside(), error);
  const std::string until =
      best_.step == 0 ? "until the next validation"
                      : fmt::format("until a validation is better than that of step {}", best_.step);
  if (error) {
    log_warning(
        "the best weights so far are of step {}, not of the run up to step {}, and cannot be put aside: {}; "
        "they "
        "stay {}",
        step, done, error.message(), until);
  } else {
    log_info(
        "resume  the best weights so far are of step {}, not of the run up to step {}; they stay in {} {}",
        step, done, aside(), until);
  }
}

void BestWeights::keep(int64_t step, const Validation& found, TrainedModel& model) {
  const double score = best_.monitor.score_of(found);
  if (!std::isfinite(score) || (best_.step > 0 && score <= best_.score)) return;
  try {
    model.save_weights(path_, {{"step", fmt::format("{}", step)},
                               {"score", fmt::format("{}", score)},
                               {kMonitorNote, best_.monitor.metric},
                               {kDirectionNote, direction_of(best_.monitor)},
                               {"val_loss", fmt::format("{}", found.loss)}});
  } catch (const EnvironmentError& error) {
    if (is_root_) log_warning("the best weights so far are not saved: {}; training continues", error.what());
    return;
  }
  best_.step = step_ = step;
  best_.score = score;
  std::error_code error;
  if (is_root_) std::filesystem::remove(aside(), error);
}

}  // namespace trireme::train
