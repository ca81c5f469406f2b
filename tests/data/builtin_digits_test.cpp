// What a power cut leaves of the digits of the cache: their folder's name, only once all is on the disk. This
// file defines the system calls that say so; they note themselves and do what they always do.
#include "trireme/data/images/builtin.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "tests/data/scratch.h"

namespace trireme::data {
namespace {

struct DiskCalls {
  std::mutex mutex;
  bool notes = false;
  std::vector<std::string> calls;

  void note(std::string call) {
    const std::lock_guard lock(mutex);
    if (notes) calls.push_back(std::move(call));
  }
};

DiskCalls& disk_calls() {
  static DiskCalls calls;
  return calls;
}

}  // namespace
}  // namespace trireme::data

extern "C" {

int fsync(int fd) {
  std::error_code ignored;
  const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored);
  trireme::data::disk_calls().note("sync " + path.string());
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

int rename(const char* from, const char* to) noexcept {
  trireme::data::disk_calls().note(std::string("rename to ") + to);
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
}

namespace trireme::data {
namespace {

TEST(BuiltinDigits, HaveTheirNameOnceAllIsOnTheDisk) {
  if (system_fonts().empty()) GTEST_SKIP() << "this system has no fonts";
  const testing::Scratch scratch;
  DiskCalls& disk = disk_calls();
  disk.notes = true;
  const std::string folder = prepare_builtin_digits(
      {.format = DigitFormat::kMnist, .cache_dir = scratch.path("cache"), .train = 10, .test = 10});
  disk.notes = false;
  ASSERT_GE(disk.calls.size(), 3u);
  const std::vector<std::string> last(disk.calls.end() - 3, disk.calls.end());
  EXPECT_EQ(last, (std::vector<std::string>{"sync " + folder + ".tmp", "rename to " + folder,
                                            "sync " + scratch.path("cache/data")}));
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string synced = "sync " + folder + ".tmp/" + entry.path().filename().string();
    EXPECT_TRUE(std::ranges::any_of(disk.calls, [&](const auto& call) { return call.starts_with(synced); }))
        << synced;
  }
}

}  // namespace
}  // namespace trireme::data
