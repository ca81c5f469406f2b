#pragma once
// The recorded steps of a session where they are made again: on a worker, or on a rank that makes the program
// itself.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/step_recording.h"

namespace trireme::controller {

class RecordedSteps {
 public:
  /// The next piece of the bytes of a step; with the last one it takes the place of the one that had the
  /// number before. Throws DataError for what to_bytes() did not write, ConfigError for steps that are too
  /// many or too large.
  void add(uint32_t number, std::string_view piece, bool is_last);

  /// An instruction of a step that is made, and how it was placed when the step was made first; null: this is
  /// the first time, and whoever places it keeps it there.
  struct Made {
    plan::Instruction instruction;
    std::shared_ptr<const plan::PlacedInstruction>& placed;
  };
  /// Calls run(Made) for the instructions of a step. Throws CommError for another number of arguments or a
  /// step that is not there, and DataError as RecordedStep::made() does.
  template <typename Run>
  void replay(uint32_t number, const std::vector<int64_t>& arguments, const Run& run) {
    Kept& kept = step(number, arguments.size());
    size_t at = 0;
    for (size_t i = 0; i < kept.placed.size(); ++i)
      run(Made{kept.step.made(i, at, arguments), kept.placed[i]});
  }

  void clear() { *this = {}; }

 private:
  struct Kept {
    plan::RecordedStep step;
    std::vector<std::shared_ptr<const plan::PlacedInstruction>> placed;
  };
  Kept& step(uint32_t number, size_t arguments);

  std::map<uint32_t, Kept> steps_;
  std::map<uint32_t, std::string> coming_;
};

}  // namespace trireme::controller
