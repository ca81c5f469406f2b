#pragma once
// Counts the bytes that this rank sends in a full step, to be compared with what was predicted. A full step
// sends most: the one that ends an epoch may have fewer micro-batches, and the one behind a validation finds
// parameters that are gathered already.
#include <cstdint>

#include "trireme/train/agenda.h"
#include "trireme/train/parts.h"

namespace trireme::train {

class SentBytes {
 public:
  /// Both must outlive this.
  SentBytes(const Parts& parts, const Agenda& agenda) : parts_(parts), agenda_(agenda) {}

  void begin_step();
  void end_step(int64_t step);
  int64_t in_full_step() const { return in_full_step_; }

 private:
  /// Whether ranks agree in this step on what they record from then on (Passes::decide()).
  bool decides_in(int64_t step) const;

  const Parts& parts_;
  const Agenda& agenda_;
  int64_t before_ = 0;   ///< sent when the step began
  bool stayed_ = false;  ///< units kept their memory then
  int64_t in_full_step_ = 0;
  bool begins_anew_ = true;    ///< the next step is the first that communicates as all after it
  bool counts_first_ = false;  ///< what is counted is of the first step of the run
};

}  // namespace trireme::train
