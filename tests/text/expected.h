#pragma once
// The ids that Python's `tokenizers` made of texts, written by make_fixtures.py, and the comparison with
// ours.
#include <string>
#include <vector>

namespace trireme::text::testing {

/// The folder of what is committed.
std::string fixtures();

/// Names of the tokenizers in `folder`: NAME.json or NAME.model beside NAME.expected.json.
std::vector<std::string> tokenizers_in(const std::string& folder);

/// The path of the tokenizer `name`.
std::string file_of(const std::string& folder, const std::string& name);

/// Fails the running test where ids or decoded texts of the tokenizer `name` are not the expected ones.
void compare_texts(const std::string& folder, const std::string& name);
/// The ids of each code point alone, where the expectations have it.
void compare_code_points(const std::string& folder, const std::string& name);

/// compare_texts() for all tokenizers that make_fixtures.py makes now, with these options of it. Skips the
/// running test where python3, or the one that TRIREME_TEST_PYTHON names, lacks the modules.
void compare_with_python_here(const std::string& options);

}  // namespace trireme::text::testing
