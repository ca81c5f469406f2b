#include "tests/text/expected.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "trireme/text/load.h"
#include "trireme/text/unicode.h"

namespace trireme::text::testing {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

constexpr uint32_t kBlock = 0x1000;  // code points that a checksum of make_fixtures.py is over

json read(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  return json::parse(file);
}

std::string bytes_of_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

std::vector<std::string> texts_in(const std::string& folder) {
  const json file = read(folder + "/texts.json");
  auto texts = file["texts"].get<std::vector<std::string>>();
  for (const std::string digits : file["invalid"]) texts.push_back(bytes_of_hex(digits));
  return texts;
}

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0xedb88320u : 0u);
    table[byte] = value;
  }
  return table;
}

/// CRC-32 as zlib has it.
class Crc {
 public:
  void add(std::string_view bytes) {
    static constexpr auto kTable = make_crc_table();
    for (const char byte : bytes)
      state_ = state_ >> 8 ^ kTable[(state_ ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  uint32_t value() const { return ~state_; }

 private:
  uint32_t state_ = ~0u;
};

uint32_t checksum_of_block(const Tokenizer& tokenizer, uint32_t first) {
  Crc crc;
  for (uint32_t code = first; code < first + kBlock; ++code) {
    if (code >= 0xd800 && code < 0xe000) continue;
    std::string character;
    append_utf8(character, code);
    const Ids ids = tokenizer.encode(character);
    crc.add({reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof ids[0]});
    crc.add(tokenizer.decode(ids));
    crc.add({"\0", 1});
  }
  return crc.value();
}

/// Ids with and without the words that an encoder remembers, and the decoded text, of each of `texts`.
void compare_each(const Tokenizer& tokenizer, const std::vector<std::string>& texts, const json& expected) {
  ASSERT_EQ(expected["ids"].size(), texts.size());
  Encoder encoder(tokenizer);
  for (size_t i = 0; i < texts.size(); ++i) {
    Ids ids;
    encoder.encode(texts[i], ids);
    ASSERT_EQ(ids, expected["ids"][i].get<Ids>()) << "text " << i << ": " << texts[i];
    ASSERT_EQ(tokenizer.encode(texts[i]), ids) << "the words that an encoder remembers change text " << i;
    ASSERT_EQ(tokenizer.decode(ids), expected["decoded"][i].get<std::string>()) << "text " << i;
  }
}

}  // namespace

std::string fixtures() {
  return TRIREME_TEXT_FIXTURES;
}

std::string file_of(const std::string& folder, const std::string& name) {
  const std::string json_file = folder + "/" + name + ".json";
  return std::filesystem::exists(json_file) ? json_file : folder + "/" + name + ".model";
}

std::vector<std::string> tokenizers_in(const std::string& folder) {
  constexpr std::string_view kEnd = ".expected.json";
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    if (file.ends_with(kEnd)) names.push_back(file.substr(0, file.size() - kEnd.size()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

void compare_texts(const std::string& folder, const std::string& name) {
  const Tokenizer tokenizer = load_tokenizer(file_of(folder, name));
  const json expected = read(folder + "/" + name + ".expected.json");
  const std::vector<std::string> texts = texts_in(folder);
  EXPECT_EQ(tokenizer.vocab_size(), expected["vocab_size"].get<int64_t>());
  compare_each(tokenizer, texts, expected);
  if (expected.contains("own"))
    compare_each(tokenizer, expected["own"]["texts"].get<std::vector<std::string>>(), expected["own"]);
  for (size_t i = 0; i < expected["ids_with_special"].size(); ++i) {
    ASSERT_EQ(tokenizer.encode(texts[i], true), expected["ids_with_special"][i].get<Ids>()) << "text " << i;
    ASSERT_EQ(tokenizer.decode(expected["ids"][i].get<Ids>(), true),
              expected["decoded_with_special"][i].get<std::string>())
        << "text " << i;
  }
}

void compare_code_points(const std::string& folder, const std::string& name) {
  const json expected = read(folder + "/" + name + ".expected.json");
  if (!expected.contains("code_points")) return;
  const Tokenizer tokenizer = load_tokenizer(file_of(folder, name));
  uint32_t first = 0;
  for (const uint32_t checksum : expected["code_points"]) {
    EXPECT_EQ(checksum_of_block(tokenizer, first), checksum)
        << "U+" << std::hex << first << " and the following";
    first += kBlock;
  }
}

void compare_with_python_here(const std::string& options) {
  const char* named = std::getenv("TRIREME_TEST_PYTHON");
  const std::string python = named == nullptr ? "python3" : named;
  if (std::system(
          (python + " -c 'import tokenizers, sentencepiece.sentencepiece_model_pb2' 2> /dev/null").c_str()) !=
      0)
    GTEST_SKIP()
        << python
        << " has no modules tokenizers, sentencepiece and protobuf; set TRIREME_TEST_PYTHON to one that has";
  const trireme::testing::Scratch scratch;
  const std::string folder = scratch.path("");
  const std::string script = fixtures() + "/../make_fixtures.py --no-code-points --output " + folder + " ";
  ASSERT_EQ(std::system((python + " " + script + options).c_str()), 0);
  for (const std::string& name : tokenizers_in(folder)) {
    SCOPED_TRACE(name);
    compare_texts(folder, name);
  }
}

}  // namespace trireme::text::testing
