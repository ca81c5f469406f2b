// The first call of MKL's vector functions in a process is made before ranks start to compute.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/support/spawn.h"

namespace {
std::atomic<int64_t> processor_asked = 0;
}  // namespace

/// In place of MKL's own, which torch finds behind this one: each vector function asks which processor this
/// is.
extern "C" __attribute__((visibility("default"))) int mkl_vml_serv_cpu_detect() {
  using Detect = int (*)();
  ++processor_asked;
  return reinterpret_cast<Detect>(::dlsym(RTLD_NEXT, "mkl_vml_serv_cpu_detect"))();
}

namespace trireme::test {
namespace {

TEST(VectorFunctions, AreChosenBeforeRanksCompute) {
  if (::dlsym(RTLD_NEXT, "mkl_vml_serv_cpu_detect") == nullptr) GTEST_SKIP() << "this torch has no MKL";
  std::atomic<int64_t> at_first = 0;
  run_ranks(2, [&](const std::shared_ptr<comm::World>&) { at_first = processor_asked.load(); });
  EXPECT_GE(at_first, 1);
  const int64_t before = processor_asked;
  at::ones({1}).exp();
  EXPECT_GT(processor_asked, before) << "exp does not ask this way, so that the test says nothing";
}

}  // namespace
}  // namespace trireme::test
