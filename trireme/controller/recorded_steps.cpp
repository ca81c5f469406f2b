#include "trireme/controller/recorded_steps.h"

#include "trireme/base/error.h"

namespace trireme::controller {
namespace {

constexpr size_t kMostStepBytes = 64 << 20;

}  // namespace

void RecordedSteps::add(uint32_t number, std::string_view piece, bool is_last) {
  std::string& bytes = coming_[number];
  if (bytes.size() + piece.size() > kMostStepBytes)
    throw ConfigError("[controller.steps] a recorded step has more than {} bytes; capture a shorter one",
                      kMostStepBytes);
  bytes.append(piece);
  if (!is_last) {
    if (coming_.size() > 1) throw CommError("[controller.steps] pieces of two steps came at once");
    return;
  }
  plan::RecordedStep step = plan::step_from_bytes(bytes);
  coming_.clear();
  if (steps_.size() >= plan::kMostRecordedSteps && !steps_.contains(number))
    throw ConfigError(
        "[controller.steps] {} recorded steps are kept, and no more may be; use a gt::Capture again",
        steps_.size());
  const size_t instructions = step.instructions.size();
  steps_[number] = {std::move(step), {}};
  steps_[number].placed.resize(instructions);
}

RecordedSteps::Kept& RecordedSteps::step(uint32_t number, size_t arguments) {
  const auto found = steps_.find(number);
  if (found == steps_.end()) throw CommError("[controller.steps] no step {} was recorded", number);
  const size_t takes = found->second.step.is_real.size();
  if (takes != arguments)
    throw CommError("[controller.steps] {} arguments came for step {}, which takes {}", arguments, number,
                    takes);
  return found->second;
}

}  // namespace trireme::controller
