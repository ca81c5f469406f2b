#include "tests/text/fuzz.h"

#include <gtest/gtest.h>

namespace trireme::text::testing {
namespace {

TEST(Fuzz, DamagedFilesGiveErrorsOrTokenizers) {
  fuzz_files(200);
}

TEST(Fuzz, DamagedTextsHaveIdsOfTheVocabulary) {
  fuzz_texts(20);
}

}  // namespace
}  // namespace trireme::text::testing
