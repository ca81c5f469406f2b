#pragma once
#include <ATen/Context.h>

namespace trireme::test {

/// While it lives torch fills memory that nobody has written with NaN, so that reading it shows.
class NanMemory {
 public:
  NanMemory() {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
  }
  NanMemory(const NanMemory&) = delete;
  NanMemory& operator=(const NanMemory&) = delete;
  ~NanMemory() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

}  // namespace trireme::test
