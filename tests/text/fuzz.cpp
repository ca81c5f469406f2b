#include "tests/text/fuzz.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/text/load.h"

namespace trireme::text::testing {
namespace {

std::string read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// `text` with one to four changes: bytes overwritten, taken out, said twice, or all from a place on cut off.
std::string damaged(std::string text, uint64_t execution) {
  uint64_t step = 0;
  const auto draw = [&](uint64_t end) { return mix64(execution, step++) % end; };
  for (uint64_t changes = 1 + draw(4); changes > 0 && !text.empty(); --changes) {
    const size_t at = draw(text.size());
    const size_t count = std::min<size_t>(1 + draw(8), text.size() - at);
    constexpr std::string_view kBytes = "\"{}[]:,0-9.e\\u\xff\x80\x00 ntf";
    switch (draw(8)) {
      case 0:
        text.erase(at, count);
        break;
      case 1:
        text.insert(at, text.substr(at, count));
        break;
      case 2:
        if (draw(20) == 0) text.resize(at);
        break;
      default:
        text[at] = draw(2) == 0 ? static_cast<char>(draw(256)) : kBytes[draw(kBytes.size())];
    }
  }
  return text;
}

const std::vector<std::string>& sample_texts() {
  static const std::vector<std::string> texts = {"Hello, wor\xcc\x81ld 12 \xe4\xb8\xad\xe6\x96\x87 <s>\xff",
                                                 "it's  a\n\n\tb"};
  return texts;
}

}  // namespace

void fuzz_files(uint64_t executions) {
  const trireme::testing::Scratch scratch;
  const std::vector<std::string> names = tokenizers_in(fixtures());
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back(read_whole(file_of(fixtures(), name)));
  for (uint64_t i = 0; i < executions; ++i) {
    const std::string kind =
        file_of(fixtures(), names[i % names.size()]).ends_with(".model") ? "a.model" : "a.json";
    const std::string path = scratch.write(kind, damaged(files[i % files.size()], i));
    try {
      const Tokenizer tokenizer = load_tokenizer(path);
      for (const std::string& text : sample_texts()) tokenizer.decode(tokenizer.encode(text, true));
    } catch (const Error& error) {
      ASSERT_TRUE(std::string_view(error.what()).starts_with("[text.")) << i << ": " << error.what();
    }
  }
}

void fuzz_texts(uint64_t executions) {
  for (const std::string& name : tokenizers_in(fixtures())) {
    const Tokenizer tokenizer = load_tokenizer(file_of(fixtures(), name));
    Encoder encoder(tokenizer);
    const std::string seed = read_whole(fixtures() + "/texts.json").substr(0, 400) + sample_texts()[0];
    for (uint64_t i = 0; i < executions; ++i) {
      const std::string text = damaged(seed.substr(mix64(i, 99) % seed.size()), i);
      std::vector<int32_t> ids;
      encoder.encode(text, ids);
      ASSERT_EQ(ids, tokenizer.encode(text)) << name << " " << i;
      for (const int32_t id : ids) ASSERT_LT(id, tokenizer.vocab_size());
      tokenizer.decode(ids);
    }
  }
}

}  // namespace trireme::text::testing
