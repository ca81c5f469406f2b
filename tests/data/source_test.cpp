#include "trireme/data/source.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"

namespace trireme::data {
namespace {

std::vector<std::string> names(const Source& source) {
  std::vector<std::string> list;
  for (const SourceFile& file : source.files) list.push_back(file.name);
  return list;
}

TEST(ListSource, SortsWholePathsBytewise) {
  const testing::Scratch scratch;
  for (const char* name : {"t/b", "t/a/z", "t/a-b", "t/a.b", "t/B", "t/a/b/c", "t/\xc3\xa9"})
    scratch.write(name, "x");
  // '-' 0x2d < '.' 0x2e < '/' 0x2f, capitals before small letters, bytes above 0x7f last.
  EXPECT_EQ(names(list_source(scratch.path("t"))),
            (std::vector<std::string>{"B", "a-b", "a.b", "a/b/c", "a/z", "b", "\xc3\xa9"}));
}

TEST(ListSource, CountsBytesAndGivesPathsBack) {
  const testing::Scratch scratch;
  scratch.write("t/one", "12345");
  scratch.write("t/two", "123");
  const Source source = list_source(scratch.path("t"));
  EXPECT_EQ(source.bytes, 8);
  EXPECT_EQ(source.files[0].bytes, 5);
  EXPECT_EQ(testing::slurp(source.path_of(source.files[1])), "123");
}

TEST(ListSource, LeavesOutHiddenEmptyAndLinkedFiles) {
  const testing::Scratch scratch;
  scratch.write("t/kept", "x");
  scratch.write("t/.hidden", "x");
  scratch.write("t/.git/config", "x");
  scratch.write("t/empty", "");
  scratch.write("outside", "secret");
  std::filesystem::create_symlink("../outside", scratch.path("t/link"));
  std::filesystem::create_directory_symlink("..", scratch.path("t/loop"));
  std::filesystem::create_symlink("nowhere", scratch.path("t/dangling"));
  EXPECT_EQ(names(list_source(scratch.path("t"))), (std::vector<std::string>{"kept"}));
}

TEST(ListSource, TakesASingleFileEvenHiddenOrThroughALink) {
  const testing::Scratch scratch;
  scratch.write("t/.story", "abc");
  std::filesystem::create_symlink("t/.story", scratch.path("link"));
  const Source source = list_source(scratch.path("link"));
  EXPECT_EQ(names(source), (std::vector<std::string>{".story"}));
  EXPECT_EQ(source.path, scratch.path("t/.story"));
  EXPECT_EQ(source.path_of(source.files[0]), source.path);
}

TEST(ListSource, NamesAPathThatHoldsNoText) {
  const testing::Scratch scratch;
  scratch.write("empty", "");
  scratch.write("hidden/.a", "x");
  std::filesystem::create_directory(scratch.path("folder"));
  std::filesystem::create_directory(scratch.path("links"));
  std::filesystem::create_symlink("../hidden/.a", scratch.path("links/a"));
  std::filesystem::create_symlink("nowhere", scratch.path("dangling"));
  for (const char* name : {"missing", "empty", "hidden", "folder", "links", "dangling", "empty/below"}) {
    const std::string message = testing::message_of<ConfigError>([&] { list_source(scratch.path(name)); });
    EXPECT_NE(message.find(scratch.path(name)), std::string::npos) << message;
    EXPECT_NE(message.find("data.path"), std::string::npos) << "no fix: " << message;
  }
}

TEST(ListSource, SaysThatLinksWereNotFollowed) {
  const testing::Scratch scratch;
  scratch.write("blob", "x");
  std::filesystem::create_directory(scratch.path("links"));
  std::filesystem::create_symlink("../blob", scratch.path("links/a"));
  const std::string message = testing::message_of<ConfigError>([&] { list_source(scratch.path("links")); });
  EXPECT_NE(message.find("1 symbolic link"), std::string::npos) << message;
}

TEST(ListSource, RefusesParquetWithTheWayOut) {
  const testing::Scratch scratch;
  scratch.write("t/a.txt", "text");
  scratch.write("t/part.parquet", "PAR1");
  const std::string message = testing::message_of<ConfigError>([&] { list_source(scratch.path("t")); });
  EXPECT_NE(message.find("t/part.parquet is Parquet"), std::string::npos) << message;
  EXPECT_NE(message.find("part.jsonl', orient='records', lines=True"), std::string::npos) << message;
}

TEST(ListSource, RefusesPackedFilesThatAreNotJsonLines) {
  const struct {
    const char *name, *way_out;
  } cases[] = {{"a.txt.gz", "unpack it with gzip -d '"}, {"a.txt.zst", "unpack it with zstd -d '"},
               {"a.csv.gz", "unpack it with gzip -d '"}, {"a.json.gz", "give it a name with .jsonl in place"},
               {"a.jsonl.xz", "unpack it with xz -d '"}, {"a.bz2", "unpack it with bzip2 -d '"},
               {"a.zip", "unpack it with unzip '"},      {"a.tar.gz", "unpack it with gzip -d '"},
               {"a.jsonl.zip", "unpack it with unzip '"}};
  for (const auto& [name, way_out] : cases) {
    const testing::Scratch scratch;
    scratch.write("t/0.txt", "text");
    const std::string path = scratch.write(std::string("t/") + name, "packed");
    for (const std::string& asked : {path, scratch.path("t")}) {
      const std::string message = testing::message_of<ConfigError>([&] { list_source(asked); });
      EXPECT_NE(message.find(path + " is packed, and only JSON Lines are read so"), std::string::npos)
          << message;
      EXPECT_NE(message.find(way_out), std::string::npos) << message;
    }
  }
  const testing::Scratch scratch;
  for (const char* name : {"a.jsonl.gz", "a.jsonl.zst", "gz", "zip.txt"}) scratch.write(name, "x");
  EXPECT_EQ(list_source(scratch.path("")).files.size(), 4U);
}

TEST(ListSource, TakesAFieldOfJsonLines) {
  const testing::Scratch scratch;
  scratch.write("t/a.jsonl", "{}");
  scratch.write("t/b#c.txt", "text");
  scratch.write("u/a.txt", "text");
  EXPECT_EQ(list_source(scratch.path("t#body")).field, "body");
  EXPECT_EQ(list_source(scratch.path("t#body")).path, scratch.path("t"));
  EXPECT_EQ(list_source(scratch.path("t")).field, "");
  EXPECT_EQ(list_source(scratch.path("t/b#c.txt")).path, scratch.path("t/b#c.txt")) << "a name with a #";
  const std::string message = testing::message_of<ConfigError>([&] { list_source(scratch.path("u#body")); });
  EXPECT_NE(message.find("'#body' names a field of JSON Lines, but "), std::string::npos) << message;
}

TEST(ListSource, RefusesSpecialFiles) {
  const std::string message = testing::message_of<ConfigError>([] { list_source("/dev/null"); });
  EXPECT_NE(message.find("neither a file nor a folder"), std::string::npos) << message;
}

}  // namespace
}  // namespace trireme::data
