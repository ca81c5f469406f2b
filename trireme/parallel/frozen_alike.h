#pragma once
// Whether all ranks have frozen the same parameters. Where one has not, its part of a mean is not there, and
// ranks drift apart or train a part of a layer. A hash of what requires a gradient travels with numbers that
// ranks exchange anyway.
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/parallel/completion.h"

namespace trireme::parallel {

class FrozenAlike {
 public:
  using Flags = Completion::Flags;

  /// `ranks` train together; both must outlive this.
  FrozenAlike(comm::Group& ranks, const Completion::Units& units) : ranks_(ranks), units_(units) {}

  /// What this rank gives for its parameters that require gradients: exact as doubles, and made anew only
  /// when they change.
  const std::array<double, 2>& note(const Flags& trainable);
  /// The same on the ranks' device, (2) fp64.
  const at::Tensor& note_on_device(const Flags& trainable);
  /// " (blocks.1.w1 was frozen)": what this rank has changed, for errors.
  std::string change(const Flags& before, const Flags& now) const;
  /// Compares the notes of all ranks, (ranks, 2). On a GPU the host does not wait: it compares at the next
  /// call, when a whole step lies between. Throws LogicError, on all ranks, that names a parameter which is
  /// frozen on one and not on another; that is collective.
  void compare(const at::Tensor& notes, const Flags& trainable);
  /// The same at once, for notes that the host has.
  void compare(const std::vector<std::array<double, 2>>& notes, const Flags& trainable) const;

 private:
  struct OnItsWay {
    at::Tensor notes;  ///< pinned
    c10::Event copied;
    Flags trainable;
  };
  void follow(const Flags& trainable);
  void check_arrived();
  std::vector<std::string> names() const;
  [[noreturn]] void name_first(const Flags& trainable) const;

  comm::Group& ranks_;
  const Completion::Units& units_;
  Flags noted_;  ///< for which the note was made
  std::array<double, 2> note_ = {};
  at::Tensor on_device_;
  std::optional<OnItsWay> on_its_way_;
};

}  // namespace trireme::parallel
