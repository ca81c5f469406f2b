#include "trireme/cli/download.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/cli/front_process.h"
#include "tests/support/range_server.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;
using testing::RangeServer;

std::string numbers(size_t bytes) {
  std::string text;
  for (size_t i = 0; text.size() < bytes; ++i) text += std::to_string(i) + "\n";
  text.resize(bytes);
  return text;
}

/// The digest of numbers(200000), by Python's hashlib.
constexpr const char* kDigest = "3a2f63d247d47ad570d386e59f55b7602c744fca0353a0667ed4ca40adf99f42";

class Download : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::access("/usr/bin/curl", X_OK) != 0) GTEST_SKIP() << "there is no curl";
  }
  Remote remote(const RangeServer& server) const {
    return {.url = server.url("set.bin"), .bytes = 200000, .sha256 = kDigest};
  }
  std::string path() const { return folder_.file("sets/set.bin"); }
  void expect_whole() const {
    EXPECT_EQ(read_file(path()), body_);
    EXPECT_FALSE(fs::exists(path() + ".part"));
  }

  TemporaryFolder folder_;
  const std::string body_ = numbers(200000);
  const Environment environment_{{{"PATH", "/usr/bin:/bin"}, {"NO_PROXY", "127.0.0.1"}}};
};

TEST_F(Download, PutsTheFileInItsPlaceOnce) {
  const RangeServer server(body_, {});
  download(remote(server), path(), environment_);
  expect_whole();
  download(remote(server), path(), environment_);
  EXPECT_EQ(server.begins().size(), 1U);
}

TEST_F(Download, GoesOnWhereAnEarlierOneEnded) {
  const RangeServer server(body_, {});
  make_directories(folder_.file("sets"));
  std::ofstream(path() + ".part", std::ios::binary) << body_.substr(0, 150000);
  download(remote(server), path(), environment_);
  expect_whole();
  EXPECT_EQ(server.begins(), std::vector<int64_t>{150000});
}

TEST_F(Download, BeginsAnewWhereTheServerHasNoRanges) {
  const RangeServer server(body_, {.ranges = false});
  make_directories(folder_.file("sets"));
  std::ofstream(path() + ".part", std::ios::binary) << body_.substr(0, 150000);
  download(remote(server), path(), environment_);
  expect_whole();
}

TEST_F(Download, KeepsWhatCameWhenTheConnectionBreaks) {
  const RangeServer server(body_, {.breaks_after = 70000});
  EXPECT_THROW(download(remote(server), path(), environment_), EnvironmentError);
  EXPECT_FALSE(fs::exists(path()));
  download(remote(server), path(), environment_);
  expect_whole();
  EXPECT_EQ(server.begins().size(), 2U);
  EXPECT_GT(server.begins().back(), 0);
}

TEST_F(Download, RefusesOtherBytesAndRemovesThem) {
  const RangeServer server(body_, {});
  Remote other = remote(server);
  other.sha256 = std::string(64, '0');
  EXPECT_THROW(download(other, path(), environment_), DataError);
  EXPECT_FALSE(fs::exists(path()));
  EXPECT_FALSE(fs::exists(path() + ".part"));
}

TEST_F(Download, SaysWhatToPutWhereWithoutAConnection) {
  try {
    download({.url = "http://127.0.0.1:1/set.bin", .bytes = 10, .sha256 = "ab"}, path(), environment_);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const EnvironmentError& error) {
    EXPECT_TRUE(contains(error.what(), "put the file at " + path() + " yourself (10 bytes, SHA-256 ab)"))
        << error.what();
  }
}

TEST_F(Download, UnpacksAFolderWholeOrNotAtAll) {
  const std::string from = folder_.file("from");
  make_directories(from + "/inner");
  std::ofstream(from + "/inner/a.bin") << "a";
  const std::string archive = folder_.file("set.tar.gz");
  ASSERT_EQ(std::system(("tar -czf " + archive + " -C " + from + " inner").c_str()), 0);
  const std::string out = folder_.file("out");
  make_directories(out);
  unpack(archive, "inner", out, environment_);
  EXPECT_EQ(read_file(out + "/inner/a.bin"), "a");
  fs::remove_all(out + "/inner");
  fs::resize_file(archive, fs::file_size(archive) - 20);
  EXPECT_THROW(unpack(archive, "inner", out, environment_), EnvironmentError);
  EXPECT_TRUE(fs::is_empty(out));
}

TEST(DataVerb, RefusesSetsThatItDoesNotKnowAndSaysWhatComes) {
  const FrontProcess front;
  const Outcome unknown = front.run({"data", "get", "imagenet"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_TRUE(contains(unknown.err, "cifar10, cifar100 or mnist")) << unknown.err;
  const Outcome nowhere = front.run({"data", "get", "mnist", "--from", "http://127.0.0.1:1"});
  EXPECT_EQ(nowhere.code, 3) << nowhere.err;
  EXPECT_TRUE(contains(nowhere.err, "CC BY-SA 3.0") && contains(nowhere.err, "11.1 MiB")) << nowhere.err;
}

}  // namespace
}  // namespace trireme::cli
