#pragma once
// A step while the program makes it: held back as long as it is one that is known, else given to workers.
// Private to gt/*.cpp.
#include <algorithm>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "trireme/controller/program_runner.h"
#include "trireme/plan/step_recording.h"

namespace gt {

/// A step that a capture has seen.
struct KnownStep {
  trireme::plan::StepRecording recording;
  uint32_t number = 0;   ///< by which workers know it
  uint64_t defined = 0;  ///< the version that they have; 0: none
};

class CapturedStep {
 public:
  /// Longer steps are given to workers at once, and not compared.
  static constexpr size_t kMostInstructions = 1 << 18;

  /// Both must outlive it; `known` stays as it is.
  CapturedStep(std::list<KnownStep>& known, trireme::controller::ProgramRunner& runner) : runner_(runner) {
    for (KnownStep& step : known) {
      if (step.recording.is_known()) matches_.emplace_back(&step, trireme::plan::StepMatch(step.recording));
    }
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  void take(const trireme::plan::Instruction& instruction, uint64_t placed) {
    if (is_too_long_) return runner_.submit(instruction);
    made_.push_back({instruction, placed});
    std::erase_if(matches_, [&](auto& match) { return !match.second.take(instruction, placed); });
    if (matches_.empty()) release();
    if (made_.size() <= kMostInstructions) return;
    release();
    is_too_long_ = true;
    made_ = {};
  }
  /// Gives workers what was held back, and all that follows at once.
  void release() {
    matches_.clear();
    for (; given_ < made_.size(); ++given_) runner_.submit(made_[given_].instruction);
  }

  /// The known step that it is, with the arguments of its numbers; null: none.
  std::pair<KnownStep*, std::vector<int64_t>> complete() const {
    for (const auto& [step, match] : matches_) {
      if (match.is_complete()) return {step, match.arguments()};
    }
    return {nullptr, {}};
  }
  bool is_too_long() const { return is_too_long_; }
  const std::vector<trireme::plan::MadeInstruction>& made() const { return made_; }

 private:
  trireme::controller::ProgramRunner& runner_;
  std::list<std::pair<KnownStep*, trireme::plan::StepMatch>> matches_;
  std::vector<trireme::plan::MadeInstruction> made_;
  size_t given_ = 0;
  bool is_too_long_ = false;
};

}  // namespace gt
