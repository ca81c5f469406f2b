#include "trireme/base/cores.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace trireme {
namespace {

TEST(Cores, QuotaIsTimePerPeriod) {
  EXPECT_EQ(quota_of_cpu_max("150000 100000"), 1.5);
  EXPECT_EQ(quota_of_cpu_max("50000 100000\n"), 0.5);
}

TEST(Cores, NoQuotaWhereNoneIsSet) {
  for (const char* text : {"max 100000", "", "100000", "1000 0", "0 1000", "-1 100000", "many 100000"}) {
    EXPECT_EQ(quota_of_cpu_max(text), std::nullopt) << text;
  }
}

TEST(Cores, AreBoundedByTheQuotaOfAGroupAroundThisProcess) {
  const auto root = std::filesystem::temp_directory_path() / fmt::format("trireme-cores-{}", ::getpid());
  std::filesystem::create_directories(root / "proc/self");
  std::filesystem::create_directories(root / "sys/fs/cgroup/job/step");
  std::filesystem::create_directories(root / "sys/fs/cgroup/cpu/job");
  std::ofstream(root / "proc/self/cgroup") << "0::/job/step\n3:cpu,cpuacct:/job\n";
  EXPECT_EQ(usable_cores(root.string()), usable_cores("/nowhere"));
  std::ofstream(root / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us") << "-1\n";
  std::ofstream(root / "sys/fs/cgroup/cpu/job/cpu.cfs_period_us") << "100000\n";
  EXPECT_EQ(usable_cores(root.string()), usable_cores("/nowhere"));
  std::ofstream(root / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us") << "150000\n";
  EXPECT_EQ(usable_cores(root.string()), 1) << "version 1";
  std::ofstream(root / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us") << "-1\n";
  std::ofstream(root / "sys/fs/cgroup/job/cpu.max") << "100000 100000\n";
  EXPECT_EQ(usable_cores(root.string()), 1) << "version 2";
  std::filesystem::remove_all(root);
}

TEST(Cores, FollowTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(usable_cores(), 1);
  ::sched_setaffinity(0, sizeof before, &before);
}

}  // namespace
}  // namespace trireme
