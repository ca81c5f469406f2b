#pragma once
// Whether kernels must give the same bits each time they run on the same inputs.

namespace trireme::kernels {

/// While a Repeatable(true) lives, every operation of this process repeats its bits, or throws where it
/// cannot: attention runs backward in a fixed order (nn/attention.h), matrix products always take cuBLASLt's
/// first algorithm, and torch's own operations are told so (at::Context::setDeterministicAlgorithms, and the
/// like for cuDNN). For the whole process; ranks that are threads may each hold one. The last one restores
/// torch's settings.
class Repeatable {
 public:
  /// `on` false: changes nothing. Thread-safe.
  explicit Repeatable(bool on);
  /// Gives its hold back.
  ~Repeatable();
  Repeatable(const Repeatable&) = delete;
  Repeatable& operator=(const Repeatable&) = delete;

 private:
  bool on_;
};

/// While a TunedConvolutions(true) lives, cuDNN tries the algorithms of each convolution of a new shape and
/// keeps the fastest, which may be another one, with other bits, in the next run. For the whole process.
class TunedConvolutions {
 public:
  /// `on` false: changes nothing.
  explicit TunedConvolutions(bool on);
  /// Restores the setting that it found.
  ~TunedConvolutions();
  TunedConvolutions(const TunedConvolutions&) = delete;
  TunedConvolutions& operator=(const TunedConvolutions&) = delete;

 private:
  bool on_, before_;
};

/// Has MKL choose its vector functions (exp, log, tanh, erf) for this processor. It chooses in the first call
/// of a process and takes no lock for it, so that of several threads that make the first call at once one may
/// compute with functions of other bits. Threads that compute are started after this. Does it once.
void choose_vector_functions();

/// Whether kernels must repeat their bits now: a Repeatable lives, or torch was told so by other means.
bool must_repeat();

}  // namespace trireme::kernels
