#pragma once
// The parts that the fuzzers of this room share: draws, damage, and an execution that is watched.
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/hash.h"

namespace trireme::text::testing {

/// Numbers that follow from the number of the execution.
class FuzzDraws {
 public:
  explicit FuzzDraws(uint64_t execution) : execution_(execution) {}
  uint64_t below(uint64_t end) { return end == 0 ? 0 : mix64(execution_, step_++) % end; }
  template <typename T>
  const T& one_of(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }

 private:
  uint64_t execution_, step_ = 0;
};

/// `text` with one to four changes: bytes overwritten, taken out, said twice, all from a place on cut off,
/// numbers that arithmetic fails at, one of `words`, or the rest of another text.
std::string damaged(std::string text, const std::vector<std::string>& words,
                    const std::vector<std::string>& others, FuzzDraws& draws);

/// Runs `body`, which may throw an Error of this room. Another one, and one that takes more than ten seconds
/// of the processor, fails the test. Returns whether the test goes on.
bool fuzz_once(uint64_t execution, const std::function<void()>& body);

/// The bytes of a file, which must be there.
std::string fuzz_seed(const std::string& path);

/// Two texts that use most of what tokenizers do.
const std::vector<std::string>& fuzz_samples();

}  // namespace trireme::text::testing
