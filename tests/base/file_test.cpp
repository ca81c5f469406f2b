#include "trireme/base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/random_access_file.h"
#include "trireme/base/text.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

/// A fresh folder that goes away with the test.
class File : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "trireme-file-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::ptrdiff_t files() const { return std::distance(fs::directory_iterator(folder_), {}); }

  fs::path folder_;
};

/// Files of this process cannot grow above `bytes` while this lives: what a full disk does, on any machine.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : previous_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    const rlimit limit{bytes, previous_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &previous_);
    std::signal(SIGXFSZ, previous_handler_);
  }

 private:
  rlimit previous_{};
  void (*previous_handler_)(int);
};

template <typename Action>
std::string environment_error(Action action) {
  try {
    action();
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "";
}

TEST_F(File, PiecesAreReadWhereverTheyAre) {
  const std::string path = (fs::path(folder_) / "numbers").string();
  write_file_atomic(path, "0123456789");
  RandomAccessFile file(path);
  EXPECT_EQ(file.size(), 10);
  std::array<std::byte, 3> piece;
  file.read(4, piece);
  EXPECT_EQ(std::memcmp(piece.data(), "456", 3), 0);
  EXPECT_THROW(file.read(8, piece), DataError);
  const RandomAccessFile moved = std::move(file);
  fs::resize_file(path, 5);
  EXPECT_THROW(moved.read(4, piece), DataError);
  moved.read(2, piece);
  EXPECT_EQ(std::memcmp(piece.data(), "234", 3), 0);
  EXPECT_THROW(RandomAccessFile((fs::path(folder_) / "nowhere").string()), EnvironmentError);
}

TEST_F(File, AtomicWriteIsReadBackByteForByte) {
  std::string every_byte(256, '\0');
  for (int i = 0; i < 256; ++i) every_byte[static_cast<size_t>(i)] = static_cast<char>(i);
  for (const std::string& content :
       {std::string(), std::string("line\n"), every_byte, std::string(1 << 18, 'x')}) {
    write_file_atomic(path("a"), content);
    EXPECT_EQ(read_file(path("a")), content);
    EXPECT_EQ(files(), 1);
  }
}

TEST_F(File, AtomicWriteThatRunsOutOfSpaceKeepsTheOldFile) {
  write_file_atomic(path("a"), "old");
  std::string message;
  {
    const FileSizeLimit limit(4096);
    message = environment_error([&] { write_file_atomic(path("a"), std::string(1 << 16, 'n')); });
  }
  EXPECT_NE(message.find(path("a")), std::string::npos) << message;
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(read_file(path("a")), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(File, AtomicWriteNeedsItsFolder) {
  const std::string message = environment_error([&] { write_file_atomic(path("absent/a"), "x"); });
  EXPECT_NE(message.find(path("absent/a")), std::string::npos) << message;
  EXPECT_NE(message.find("No such file or directory"), std::string::npos) << message;
}

TEST_F(File, AtomicWriteRefusesToReplaceAFolder) {
  fs::create_directory(path("folder"));
  EXPECT_THROW(write_file_atomic(path("folder"), "x"), EnvironmentError);
  EXPECT_TRUE(fs::is_directory(path("folder")));
}

TEST_F(File, AtomicWriteFollowsALinkWhereverItLeads) {
  fs::create_directory(path("elsewhere"));
  fs::create_symlink("elsewhere/target", path("link"));
  for (const char* content : {"new", "newer"}) {  // the target is not there, and is
    write_file_atomic(path("link"), content);
    EXPECT_TRUE(fs::is_symlink(path("link")));
    EXPECT_EQ(read_file(path("elsewhere/target")), content);
  }
}

TEST_F(File, AtomicWriteLeavesFilesOfOthersAlone) {
  write_file_atomic(path("a.tmp"), "mine");
  write_file_atomic(path("a"), "x");
  EXPECT_EQ(read_file(path("a.tmp")), "mine");
  EXPECT_EQ(files(), 2);
}

TEST_F(File, AtomicWriteToAPipeReachesWhoReadsIt) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const int reader = ::open(path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  write_file_atomic(path("pipe"), "content");
  char got[16] = {};
  EXPECT_EQ(::read(reader, got, sizeof got), 7);
  EXPECT_STREQ(got, "content");
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
}

TEST_F(File, FullDiskIsNamedWithItsFix) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  LineFile file("/dev/full");
  const std::string message = environment_error([&] { file.append("x"); });
  EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
  EXPECT_NE(message.find("/dev/full"), std::string::npos) << message;
  EXPECT_NE(message.find("free some space"), std::string::npos) << message;
}

TEST_F(File, ReadingNamesTheAbsentFile) {
  const std::string message = environment_error([&] { read_file(path("absent")); });
  EXPECT_NE(message.find(path("absent")), std::string::npos) << message;
}

TEST_F(File, ReadingAFolderFails) {
  EXPECT_THROW(read_file(folder_.string()), EnvironmentError);
}

TEST_F(File, ReadsFilesWhoseSizeTheKernelDoesNotKnow) {
  EXPECT_NE(read_file("/proc/self/status").find("Name:"), std::string::npos);
}

TEST_F(File, MapShowsTheBytesAndSurvivesMoves) {
  write_file_atomic(path("a"), "abc");
  MappedFile first(path("a"));
  MappedFile second(std::move(first));
  MappedFile third;
  third = std::move(second);
  ASSERT_EQ(third.bytes().size(), 3u);
  EXPECT_EQ(third.bytes()[1], std::byte{'b'});
  EXPECT_EQ(third.path(), path("a"));
}

TEST_F(File, EmptyFileMapsToAnEmptySpan) {
  write_file_atomic(path("empty"), "");
  EXPECT_TRUE(MappedFile(path("empty")).bytes().empty());
}

TEST_F(File, MappingNamesTheAbsentFile) {
  const std::string message = environment_error([&] { MappedFile{path("absent")}; });
  EXPECT_NE(message.find(path("absent")), std::string::npos) << message;
}

TEST_F(File, MakeDirectoriesMakesParentsAndIsIdempotent) {
  make_directories(path("a/b/c"));
  make_directories(path("a/b/c"));
  EXPECT_TRUE(fs::is_directory(path("a/b/c")));
}

TEST_F(File, MakeDirectoriesRefusesAFileInTheWay) {
  write_file_atomic(path("a"), "x");
  EXPECT_THROW(make_directories(path("a/b")), EnvironmentError);
}

TEST_F(File, LinesOfManyWritersStayWhole) {
  constexpr int kThreads = 4, kLines = 200;
  {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([this, t] {
        LineFile file(path("log"));
        for (int i = 0; i < kLines; ++i) file.append(std::string(100, static_cast<char>('a' + t)));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<std::string> lines = split(read_file(path("log")), '\n');
  ASSERT_EQ(lines.size(), size_t{kThreads * kLines + 1});  // the last newline ends an empty piece
  lines.pop_back();
  for (const std::string& line : lines) EXPECT_EQ(line, std::string(100, line.front()));
}

}  // namespace
}  // namespace trireme
