#pragma once
// Damaged files and texts: an error or ids, never a crash. The damage is a function of the number of the
// execution, so that a failure repeats.
#include <cstdint>

namespace trireme::text::testing {

/// Loads so many damaged tokenizer files, and encodes with those that are accepted.
void fuzz_files(uint64_t executions);
/// Encodes and decodes so many damaged texts with each tokenizer of the fixtures.
void fuzz_texts(uint64_t executions);

}  // namespace trireme::text::testing
