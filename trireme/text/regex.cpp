#include "trireme/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "trireme/base/error.h"
#include "trireme/text/regex_syntax.h"
#include "trireme/text/stand_ins.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr size_t kStackBegin = size_t{32} << 10;  // of a thread's matches, in bytes
constexpr size_t kStackLimit = size_t{16} << 20;

PCRE2_SPTR8 bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR8>(text.data());
}

std::string message_of(int error) {
  std::array<PCRE2_UCHAR8, 256> text{};
  pcre2_get_error_message_8(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

struct FreeCompileContext {
  void operator()(pcre2_compile_context_8* context) const { pcre2_compile_context_free_8(context); }
};

pcre2_code_8* compile(std::string_view pattern) {
  const std::string translated = to_pcre2(pattern);
  const std::unique_ptr<pcre2_compile_context_8, FreeCompileContext> context(
      pcre2_compile_context_create_8(nullptr));
  pcre2_set_newline_8(context.get(), PCRE2_NEWLINE_LF);
  // In Oniguruma's Ruby syntax ^ and $ always stand for the ends of lines.
  constexpr uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  int error = 0;
  size_t position = 0;
  pcre2_code_8* code =
      pcre2_compile_8(bytes_of(translated), translated.size(), kOptions, &error, &position, context.get());
  if (code == nullptr) {
    throw ConfigError(
        "[text.regex] the pattern '{}' is wrong: {}, at byte {} of '{}'; correct it in the tokenizer's file",
        pattern, message_of(error), position, translated);
  }
  return code;
}

/// Memory that a thread needs to match, whatever the pattern.
class Workspace {
 public:
  Workspace()
      : data_(pcre2_match_data_create_8(1, nullptr)),
        context_(pcre2_match_context_create_8(nullptr)),
        stack_(pcre2_jit_stack_create_8(kStackBegin, kStackLimit, nullptr)) {
    pcre2_jit_stack_assign_8(context_, nullptr, stack_);
  }
  ~Workspace() {
    pcre2_jit_stack_free_8(stack_);
    pcre2_match_context_free_8(context_);
    pcre2_match_data_free_8(data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  pcre2_match_data_8* data() { return data_; }
  pcre2_match_context_8* context() { return context_; }
  Span match() const {
    const size_t* ends = pcre2_get_ovector_pointer_8(data_);
    return {ends[0], ends[1]};
  }

 private:
  pcre2_match_data_8* data_;
  pcre2_match_context_8* context_;
  pcre2_jit_stack_8* stack_;
};

Workspace& workspace() {
  thread_local Workspace mine;
  return mine;
}

}  // namespace

struct Regex::Code {
  explicit Code(std::string_view text) : pattern(text), compiled(compile(text)) {
    has_jit = pcre2_jit_compile_8(compiled, PCRE2_JIT_COMPLETE) == 0;
  }
  ~Code() { pcre2_code_free_8(compiled); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  /// Whether there is a match at or after `start`; it is then workspace.match().
  bool search(std::string_view text, size_t start, Workspace& space) const {
    const auto run = has_jit ? pcre2_jit_match_8 : pcre2_match_8;
    const int result =
        run(compiled, bytes_of(text), text.size(), start, PCRE2_NO_UTF_CHECK, space.data(), space.context());
    if (result >= 0) return true;
    if (result == PCRE2_ERROR_NOMATCH) return false;
    throw DataError(
        "[text.regex] '{}' cannot be matched at byte {} of a text of {} bytes: {}; shorten the document or "
        "simplify the pattern",
        pattern, start, text.size(), message_of(result));
  }

  std::string pattern;
  pcre2_code_8* compiled;
  bool has_jit = false;
};

Regex::Regex(std::string_view pattern) : code_(std::make_shared<const Code>(pattern)) {}

void Regex::find_all(std::string_view text, std::vector<Span>& matches) const {
  std::string shown;
  if (needs_stand_ins(text)) {
    shown = with_stand_ins(text);
    text = shown;
  }
  Workspace& space = workspace();
  bool is_first = true;
  size_t last_end = 0;
  for (size_t start = 0; start <= text.size() && code_->search(text, start, space);) {
    const Span match = space.match();
    if (match.size() == 0 && !is_first && match.end == last_end) {
      start += start < text.size() ? character_length(text[start]) : 1;
      continue;
    }
    matches.push_back(match);
    is_first = false;
    start = last_end = match.end;
  }
}

}  // namespace trireme::text
