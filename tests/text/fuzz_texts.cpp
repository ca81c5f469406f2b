#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"
#include "tests/text/fuzz.h"
#include "tests/text/fuzz_tool.h"
#include "tests/text/gpt2_formats.h"
#include "trireme/text/load.h"
#include "trireme/text/normal_form.h"
#include "trireme/text/unicode.h"

namespace trireme::text::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

bool is_ascii_line(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c > 0 && c != '\r'; });
}

bool has_added_token(std::string_view text) {
  return text.find('<') != std::string_view::npos;
}

struct Promise {
  std::string name;
  /// Whether decode(encode(text)) is `text`, which is UTF-8.
  bool (*holds)(std::string_view text);
};

bool always(std::string_view) {
  return true;
}

const std::vector<Promise>& promises() {
  static const std::vector<Promise> all = {
      {"gpt2", always},
      {"gpt2 in two files", always},
      {"gpt2 of tiktoken", always},
      {"llama3", always},
      // Its normaliser composes, two of its added tokens take the spaces beside them, and another one has a
      // character of GPT-2's alphabet for bytes, which is decoded as that byte.
      {"qwen",
       [](std::string_view text) {
         return !has_added_token(text) && text.find("caf\u00e9") == std::string_view::npos &&
                normalize(text, NormalForm::kNfc) == text;
       }},
      // A space comes before each text that begins with none.
      {"roberta", [](std::string_view text) { return text.starts_with(' ') && !has_added_token(text); }},
      // A space comes before what follows an added token; replacements concern other characters.
      {"llama2", [](std::string_view text) { return is_ascii_line(text) && !has_added_token(text); }},
      {"sp_bpe_bytes", is_ascii_line},
      {"sp_bpe_symbols", is_ascii_line}};
  return all;
}

struct Subject {
  explicit Subject(std::string its_name, const std::string& path)
      : name(std::move(its_name)), tokenizer(load_tokenizer(path)), encoder(tokenizer) {
    for (const Promise& one : promises()) {
      if (one.name == name) promise = &one;
    }
  }
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  std::string name;
  Tokenizer tokenizer;
  Encoder encoder;
  const Promise* promise = nullptr;
};

using Subjects = std::vector<std::unique_ptr<Subject>>;

Subjects all_subjects(const trireme::testing::Scratch& scratch) {
  const json model = json::parse(fuzz_seed(fixtures() + "/gpt2.json"))["model"];
  scratch.write("gpt2/vocab.json", model["vocab"].dump());
  scratch.write("gpt2/merges.txt", merges_txt_of(model));
  Subjects subjects;
  for (const std::string& name : tokenizers_in(fixtures()))
    subjects.push_back(std::make_unique<Subject>(name, file_of(fixtures(), name)));
  subjects.push_back(std::make_unique<Subject>("gpt2 in two files", scratch.path("gpt2")));
  subjects.push_back(std::make_unique<Subject>(
      "gpt2 of tiktoken", scratch.write("r50k_base.tiktoken", ranks_of_tiktoken(model))));
  return subjects;
}

/// Some bytes, one character, a part of a sentence, a token that is whole or cut in two, or one of these many
/// times.
void append_part(std::string& text, const Tokenizer& tokenizer, const std::string& sentences,
                 FuzzDraws& draws) {
  const size_t begin = text.size();
  switch (draws.below(6)) {
    case 0:
      for (uint64_t count = 1 + draws.below(6); count > 0; --count)
        text += static_cast<char>(draws.below(256));
      break;
    case 1:
      append_utf8(text, static_cast<uint32_t>(draws.below(draws.below(2) == 0 ? 0x3000 : 0xd800)));
      break;
    case 2:
      text += sentences.substr(draws.below(sentences.size()), 1 + draws.below(20));
      break;
    case 3:
      text += draws.below(2) == 0 ? " " : "\n";
      break;
    default: {
      const auto id = static_cast<int32_t>(
          draws.below(draws.below(2) == 0 ? 8 : static_cast<uint64_t>(tokenizer.vocab_size())));
      const std::string token = tokenizer.decode(std::vector{id}, true);
      const size_t cut = draws.below(2) == 0 ? 0 : draws.below(token.size());
      text += draws.below(2) == 0 ? token.substr(cut) : token.substr(0, token.size() - cut);
    }
  }
  if (draws.below(200) != 0) return;
  const std::string repeated = text.substr(begin);
  for (uint64_t count = draws.below(300); count > 0; --count) text += repeated;
}

std::string fuzz_text(const Tokenizer& tokenizer, const std::string& sentences, FuzzDraws& draws) {
  std::string text;
  for (uint64_t parts = draws.below(9); parts > 0; --parts) append_part(text, tokenizer, sentences, draws);
  return text;
}

void check_text(Subject& subject, const std::string& text) {
  std::vector<int32_t> ids;
  subject.encoder.encode(text, ids);
  const std::string named =
      subject.name + " of " + json(text).dump(-1, ' ', true, json::error_handler_t::replace);
  ASSERT_EQ(ids, subject.tokenizer.encode(text)) << named;
  for (const int32_t id : ids) {
    ASSERT_GE(id, 0) << named;
    ASSERT_LT(id, subject.tokenizer.vocab_size()) << named;
  }
  const std::string back = subject.tokenizer.decode(ids, true), valid = replace_invalid(text);
  if (subject.promise != nullptr && subject.promise->holds(valid)) {
    ASSERT_EQ(back, valid) << named;
  }
}

}  // namespace

void fuzz_texts(uint64_t executions) {
  const trireme::testing::Scratch scratch;
  const Subjects subjects = all_subjects(scratch);
  const auto texts = json::parse(fuzz_seed(fixtures() + "/texts.json"))["texts"].get<Words>();
  std::string sentences;
  for (size_t i = 0; i < 20; ++i) sentences += texts[i];
  bool goes_on = true;
  for (uint64_t i = 0; i < executions && goes_on; ++i) {
    FuzzDraws draws(i);
    Subject& subject = *subjects[i % subjects.size()];
    const std::string text = fuzz_text(subject.tokenizer, sentences, draws);
    goes_on = fuzz_once(i, [&] { check_text(subject, text); });
  }
}

}  // namespace trireme::text::testing
