#pragma once
// A step while the program makes it: kept as long as it is the recorded one, else given to workers. Private
// to gt/*.cpp.
#include <optional>
#include <vector>

#include "trireme/controller/program_runner.h"
#include "trireme/plan/step_recording.h"

namespace gt {

class CapturedStep {
 public:
  /// Both must outlive it.
  CapturedStep(const trireme::plan::StepRecording& recording, trireme::controller::ProgramRunner& runner)
      : runner_(runner) {
    if (recording.is_known()) match_.emplace(recording);
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  void take(const trireme::plan::Instruction& instruction, uint64_t placed) {
    made_.push_back({instruction, placed});
    if (!match_ || !match_->take(instruction, placed)) release();
  }
  /// Gives workers what was kept, and all that follows at once.
  void release() {
    match_.reset();
    for (; given_ < made_.size(); ++given_) runner_.submit(made_[given_].instruction);
  }

  bool is_complete() const { return match_ && match_->is_complete(); }
  const std::vector<int64_t>& arguments() const { return match_->arguments(); }
  const std::vector<trireme::plan::MadeInstruction>& made() const { return made_; }

 private:
  trireme::controller::ProgramRunner& runner_;
  std::optional<trireme::plan::StepMatch> match_;
  std::vector<trireme::plan::MadeInstruction> made_;
  size_t given_ = 0;
};

}  // namespace gt
