#pragma once
// A program of a controller on ranks that have it as a file: without a client, and without its values.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/comm/world.h"
#include "trireme/plan/instruction.h"

namespace trireme::controller {

struct ReplaySettings {
  std::string name;           ///< of the program, for messages
  bool random_values = true;  ///< of floating inputs, normally distributed; other inputs are zeros
  int64_t seed = 42;
  bool is_explicit = false;  ///< what would move between workers unasked is an error
  bool timed = false;        ///< the time of each instruction is taken, for which a GPU is waited for
};

/// A value that the program has fetched.
struct ReplayedValue {
  int64_t number = 0, elements = 0;
  std::vector<double> first = {};  ///< a few elements
};
/// An instruction of which this rank had a share, in seconds of the machine's clock.
struct ReplayedTime {
  int64_t instruction = 0;
  double begin = 0.0, end = 0.0;
};
struct ReplayOutcome {
  double seconds = 0.0;                     ///< of this rank
  uint64_t hash = 0;                        ///< of what was placed
  std::vector<ReplayedValue> fetched = {};  ///< by this rank
  std::vector<ReplayedTime> times = {};     ///< where they were asked for
};

/// Runs the instructions of a program, whose signals all have workers, as ranks of the world. Batches of its
/// datasets are those that the program had, as long as this machine has the text. Throws ConfigError as
/// NumberedTensors does, and Error with the instruction for what libtorch throws.
ReplayOutcome replay_program(comm::World& world, const plan::Program& program, const ReplaySettings& settings,
                             const Environment& environment);

}  // namespace trireme::controller
