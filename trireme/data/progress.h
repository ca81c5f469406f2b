#pragma once
// How far the preparation of a corpus has come: shown to people, proof that it makes headway, and the place
// where it can be given up.
#include <cstdint>
#include <functional>
#include <utility>

namespace trireme::data {

struct Progress {
  int64_t done = 0;   ///< bytes of text read so far, each counted once a pass
  int64_t total = 0;  ///< of all passes; 0: not known yet
  int64_t beats = 0;  ///< grows with all headway, also where no bytes are read
};

/// Called from the preparing thread after each 16 MiB of text at the latest, 10 times a second while a long
/// document is tokenised, and 50 times a second while another process is waited for. What it throws ends the
/// preparation, which then leaves nothing behind.
using OnProgress = std::function<void(const Progress&)>;

/// Counts headway and tells.
class ProgressMeter {
 public:
  explicit ProgressMeter(OnProgress on_progress) : on_progress_(std::move(on_progress)) {}

  void expect(int64_t bytes) { progress_.total = bytes; }
  void add(int64_t bytes) {
    progress_.done += bytes;
    beat();
  }
  void beat() {
    ++progress_.beats;
    tell();
  }
  /// Calls on_progress without counting headway: a chance to give up.
  void tell() const {
    if (on_progress_) on_progress_(progress_);
  }

 private:
  OnProgress on_progress_;
  Progress progress_;
};

}  // namespace trireme::data
