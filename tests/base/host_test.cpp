#include "trireme/base/host.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "trireme/base/terminal.h"

namespace trireme {
namespace {

TEST(HostMemory, IsNoMoreThanTheKernelHas) {
  struct sysinfo info {};
  ASSERT_EQ(::sysinfo(&info), 0);
  EXPECT_GT(host_memory(), int64_t{64} << 20);
  EXPECT_LE(host_memory(), static_cast<int64_t>((info.totalram + info.totalswap) * info.mem_unit));
}

/// A root with files of the system.
class FakeRoot : public ::testing::Test {
 protected:
  FakeRoot() : root_(std::filesystem::temp_directory_path() / fmt::format("trireme-host-{}", ::getpid())) {}
  ~FakeRoot() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::filesystem::path root_;
};

TEST_F(FakeRoot, HostMemoryIsBoundedByTheGroupOfThisProcessAndThoseAroundIt) {
  write("proc/self/cgroup", "0::/slurm/job_7/step_0\n");
  write("sys/fs/cgroup/slurm/job_7/step_0/memory.max", "max\n");
  write("sys/fs/cgroup/slurm/job_7/memory.max", "50000000\n");
  write("sys/fs/cgroup/slurm/memory.max", "60000000\n");
  write("sys/fs/cgroup/slurm/memory.swap.max", "0\n");
  write("sys/fs/cgroup/slurm/job_8/memory.max", "1000\n");
  EXPECT_EQ(host_memory(root_), 50'000'000);
  write("sys/fs/cgroup/memory.max", "40000000\n");
  EXPECT_EQ(host_memory(root_), 40'000'000) << "a container sees its own group as the root";
}

TEST_F(FakeRoot, HostMemoryIsBoundedByGroupsOfVersion1) {
  write("proc/self/cgroup", "11:cpu,cpuacct:/c\n4:memory:/slurm/uid_0\n0::/unified\n");
  write("sys/fs/cgroup/memory/slurm/uid_0/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "30000000\n");
  write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "1000\n");
  EXPECT_EQ(host_memory(root_), 30'000'000);
}

TEST(TerminalColumns, AreThoseOfNow) {
  int master = -1, slave = -1;
  winsize size{.ws_row = 24, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(::openpty(&master, &slave, nullptr, nullptr, &size), 0);
  EXPECT_EQ(terminal_columns(slave), 100);
  size.ws_col = 42;
  ASSERT_EQ(::ioctl(master, TIOCSWINSZ, &size), 0);
  EXPECT_EQ(terminal_columns(slave), 42);
  size.ws_col = 0;
  ASSERT_EQ(::ioctl(master, TIOCSWINSZ, &size), 0);
  EXPECT_EQ(terminal_columns(slave), 80) << "it does not tell";
  ::close(master);
  ::close(slave);
}

TEST(TerminalColumns, AreNoneWithoutATerminal) {
  const int null = ::open("/dev/null", O_RDONLY);
  EXPECT_EQ(terminal_columns(null), 0);
  EXPECT_EQ(terminal_columns(-1), 0);
  ::close(null);
}

}  // namespace
}  // namespace trireme
