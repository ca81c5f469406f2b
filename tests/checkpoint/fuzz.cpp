#include "tests/checkpoint/fuzz.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/index.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint::testing {
namespace {

constexpr size_t kPoolSize = 512;
constexpr size_t kLongestText = 4096;
constexpr auto kLongestTime = std::chrono::seconds(1);

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  size_t below(size_t limit) { return limit == 0 ? 0 : mix64(seed_, counter_++) % limit; }

 private:
  uint64_t seed_, counter_ = 0;
};

/// A number somewhere in the text becomes another one, of the kind that arithmetic fails at.
void change_number(std::string& text, Random& random) {
  static const std::vector<std::string> numbers = {"0",
                                                   "1",
                                                   "2",
                                                   "7",
                                                   "8",
                                                   "63",
                                                   "64",
                                                   "65",
                                                   "255",
                                                   "4294967295",
                                                   "4294967296",
                                                   "4611686018427387904",
                                                   "9223372036854775807",
                                                   "9223372036854775808",
                                                   "18446744073709551615",
                                                   "18446744073709551616",
                                                   "-1",
                                                   "1e9",
                                                   "0.5",
                                                   "00"};
  const size_t from = text.find_first_of("0123456789", random.below(text.size()));
  if (from == std::string::npos) return;
  size_t to = text.find_first_not_of("0123456789", from);
  if (to == std::string::npos) to = text.size();
  text.replace(from, to - from, numbers[random.below(numbers.size())]);
}

constexpr std::string_view kLetters("{}[]\",:0123456789.eE-+\\u \n\x00\xff", 28);

void mutate(std::string& text, const FuzzTarget& target, const std::vector<std::string>& pool,
            Random& random) {
  if (text.empty()) text = "{";
  const size_t place = random.below(text.size());
  const size_t length = 1 + random.below(std::min<size_t>(text.size() - place, 32));
  switch (random.below(8)) {
    case 0:
      text[place] = static_cast<char>(text[place] ^ 1 << random.below(8));
      break;
    case 1:
      text[place] = kLetters[random.below(kLetters.size())];
      break;
    case 2:
      text.erase(place, length);
      break;
    case 3:
      text.insert(random.below(text.size()), text.substr(place, length));
      break;
    case 4:
      text.insert(place, target.words[random.below(target.words.size())]);
      break;
    case 5: {
      const std::string& other = pool[random.below(pool.size())];
      text = text.substr(0, place) + other.substr(random.below(other.size()));
      break;
    }
    default:
      change_number(text, random);
      break;
  }
  if (text.size() > kLongestText) text.resize(kLongestText);
}

/// Whether the parser takes it; a finding fails the test.
bool takes(const FuzzTarget& target, const std::string& text) {
  const auto begin = std::chrono::steady_clock::now();
  bool taken = false;
  try {
    taken = target.parse(text);
  } catch (const DataError&) {
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLongestTime);
  return taken;
}

/// The header that the text is, before as much data as the text says first.
bool parse_header(const std::string& text) {
  if (text.size() < sizeof(int64_t)) return false;
  int64_t data_bytes = 0;
  std::memcpy(&data_bytes, text.data(), sizeof data_bytes);
  const SafetensorsHeader header =
      parse_safetensors_header(std::string_view(text).substr(sizeof data_bytes), data_bytes, "fuzz");
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const auto& [name, entry] : header.tensors) places.emplace_back(entry.begin, entry.end);
  std::ranges::sort(places);
  int64_t end = 0;
  for (const auto& [begin, its_end] : places) {
    EXPECT_EQ(begin, end);
    end = its_end;
  }
  EXPECT_EQ(end, data_bytes);
  const std::string again = format_safetensors_header(header);
  EXPECT_EQ(format_safetensors_header(parse_safetensors_header(again, data_bytes, "fuzz")), again);
  return true;
}

std::string header_seed(int64_t data_bytes, const std::string& json) {
  std::string text(sizeof data_bytes, '\0');
  std::memcpy(text.data(), &data_bytes, sizeof data_bytes);
  return text + json;
}

/// Whether its pieces cover a tensor, element by element.
bool covers(const StoredTensor& tensor, int64_t numel) {
  std::vector<int> counts(static_cast<size_t>(numel), 0);
  for (const StoredPiece& piece : tensor.pieces) {
    for (int64_t i = piece.region.range.begin; i < piece.region.range.end; ++i) {
      int64_t rest = i, element = 0, stride = 1;
      for (size_t dim = tensor.shape.size(); dim-- > 0;) {
        element += (piece.region.start[dim] + rest % piece.region.extent[dim]) * stride;
        rest /= piece.region.extent[dim];
        stride *= tensor.shape[dim];
      }
      ++counts.at(static_cast<size_t>(element));
    }
  }
  return std::ranges::all_of(counts, [](int count) { return count == 1; });
}

bool parse_whole_index(const std::string& text) {
  const Index index = parse_index(text, "fuzz");
  const std::string again = format_index(index);
  EXPECT_EQ(format_index(parse_index(again, "fuzz")), again);
  bool covered = true;
  bool small = true;
  for (const auto& [name, tensor] : index.tensors) {
    const int64_t numel = *plan::checked_numel(tensor.shape);
    small &= numel <= 4096;
    if (small) covered &= covers(tensor, numel);
  }
  bool accepted = true;
  try {
    check_coverage(index, "fuzz");
  } catch (const DataError&) {
    accepted = false;
  }
  if (small) {
    EXPECT_EQ(accepted, covered);
  }
  return true;
}

}  // namespace

FuzzCounts fuzz(const FuzzTarget& target, int64_t executions, uint64_t seed) {
  Random random(seed);
  FuzzCounts counts;
  std::vector<std::string> pool = target.seeds;
  for (const std::string& text : pool) EXPECT_TRUE(takes(target, text)) << text;
  for (int64_t i = 0; i < executions && !::testing::Test::HasFailure(); ++i) {
    std::string text = pool[random.below(pool.size())];
    for (size_t edit = random.below(4) + 1; edit-- > 0;) mutate(text, target, pool, random);
    const bool taken = takes(target, text);
    if (::testing::Test::HasFailure())
      ADD_FAILURE() << "found with seed " << seed << ", execution " << i << ":\n" << text;
    ++(taken ? counts.taken : counts.refused);
    if (!taken) continue;
    if (pool.size() < kPoolSize) {
      pool.push_back(std::move(text));
    } else {
      pool[target.seeds.size() + random.below(kPoolSize - target.seeds.size())] = std::move(text);
    }
  }
  return counts;
}

FuzzTarget safetensors_target() {
  return {.seeds = {header_seed(0, "{}"),
                    header_seed(32, R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,3],)"
                                    R"("data_offsets":[0,24]},"b":{"dtype":"I8","shape":[8],)"
                                    R"("data_offsets":[24,32]},"c":{"dtype":"U8","shape":[0],)"
                                    R"("data_offsets":[32,32]}}  )"),
                    header_seed(8, R"({"t":{"dtype":"F64","shape":[],"data_offsets":[0,8]}})")},
          .words = {"\"dtype\":", "\"shape\":", "\"data_offsets\":", "\"__metadata__\":{", "\"BF16\"",
                    "[0,0]", "{}", "\"x\":", "\\u0000", "\\ud800", "null", "true", ","},
          .parse = parse_header};
}

FuzzTarget index_target() {
  Index index{.step = 7, .generation = 2, .files = {}, .tensors = {}, .metadata = {{"a", "b"}}, .state = {}};
  index.files = {{.name = "shard-0", .bytes = 88, .header_bytes = 64, .header_digest = 1},
                 {.name = "shard-1", .bytes = 76, .header_bytes = 64, .header_digest = 2}};
  StoredTensor flat{.dtype = "I16", .shape = {3, 4}, .pieces = {}};
  flat.pieces.push_back(
      {.file = 0, .entry = "w", .offset = 64, .region = plan::Region::flat({3, 4}, {0, 8}), .digests = {11}});
  flat.pieces.push_back({.file = 1,
                         .entry = "w",
                         .offset = 64,
                         .region = plan::Region::flat({3, 4}, {8, 12}),
                         .digests = {12}});
  StoredTensor boxes{.dtype = "U8", .shape = {4, 3}, .pieces = {}};
  boxes.pieces.push_back(
      {.file = 0, .entry = "c", .offset = 80, .region = plan::Region::box({0, 0}, {4, 2}), .digests = {13}});
  boxes.pieces.push_back(
      {.file = 1, .entry = "c", .offset = 72, .region = plan::Region::box({0, 2}, {4, 1}), .digests = {14}});
  index.tensors = {{"w", flat}, {"c", boxes}};
  Index empty{.step = 0,
              .generation = 0,
              .files = {},
              .tensors = {},
              .metadata = {},
              .state = {.name = "state.json", .bytes = 2, .header_bytes = 2, .header_digest = 3}};
  return {
      .seeds = {format_index(index), format_index(empty)},
      .words = {"\"file\":0,", "\"start\":[0,0],", "\"extent\":[4,1],", "\"range\":[0,4],", "\"xxh3\":[],",
                "\"pieces\":[", "\"0123456789abcdef\",", "{}", "[]", "null", ",", "\"shape\":[0],"},
      .parse = parse_whole_index};
}

FuzzTarget commit_target() {
  const std::string text = format_commit({.step = 5, .generation = 6, .index_bytes = 7, .index_digest = 8});
  return {.seeds = {text},
          .words = {"\"step\":5,", "\"xxh3\":", "{", "}", " ", "\n"},
          .parse = [](const std::string& changed) {
            const Commit commit = parse_commit(changed, "fuzz");
            EXPECT_EQ(format_commit(commit), changed);
            return true;
          }};
}

}  // namespace trireme::checkpoint::testing
