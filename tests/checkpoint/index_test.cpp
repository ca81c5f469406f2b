#include "trireme/checkpoint/index.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::checkpoint {
namespace {

using testing::message_of;

/// Two files: halves of a matrix, and a column of another one beside a scalar.
Index example() {
  Index index{.step = 7,
              .generation = 2,
              .files = {},
              .tensors = {},
              .metadata = {{"tied \"head\"", "\n"}},
              .state = {}};
  index.files = {{.name = "shard-0", .bytes = 100, .header_bytes = 64, .header_digest = 1},
                 {.name = "shard-1", .bytes = 100, .header_bytes = 64, .header_digest = 2}};
  index.state = {.name = "state.json", .bytes = 9, .header_bytes = 9, .header_digest = 3};
  StoredTensor matrix{.dtype = "F32", .shape = {3, 4}, .pieces = {}};
  matrix.pieces.push_back(
      {.file = 0, .entry = "w", .offset = 64, .region = plan::Region::flat({3, 4}, {0, 6}), .digests = {11}});
  matrix.pieces.push_back({.file = 1,
                           .entry = "w",
                           .offset = 64,
                           .region = plan::Region::flat({3, 4}, {6, 12}),
                           .digests = {12}});
  StoredTensor columns{.dtype = "I16", .shape = {2, 3}, .pieces = {}};
  columns.pieces.push_back(
      {.file = 0, .entry = "c", .offset = 88, .region = plan::Region::box({0, 0}, {2, 2}), .digests = {13}});
  columns.pieces.push_back(
      {.file = 1, .entry = "c", .offset = 88, .region = plan::Region::box({0, 2}, {2, 1}), .digests = {14}});
  StoredTensor scalar{.dtype = "F64", .shape = {}, .pieces = {}};
  scalar.pieces.push_back(
      {.file = 1, .entry = "s", .offset = 92, .region = plan::Region::whole({}), .digests = {15}});
  StoredTensor bytes{.dtype = "U8", .shape = {4}, .pieces = {}};
  bytes.pieces.push_back(
      {.file = 0, .entry = "b", .offset = 96, .region = plan::Region::whole({4}), .digests = {16}});
  index.tensors = {{"w", matrix}, {"c", columns}, {"s", scalar}, {"b", bytes}};
  return index;
}

TEST(Index, ReadsItselfBack) {
  const std::string text = format_index(example());
  const Index back = parse_index(text, "index.json");
  EXPECT_EQ(format_index(back), text);
  EXPECT_NO_THROW(check_coverage(back, "index.json"));
  EXPECT_EQ(back.step, 7);
  EXPECT_EQ(back.generation, 2);
  EXPECT_EQ(back.metadata.at("tied \"head\""), "\n");
  EXPECT_EQ(back.state, example().state);
  EXPECT_EQ(back.tensors.at("c").pieces[1].region, plan::Region::box({0, 2}, {2, 1}));
  EXPECT_EQ(back.bytes(), 48 + 12 + 8 + 4);
}

std::string changed(const std::string& from, const std::string& to) {
  std::string text = format_index(example());
  const size_t place = text.find(from);
  if (place == std::string::npos) ADD_FAILURE() << from << " is not in " << text;
  return text.replace(place, from.size(), to);
}

TEST(Index, RefusesHostileOnesAndSaysWhy) {
  const struct {
    std::string from, to, reason;
  } cases[] = {
      {"trireme.checkpoint/1", "trireme.checkpoint/2", "schema"},
      {"\"chunk\":4194304", "\"chunk\":1", "chunks"},
      {"\"step\":7", "\"step\":-7", "'step'"},
      {"\"step\":7", "\"step\":7.5", "'step'"},
      {"\"step\":7", "\"step\":18446744073709551615", "'step'"},
      {"\"step\":7", "\"step\":7,\"step\":7", "twice"},
      {"\"step\":7", "\"stop\":7", "'stop' is unknown"},
      {"\"step\":7,", "", "'step' is missing"},
      {"\"shard-0\"", "\"../shard-0\"", "is not a valid name"},
      {"\"shard-0\"", "\"/etc/passwd\"", "is not a valid name"},
      {"\"shard-0\"", "\"shard\\u0000-0\"", "is not a valid name"},
      {"\"shard-0\"", "\"shard-1\"", "listed twice"},
      {"\"bytes\":100", "\"bytes\":99", "96 of shard-0, whose data span bytes 64 to 99"},
      {"\"bytes\":100", "\"bytes\":101", "end at byte 100, but the file at 101"},
      {"\"header_bytes\":64", "\"header_bytes\":101", "a header of 101"},
      {"\"header_bytes\":64", "\"header_bytes\":60", "begins at byte 64, but the previous one ends at 60"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "'w' has unknown dtype 'F31'"},
      {"\"w\":{", "\"w\\u001b[2J\":{", "control characters"},
      {"\"shape\":[3,4]", "\"shape\":[3,-4]", "numbers of 62 bits"},
      {"\"shape\":[3,4]", "\"shape\":[4611686018427387904,4]", "overflows"},
      {"\"shape\":[3,4]", "\"shape\":[0,4611686018427387904,4]", "overflows"},
      {"\"shape\":[3,4]", "\"shape\":{}", "list of numbers"},
      {"\"range\":[0,6]", "\"range\":[0,7]", "begins at byte 88, but the previous one ends at 92"},
      {"\"range\":[6,12]", "\"range\":[7,13]", "more elements than the box"},
      {"\"range\":[0,6]", "\"range\":[6,0]", "more elements than the box"},
      {"\"range\":[0,6]", "\"range\":[6]", "not two numbers"},
      {"\"offset\":64", "\"offset\":65", "begins at byte 65"},
      {"\"offset\":64", "\"offset\":9223372036854775807", "of shard-0"},
      {"\"offset\":64", "\"offset\":0", "of shard-0"},
      {"\"file\":1", "\"file\":2", "is in file 2, but there are only 2"},
      {"\"extent\":[2,1]", "\"extent\":[2,2]", "reaches outside the tensor"},
      {"\"start\":[0,2]", "\"start\":[0,3]", "reaches outside the tensor"},
      {"\"start\":[0,2],", "", "'start' "},
      {"[\"000000000000000b\"]", "[]", "0 digests for 24 bytes"},
      {"[\"000000000000000b\"]", "[\"000000000000000B\"]", "other than a hash"},
      {"[\"000000000000000b\"]", "[11]", "other than a hash"},
      {"\"state\":{", "\"state\":{\"more\":1,", "'more' is unknown"},
      {"\"tensors\":{", "\"tensors\":{\"\":{},", "has an empty name"},
      {"\"w\":{", "\"c\":{", "twice"},
      {"\"metadata\":{", "\"metadata\":{\"x\":1,", "'x' is not a string"},
      {"}}\n", "}}x", "parse error"},
  };
  for (const auto& hostile : cases) {
    const std::string message =
        message_of<DataError>([&] { parse_index(changed(hostile.from, hostile.to), "folder/index.json"); });
    EXPECT_NE(message.find(hostile.reason), std::string::npos) << hostile.to << "\n  -> " << message;
    EXPECT_NE(message.find("folder/index.json"), std::string::npos) << message;
  }
}

TEST(Index, RefusesPiecesThatDoNotCover) {
  const struct {
    std::string from, to, reason;
  } cases[] = {{"\"range\":[6,12]", "\"range\":[5,11]", "tensor 'w' [3, 4]: elements 5 to 6 occur twice"},
               {"\"range\":[0,6]", "\"range\":[1,7]", "tensor 'w' [3, 4]: elements 0 to 1 are missing"},
               {"\"start\":[0,2]", "\"start\":[0,1]", "tensor 'c' [2, 3]: elements 1 to 2 occur twice"}};
  for (const auto& hostile : cases) {
    const Index index = parse_index(changed(hostile.from, hostile.to), "index.json");
    const std::string message = message_of<DataError>([&] { check_coverage(index, "index.json"); });
    EXPECT_NE(message.find(hostile.reason), std::string::npos) << message;
  }
}

/// Reports of one rank each make up the whole.
TEST(Index, MergesReportsOfRanks) {
  const Index whole = example();
  std::vector<Index> parts(2);
  for (size_t file = 0; file < 2; ++file) {
    parts[file] = {.step = 7,
                   .generation = 2,
                   .files = {whole.files[file]},
                   .tensors = {},
                   .metadata = whole.metadata,
                   .state = {}};
    for (const auto& [name, tensor] : whole.tensors) {
      for (StoredPiece piece : tensor.pieces) {
        if (piece.file != file) continue;
        piece.file = 0;
        parts[file]
            .tensors.try_emplace(name, StoredTensor{tensor.dtype, tensor.shape, {}})
            .first->second.pieces.push_back(piece);
      }
    }
  }
  Index merged{.step = 7, .generation = 2, .files = {}, .tensors = {}, .metadata = {}, .state = whole.state};
  for (const Index& part : parts) merge(merged, parse_index(format_index(part), "report"), "report");
  EXPECT_EQ(format_index(merged), format_index(whole));

  EXPECT_THROW(merge(merged, parts[0], "report"), DataError);  // its file is there already
  Index other = parts[0];
  other.files[0].name = "another";
  other.step = 8;
  EXPECT_THROW(merge(merged, other, "report"), DataError);
  other.step = 7;
  other.generation = 1;
  EXPECT_THROW(merge(merged, other, "report"), DataError);
  other.generation = 2;
  other.tensors.at("w").shape = {4, 3};
  EXPECT_NE(message_of<DataError>([&] { merge(merged, other, "report"); }).find("'w'"), std::string::npos);
}

TEST(Index, OfMorePiecesThanAnyRunHasIsRead) {
  constexpr int64_t kPieces = 280'000;
  Index index{.step = 1, .generation = 1, .files = {}, .tensors = {}, .metadata = {}, .state = {}};
  index.files.push_back(
      {.name = "shard-00000.safetensors", .bytes = 8 + kPieces, .header_bytes = 8, .header_digest = 1});
  StoredTensor& tensor = index.tensors["w"] = {"U8", {kPieces}, {}};
  for (int64_t i = 0; i < kPieces; ++i)
    tensor.pieces.push_back({.file = 0,
                             .entry = fmt::format("w@{}", i),
                             .offset = 8 + i,
                             .region = plan::Region::flat({kPieces}, {i, i + 1}),
                             .digests = {1}});
  const std::string text = format_index(index);
  ASSERT_LT(std::ssize(text), kMaxJsonBytes);
  EXPECT_EQ(parse_index(text, "index.json").tensors.at("w").pieces.size(), tensor.pieces.size());
}

TEST(StrictJson, RefusesBombs) {
  const std::string path = "state.json";
  EXPECT_NO_THROW(parse_json(std::string(15, '[') + std::string(15, ']'), path));
  EXPECT_THROW(parse_json(std::string(18, '[') + std::string(18, ']'), path), DataError);
  EXPECT_THROW(parse_json(std::string(10'000'000, '['), path), DataError);
  std::string most = "[0";  // the list is a value, too
  for (int64_t values = 2; values < kMaxJsonBytes / 4; ++values) most += ",0";
  EXPECT_NO_THROW(parse_json(most + "]", path));
  EXPECT_THROW(parse_json(most + ",0]", path), DataError);
  EXPECT_THROW(parse_json(R"({"a":1,"a":2})", path), DataError);
  EXPECT_NO_THROW(parse_json(R"({"a":{"a":2},"b":{"a":2}})", path));
  EXPECT_THROW(parse_json(std::string("{}\0", 3), path), DataError);
  EXPECT_THROW(parse_json("{\"a\":\"\xff\"}", path), DataError);
  std::string many = "[";
  for (int i = 0; i < 17'000'000; ++i) many += "1,";
  many.back() = ']';
  EXPECT_THROW(parse_json(many, path), DataError);
}

TEST(Commit, TakesNothingButWhatItWrites) {
  const Commit commit{.step = 1200, .generation = 3, .index_bytes = 4567, .index_digest = 0xabcdef};
  const std::string text = format_commit(commit);
  const Commit back = parse_commit(text, "COMMIT.json");
  EXPECT_EQ(back.step, 1200);
  EXPECT_EQ(back.generation, 3);
  EXPECT_EQ(back.index_bytes, 4567);
  EXPECT_EQ(back.index_digest, 0xabcdefu);
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    EXPECT_THROW(parse_commit(flipped, "COMMIT.json"), DataError) << bit;
  }
  for (size_t size = 0; size < text.size(); ++size)
    EXPECT_THROW(parse_commit(text.substr(0, size), "COMMIT.json"), DataError);
  EXPECT_THROW(parse_commit(text + "\n", "COMMIT.json"), DataError);
}

}  // namespace
}  // namespace trireme::checkpoint
