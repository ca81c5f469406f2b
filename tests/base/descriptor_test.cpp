#include "trireme/base/descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <type_traits>

namespace trireme {
namespace {

int open_file() {
  return ::open("/dev/null", O_RDONLY | O_CLOEXEC);
}
bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

static_assert(!std::is_copy_constructible_v<Descriptor> && !std::is_copy_assignable_v<Descriptor>);

TEST(Descriptor, ClosesWhatItOwnsWhenItsScopeEnds) {
  const int fd = open_file();
  {
    const Descriptor owner(fd);
    EXPECT_TRUE(owner);
    EXPECT_EQ(owner.get(), fd);
    EXPECT_TRUE(is_open(fd));
  }
  EXPECT_FALSE(is_open(fd));
}

TEST(Descriptor, HasOneOwnerAfterAMove) {
  const int first = open_file(), second = open_file();
  Descriptor owner(first);
  Descriptor heir(std::move(owner));
  EXPECT_EQ(heir.get(), first);
  EXPECT_FALSE(owner);
  Descriptor other(second);
  other = std::move(heir);
  EXPECT_FALSE(is_open(second)) << "nobody owns it any more";
  EXPECT_TRUE(is_open(first));
  EXPECT_EQ(other.get(), first);
  EXPECT_FALSE(heir);
}

TEST(Descriptor, IsTheCallersAfterRelease) {
  int fd = -1;
  {
    Descriptor owner(open_file());
    fd = owner.release();
    EXPECT_FALSE(owner);
  }
  EXPECT_TRUE(is_open(fd));
  ::close(fd);
}

TEST(Descriptor, ClosesOnceAndTellsWhatWentWrong) {
  Descriptor owner(open_file());
  EXPECT_EQ(owner.close(), 0);
  EXPECT_FALSE(owner);
  EXPECT_EQ(owner.close(), 0) << "there is nothing to close";
  Descriptor closed(open_file());
  ::close(closed.get());
  EXPECT_EQ(closed.close(), EBADF);
  EXPECT_FALSE(Descriptor());
}

}  // namespace
}  // namespace trireme
