#pragma once
// Regular expressions of tokenizer files: Oniguruma's syntax, as Python's `tokenizers` reads them, run by
// PCRE2's compiler to machine code.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/text/span.h"

namespace trireme::text {

/// Copies share the compiled pattern; threads may use one object at a time together.
class Regex {
 public:
  /// Throws ConfigError where the pattern is wrong or uses what regex_syntax.h does not translate, and
  /// EnvironmentError in a build without PCRE2.
  explicit Regex(std::string_view pattern);

  /// Appends the matches in `text`, which is well-formed UTF-8, from left to right. They do not overlap, and
  /// an empty one does not touch the match before it. Throws DataError where a match takes more steps or
  /// memory than PCRE2 allows.
  void find_all(std::string_view text, std::vector<Span>& matches) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace trireme::text
