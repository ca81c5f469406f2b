#include "trireme/base/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

namespace trireme {
namespace {

constexpr size_t kSharedBytes = 3 * 4096 + 5;

TEST(SharedMemory, IsOneMemoryWhereverItIsMapped) {
  const Descriptor memory = make_shared_memory("test", kSharedBytes);
  ASSERT_TRUE(memory);
  auto* const here = static_cast<char*>(map_shared_memory(memory, kSharedBytes));
  auto* const there = static_cast<char*>(map_shared_memory(memory, kSharedBytes));
  ASSERT_TRUE(here != nullptr && there != nullptr && here != there);
  EXPECT_EQ(there[kSharedBytes - 1], 0);
  here[kSharedBytes - 1] = 'x';
  EXPECT_EQ(there[kSharedBytes - 1], 'x');
  ::munmap(here, kSharedBytes);
  ::munmap(there, kSharedBytes);
}

TEST(SharedMemory, HasItsPagesFromTheStartAndClosesOnExec) {
  const Descriptor memory = make_shared_memory("test", kSharedBytes);
  struct stat file {};
  ASSERT_EQ(::fstat(memory.get(), &file), 0);
  EXPECT_EQ(file.st_size, static_cast<off_t>(kSharedBytes));
  EXPECT_GE(file.st_blocks * 512, static_cast<off_t>(kSharedBytes));
  EXPECT_EQ(::fcntl(memory.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(SharedMemory, SaysWhyThereIsNone) {
  errno = 0;
  EXPECT_FALSE(make_shared_memory("test", 0)) << "the kernel reserves at least a byte";
  EXPECT_EQ(errno, EINVAL);
  errno = 0;
  EXPECT_EQ(map_shared_memory(Descriptor(), kSharedBytes), nullptr);
  EXPECT_EQ(errno, EBADF);
}

}  // namespace
}  // namespace trireme
