#pragma once
// Steps of a program that workers have already, as CUDA graphs have the kernels of a step.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "trireme/gt/tensor.h"

namespace gt {

/// A part of a program that is made again and again, such as a training step:
///
///     gt::Capture train;
///     for (int step = 0; step < 100; ++step) train([&] { loss(batch(step)).backward(); optimizer.step(); });
///
/// Every call calls the function, and compares the instructions that it makes with those of calls before. A
/// step that was made twice, the same but for numbers (of tensors, steps, seeds, values from outside, rates),
/// is known: the next one that follows the same pattern is sent as a few arguments of these numbers, and
/// workers make the instructions that they have, without taking them apart and, from the second time on,
/// without placing them. So nothing that the function reads can change unseen: a call that makes something
/// else is given to workers as if it was not captured, and why() says what differed. What is computed is the
/// same, bit for bit, in both ways; the client has the same work in both. Up to 16 different steps are
/// known at a time, such as batches of several shapes; a call that is one of them is found by its
/// instructions.
///
/// Workers begin a replay when the function has ended; two may be under way. A value that is fetched in the
/// function can be read after the call. Schedules may be captured; captures within captures, and within
/// schedules, throw trireme::ConfigError. Where the function throws, workers get what it has made until then.
class Capture {
 public:
  Capture();
  ~Capture();
  /// A capture that was moved from may be assigned to, or end, and nothing else.
  Capture(Capture&&) noexcept;
  Capture& operator=(Capture&&) noexcept;

  /// Throws as the function and all calls of the program do.
  void operator()(const std::function<void()>& step);

  int64_t calls() const;
  int64_t replays() const;  ///< calls of which workers got numbers alone
  /// Counts of the step that was made last: its instructions, and the arguments of a replay.
  int64_t instructions() const;
  int64_t arguments() const;
  /// Why the last call was no replay, or why there was none yet; empty: it was one.
  const std::string& why() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gt
