#include "tests/text/fuzz.h"

#include <gtest/gtest.h>

namespace trireme::text::testing {
namespace {

TEST(Fuzz, DamagedFilesGiveErrorsOrTokenizers) {
  fuzz_tokenizer_json(500);
  fuzz_gpt2_files(200);
  fuzz_sentencepiece(500);
  fuzz_tiktoken(200);
}

TEST(Fuzz, DamagedTemplatesGiveErrorsOrTexts) {
  fuzz_chat_templates(500);
}

TEST(Fuzz, DamagedPatternsGiveErrorsOrMatches) {
  fuzz_patterns(500);
}

TEST(Fuzz, TextsHaveIdsOfTheVocabularyAndComeBackWherePromised) {
  fuzz_texts(3000);
}

}  // namespace
}  // namespace trireme::text::testing
