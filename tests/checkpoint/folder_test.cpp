#include "trireme/checkpoint/folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"
#include "trireme/checkpoint/unfinished.h"

namespace trireme::checkpoint {
namespace {

using testing::message_of;
using testing::Scratch;
using trireme::testing::slurp;

TEST(Folder, NamesAreOneComponentOfPlainLetters) {
  for (const char* name : {"a", "index.json", "shard-00001.safetensors", "A_b-3.9", "a..b", "a."})
    EXPECT_TRUE(is_file_name(name)) << name;
  EXPECT_TRUE(is_file_name(std::string(128, 'x')));
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string(".hidden"), std::string("../x"),
        std::string("/etc/passwd"), std::string("a/b"), std::string("a\\b"), std::string("a b"),
        std::string("a\nb"), std::string("a\0b", 3), std::string("caf\xc3\xa9"), std::string("a:b"),
        std::string(129, 'x')})
    EXPECT_FALSE(is_file_name(name)) << name;
}

TEST(Folder, OpensNothingButRegularFilesOfItsOwn) {
  const Scratch scratch;
  scratch.write("in/file", "inside");
  scratch.write("secret", "outside");
  scratch.write("in/folder/file", "deeper");
  std::filesystem::create_symlink("../secret", scratch.path("in/link"));
  std::filesystem::create_symlink("file", scratch.path("in/inner"));
  std::filesystem::create_symlink("folder", scratch.path("in/folder_link"));
  ASSERT_EQ(::mkfifo(scratch.path("in/pipe").c_str(), 0600), 0);
  ASSERT_TRUE(::mknod(scratch.path("in/device").c_str(), S_IFCHR | 0600, 1 << 8 | 5) == 0 || errno == EPERM);
  const Folder folder(scratch.path("in"));
  EXPECT_EQ(folder.open_file("file").text(100), "inside");
  EXPECT_EQ(folder.open_folder("folder").open_file("file").text(100), "deeper");
  for (const std::string name :
       {"link", "inner", "pipe", "device", "folder", "missing", "../secret", "folder/file", ".", "..", ""}) {
    EXPECT_THROW(folder.open_file(name), DataError) << name;
  }
  for (const std::string name : {"folder_link", "file", "missing", "..", "folder/.."})
    EXPECT_THROW(folder.open_folder(name), DataError) << name;
}

/// What a hostile index could say: none of it leads out of the folder.
TEST(Folder, TwoHundredHostilePathsOpenNothing) {
  const Scratch scratch;
  scratch.write("secret", "outside");
  scratch.write("in/deep/file", "");
  const Folder folder(scratch.path("in"));
  int count = 0;
  const std::string target = scratch.path("secret");
  for (const std::string prefix :
       {"", "./", "../", "deep/", "deep/../", "/", "//", "..\\", "\\", "%2e%2e/"}) {
    for (const std::string middle : {"", "../", "./", "..//", "%2f"}) {
      for (const std::string& last : {std::string("secret/"), std::string("secret\0.json", 12), target,
                                      std::string("../secret"), std::string("\xe2\x80\xae") + "secret"}) {
        EXPECT_THROW(folder.open_file(prefix + middle + last), DataError) << prefix + middle + last;
        EXPECT_THROW(folder.open_folder(prefix + middle + last), DataError);
        ++count;
      }
    }
  }
  EXPECT_GE(count, 200);
}

TEST(Folder, ReadsRangesAndSaysWhereAFileEnds) {
  const Scratch scratch;
  const InputFile file(scratch.write("file", "0123456789"));
  char bytes[8] = {};
  file.read(3, bytes, 4);
  EXPECT_EQ(std::string(bytes), "3456");
  EXPECT_NE(message_of<DataError>([&] { file.read(7, bytes, 4); }).find("ends at byte 10"),
            std::string::npos);
  EXPECT_THROW(file.text(9), DataError);
  std::filesystem::resize_file(file.path(), 5);
  EXPECT_THROW(file.read(3, bytes, 4), DataError);  // and no SIGBUS
}

TEST(Folder, FilesAreNewAndWholeOnesReplaceOthers) {
  const Scratch scratch;
  const Folder folder(scratch.path(""));
  OutputFile file = folder.create_file("a");
  file.reserve(6);
  file.append("abc", 3);
  file.append("def", 3);
  file.finish();
  EXPECT_EQ(slurp(scratch.path("a")), "abcdef");
  EXPECT_NO_THROW(folder.create_file("empty").reserve(0));
  folder.remove("empty");
  EXPECT_THROW(folder.create_file("a"), EnvironmentError);
  std::filesystem::create_symlink("b", scratch.path("link"));
  EXPECT_THROW(folder.create_file("link"), EnvironmentError);
  folder.write_file("a", "new");
  EXPECT_EQ(slurp(scratch.path("a")), "new");
  scratch.write("a.tmp", "left by a process that died");
  folder.write_file("a", "newer");
  EXPECT_EQ(slurp(scratch.path("a")), "newer");
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"a", "link"}));
}

TEST(Folder, ReadingAndWritingAreSignsOfLife) {
  static std::atomic<uint64_t> beats = 0;
  count_beats_in(beats);
  const auto given_by = [](const auto& work) {
    const uint64_t before = beats;
    work();
    return beats - before;
  };
  const Scratch scratch;
  OutputFile file = Folder(scratch.path("")).create_file("a");
  UnfinishedFile unfinished(scratch.path("b"));
  EXPECT_GT(given_by([&] { file.append("abc", 3); }), 0u);
  EXPECT_GT(given_by([&] { unfinished.write(0, "abc", 3); }), 0u);
  file.finish();
  EXPECT_GT(given_by([&] { InputFile(scratch.path("a")).text(3); }), 0u);
}

TEST(Folder, WhatItMakesCanBeReadByAllAndWrittenByItsOwner) {
  const mode_t before = ::umask(0);
  const Scratch scratch;
  const Folder folder(scratch.path(""));
  folder.create_folder("folder");
  folder.write_file("file", "");
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(scratch.path("folder")).permissions(), std::filesystem::perms(0755));
  EXPECT_EQ(std::filesystem::status(scratch.path("file")).permissions(), std::filesystem::perms(0644));
}

TEST(Folder, RemovesFilesFoldersAndLinksButNotWhatLinksPointTo) {
  const Scratch scratch;
  scratch.write("keep/file", "");
  scratch.write("gone/file", "");
  std::filesystem::create_directory_symlink(scratch.path("keep"), scratch.path("link"));
  std::filesystem::create_symlink(scratch.path("keep/file"), scratch.path("gone/link"));
  const Folder folder(scratch.path(""));
  folder.remove("gone");
  folder.remove("link");
  folder.remove("missing");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"keep"});
  EXPECT_TRUE(std::filesystem::exists(scratch.path("keep/file")));
}

}  // namespace
}  // namespace trireme::checkpoint
