#pragma once
// A fuzzer without tools: mutations of valid files, the same in every run, which grow on each other where the
// parser takes them.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace trireme::checkpoint::testing {

struct FuzzTarget {
  std::vector<std::string> seeds;
  std::vector<std::string> words;  ///< of the format, to insert
  /// Parses; true when it takes the text. Throws DataError, caught outside, when not. Anything else, or an
  /// expectation that does not hold of what was taken, is a finding.
  std::function<bool(const std::string& text)> parse;
};

struct FuzzCounts {
  int64_t taken = 0;
  int64_t refused = 0;
};

/// Stops at the first finding, which is a failure of the test that shows the text.
FuzzCounts fuzz(const FuzzTarget& target, int64_t executions, uint64_t seed);

FuzzTarget safetensors_target();
FuzzTarget index_target();
FuzzTarget commit_target();
/// A folder of Hugging Face: which file has which tensor, and the model.
FuzzTarget files_index_target();
FuzzTarget model_config_target();
/// Where boxes of DCP's files begin, as JSON with the shapes of each file.
FuzzTarget boxes_target();

}  // namespace trireme::checkpoint::testing
