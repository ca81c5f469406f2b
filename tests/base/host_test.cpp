#include "trireme/base/host.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "trireme/base/terminal.h"

namespace trireme {
namespace {

TEST(HostMemory, IsNoMoreThanTheKernelHas) {
  struct sysinfo info {};
  ASSERT_EQ(::sysinfo(&info), 0);
  EXPECT_GT(host_memory(), int64_t{64} << 20);
  EXPECT_LE(host_memory(), static_cast<int64_t>((info.totalram + info.totalswap) * info.mem_unit));
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
