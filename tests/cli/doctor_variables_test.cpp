// What doctor says of NCCL's variables depends on the machine.
#include <gtest/gtest.h>

#include "trireme/cli/doctor.h"

namespace trireme::cli {
namespace {

const HostNetwork kLaptop{.gpus = 0, .interfaces = {"lo", "wlan0"}, .infiniband = {}};
const HostNetwork kServer{
    .gpus = 8, .interfaces = {"docker0", "eth0", "lo"}, .infiniband = {"mlx5_0", "mlx5_1"}};

Check only_row(const std::string& name, const std::string& value, const HostNetwork& host) {
  const std::vector<Check> checks =
      check_variables(Environment(std::map<std::string, std::string>{{name, value}}), host);
  EXPECT_EQ(checks.size(), 1u);
  EXPECT_EQ(checks.front().name, name);
  EXPECT_EQ(checks.front().verdict == Verdict::kOk, checks.front().fix.empty());
  return checks.front();
}

TEST(DoctorVariables, DisablingPeerCopiesMattersWhereThereArePeers) {
  const Check here = only_row("NCCL_P2P_DISABLE", "1", kServer);
  EXPECT_EQ(here.verdict, Verdict::kWarn);
  EXPECT_NE(here.found.find("8 GPUs"), std::string::npos) << here.found;
  EXPECT_EQ(only_row("NCCL_P2P_DISABLE", "1", kLaptop).verdict, Verdict::kOk);
  EXPECT_EQ(only_row("NCCL_P2P_DISABLE", "0", kServer).verdict, Verdict::kOk);
  EXPECT_EQ(only_row("NCCL_P2P_DISABLE", "yes", kServer).verdict, Verdict::kWarn) << "NCCL ignores it";
}

TEST(DoctorVariables, DisablingInfiniBandMattersWhereThereIsSome) {
  const Check here = only_row("NCCL_IB_DISABLE", "1", kServer);
  EXPECT_EQ(here.verdict, Verdict::kWarn);
  EXPECT_NE(here.found.find("mlx5_0, mlx5_1"), std::string::npos) << here.found;
  EXPECT_EQ(only_row("NCCL_IB_DISABLE", "1", kLaptop).verdict, Verdict::kOk);
}

TEST(DoctorVariables, InterfacesAreLookedUp) {
  EXPECT_EQ(only_row("NCCL_SOCKET_IFNAME", "eth", kServer).found, "NCCL uses interface eth0 of this host");
  EXPECT_EQ(only_row("NCCL_SOCKET_IFNAME", "^docker,lo", kServer).found,
            "NCCL uses interface eth0 of this host");
  EXPECT_EQ(only_row("NCCL_SOCKET_IFNAME", "=eth", kServer).verdict, Verdict::kWarn);
  const Check wrong = only_row("NCCL_SOCKET_IFNAME", "ens5", kServer);
  EXPECT_EQ(wrong.verdict, Verdict::kWarn);
  EXPECT_NE(wrong.found.find("docker0, eth0, lo"), std::string::npos) << wrong.found;
  EXPECT_EQ(only_row("NCCL_IB_HCA", "mlx5_1:1", kServer).found, "NCCL uses adapter mlx5_1 of this host");
}

TEST(DoctorVariables, CountsOfSocketsHaveARange) {
  EXPECT_EQ(only_row("NCCL_SOCKET_NTHREADS", "4", kServer).verdict, Verdict::kOk);
  EXPECT_EQ(only_row("NCCL_SOCKET_NTHREADS", "17", kServer).verdict, Verdict::kWarn);
  EXPECT_EQ(only_row("NCCL_NSOCKS_PERTHREAD", "0", kServer).verdict, Verdict::kWarn);
  EXPECT_EQ(only_row("NCCL_NSOCKS_PERTHREAD", "many", kServer).verdict, Verdict::kWarn);
}

TEST(DoctorVariables, ThoseOfCudaAndGlooAreExplainedToo) {
  EXPECT_EQ(only_row("CUDA_DEVICE_MAX_CONNECTIONS", "1", kServer).verdict, Verdict::kOk);
  EXPECT_EQ(only_row("CUDA_LAUNCH_BLOCKING", "1", kServer).verdict, Verdict::kWarn);
  EXPECT_EQ(only_row("CUDA_LAUNCH_BLOCKING", "0", kServer).verdict, Verdict::kOk);
  EXPECT_EQ(only_row("GLOO_SOCKET_IFNAME", "eth0", kServer).found.find("has no effect"), 0u);
  EXPECT_EQ(check_variables(Environment(std::map<std::string, std::string>{{"CUDA_HOME", "/usr"}}), kServer)
                .front()
                .name,
            "variables");
}

TEST(DoctorVariables, EveryOneThatIsSetHasItsRowAndNoValueIsShown) {
  const Environment environment({{"NCCL_DEBUG", "INFO"},
                                 {"NCCL_NET", "secret-value"},
                                 {"NCCL_OF_TOMORROW", "secret-value"},
                                 {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
                                 {"TORCH_HOME", "/secret-value"},
                                 {"NCCL_VERSION", "2.28"}});
  const std::vector<Check> checks = check_variables(environment, kServer);
  std::vector<std::string> names;
  for (const Check& check : checks) {
    names.push_back(check.name);
    EXPECT_EQ((check.found + check.fix).find("secret-value"), std::string::npos) << check.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"NCCL_DEBUG", "NCCL_NET", "NCCL_OF_TOMORROW",
                                             "TORCH_NCCL_ASYNC_ERROR_HANDLING"}));
  EXPECT_EQ(checks.back().verdict, Verdict::kWarn);
}

TEST(DoctorVariables, NothingIsSaidOfNothing) {
  const std::vector<Check> checks = check_variables(Environment(), kLaptop);
  ASSERT_EQ(checks.size(), 1u);
  EXPECT_EQ(checks.front().verdict, Verdict::kOk);
}

}  // namespace
}  // namespace trireme::cli
