#pragma once
// Whoever runs the instructions of a program: workers behind a dispatcher, or ranks in this process.
#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "trireme/plan/step_recording.h"

namespace trireme::controller {

class ProgramRunner {
 public:
  virtual ~ProgramRunner() = default;
  virtual int64_t workers() const = 0;
  /// The next signal of the program. Every one comes before instructions that name it.
  virtual void add_signal(const std::string& name, const std::vector<int64_t>& workers) = 0;
  /// The next dataset of the program, from 1 on. Every one comes before instructions that name it. Returns at
  /// once; workers open it when they need the first of its rows.
  virtual void add_dataset(const plan::DatasetSpec& dataset) = 0;
  /// The next instruction. Returns at once, unless workers are far behind. Throws CommError that names the
  /// worker and the cause where an earlier instruction has failed.
  virtual void submit(const plan::Instruction& instruction) = 0;
  /// A recorded step, which replays name by this number; one that had it before is forgotten.
  virtual void define_step(uint32_t number, const plan::RecordedStep& step) = 0;
  /// The instructions of the step, with numbers that follow from the arguments, as if they were submitted one
  /// after the other. Workers behind a dispatcher have one replay and the next: the third waits until the
  /// first is done, for as long as they live. Throws as submit() does.
  virtual void replay(uint32_t number, const std::vector<int64_t>& arguments) = 0;
  /// Instructions may be collected before they leave; now they leave.
  virtual void flush() = 0;
  /// The bytes of the value with which `worker` is to begin an input from `number`.
  virtual void put(int64_t number, int64_t worker, const std::string& bytes) = 0;

  struct Asked {
    int64_t number = 0;              ///< of the fetch
    std::future<std::string> value;  ///< throws as submit() does
  };
  /// Announces a fetch of so many bytes from `worker`, before its instruction is submitted.
  virtual Asked ask(int64_t worker, int64_t bytes) = 0;
};

}  // namespace trireme::controller
