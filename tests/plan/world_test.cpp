#include "trireme/plan/world.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

using Variables = std::map<std::string, std::string>;

Variables operator+(Variables left, const Variables& right) {
  for (const auto& [name, value] : right) left[name] = value;
  return left;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

WorldSpec detect(const Variables& variables) {
  return detect_world(Environment(variables));
}

/// The message of the ConfigError, or empty when the variables were accepted.
std::string refusal(const Variables& variables) {
  try {
    detect(variables);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

/// Rank 5 of 8 on two hosts, as each launcher says it.
const Variables kRanks = {{"RANK", "5"},
                          {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "node1"},
                          {"MASTER_PORT", "29400"}};
const Variables kTorchrun = kRanks + Variables{{"TORCHELASTIC_RUN_ID", "none"},
                                               {"TORCHELASTIC_RESTART_COUNT", "2"},
                                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                               {"GROUP_RANK", "1"},
                                               {"OMP_NUM_THREADS", "1"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                            {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_RANK", "5"}};
const Variables kPmi = {
    {"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
const Variables kMaster = {{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29400"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "8"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                          {"SLURM_STEP_NODELIST", "node[01-02]"},
                          {"SLURM_JOB_NODELIST", "login,node[01-02]"},
                          {"SLURM_JOB_ID", "123456"},
                          {"SLURM_JOB_NAME", "train"},
                          {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.99"}};

void expect_rank_5_of_8(const WorldSpec& world, const std::string& launcher) {
  EXPECT_EQ(world.launcher, launcher);
  EXPECT_EQ(world.rank, 5);
  EXPECT_EQ(world.world_size, 8);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_world_size, 4);
}

TEST(World, WithoutALauncherIsOneRank) {
  const WorldSpec world = detect({{"PATH", "/bin"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29400"}});
  EXPECT_EQ(world.launcher, "none");
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.world_size, 1);
  EXPECT_EQ(world.local_world_size, 1);
}

TEST(World, ReadsTorchrun) {
  const WorldSpec world = detect(kTorchrun);
  expect_rank_5_of_8(world, "torchrun");
  EXPECT_EQ(world.master_addr, "node1");
  EXPECT_EQ(world.master_port, 29400);
  EXPECT_TRUE(world.agent_store);
  EXPECT_EQ(world.restart, 2);
  EXPECT_EQ(world.listen_fd, -1);
}

TEST(World, ReadsRanksSetByHandWithoutAnAgentStore) {
  const WorldSpec world = detect(kRanks);
  expect_rank_5_of_8(world, "unknown");
  EXPECT_FALSE(world.agent_store);
  EXPECT_EQ(world.restart, 0);
}

TEST(World, ReadsOurLauncherAndItsSocketOnRankZeroOnly) {
  const Variables ours = kRanks + Variables{{"TRIREME_LAUNCHER", "trireme"}, {"TRIREME_LISTEN_FD", "7"}};
  expect_rank_5_of_8(detect(ours), "trireme");
  EXPECT_EQ(detect(ours).listen_fd, -1);
  EXPECT_EQ(detect(ours + Variables{{"RANK", "0"}, {"LOCAL_RANK", "0"}}).listen_fd, 7);
}

TEST(World, ReadsOpenMpi) {
  const WorldSpec world = detect(kOpenMpi + kMaster);
  expect_rank_5_of_8(world, "openmpi");
  EXPECT_EQ(world.master_addr, "node1");
  EXPECT_EQ(world.master_port, 29400);
}

TEST(World, ReadsPmi) {
  expect_rank_5_of_8(detect(kPmi + kMaster), "pmi");
}

TEST(World, ReadsPmiNamesOfPalsAndMvapich) {
  expect_rank_5_of_8(detect(kMaster + Variables{{"PALS_RANKID", "5"},
                                                {"PMI_SIZE", "8"},
                                                {"PALS_LOCAL_RANKID", "1"},
                                                {"PMI_LOCAL_SIZE", "4"}}),
                     "pmi");
  expect_rank_5_of_8(detect(kMaster + Variables{{"MV2_COMM_WORLD_RANK", "5"},
                                                {"MV2_COMM_WORLD_SIZE", "8"},
                                                {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
                                                {"MV2_COMM_WORLD_LOCAL_SIZE", "4"}}),
                     "pmi");
}

TEST(World, MpiOnOneHostNeedsNoAddress) {
  for (const Variables& job :
       {kOpenMpi + Variables{{"OMPI_COMM_WORLD_LOCAL_RANK", "5"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"}},
        kPmi + Variables{{"MPI_LOCALRANKID", "5"}, {"MPI_LOCALNRANKS", "8"}}}) {
    EXPECT_EQ(detect(job).master_addr, "127.0.0.1");
    EXPECT_EQ(detect(job).master_port, 29500);
  }
}

TEST(World, MpiAcrossHostsNeedsAnAddress) {
  for (const Variables& job : {kOpenMpi, kPmi}) {
    test::expect_mentions(refusal(job), {"only partly set", "missing MASTER_ADDR MASTER_PORT"});
    test::expect_mentions(refusal(job + Variables{{"MASTER_ADDR", "node1"}}),
                          {"MASTER_ADDR=node1", "missing MASTER_PORT"});
  }
}

TEST(World, ReadsSrun) {
  const WorldSpec world = detect(kSlurm);
  expect_rank_5_of_8(world, "slurm");
  EXPECT_EQ(world.master_addr, "node01");
  EXPECT_EQ(world.master_port, 15000 + 3456);
}

TEST(World, AddressSetByHandWinsOverSlurms) {
  const WorldSpec world = detect(kSlurm + kMaster);
  EXPECT_EQ(world.master_addr, "node1");
  EXPECT_EQ(world.master_port, 29400);
}

TEST(World, SlurmPortStaysInItsRangeForAnyJob) {
  for (const char* job : {"1", "9999", "10000", "4294967295"}) {
    const int64_t port = detect(kSlurm + Variables{{"SLURM_JOB_ID", job}}).master_port;
    EXPECT_GE(port, 15000) << job;
    EXPECT_LE(port, 24999) << job;
  }
}

TEST(World, SlurmLocalSizeComesFromTheListOfTheStep) {
  const auto local_size = [](const std::string& list, const char* node) {
    return detect(kSlurm + Variables{{"SLURM_STEP_TASKS_PER_NODE", list}, {"SLURM_NODEID", node}})
        .local_world_size;
  };
  EXPECT_EQ(local_size("5,3", "0"), 5);
  EXPECT_EQ(local_size("5,3", "1"), 3);
  EXPECT_EQ(local_size("3,2(x2),1", "2"), 2);
  EXPECT_EQ(local_size("2(x4)", "3"), 2);
  test::expect_mentions(refusal(kSlurm + Variables{{"SLURM_STEP_TASKS_PER_NODE", "four"}}),
                        {"'four'", "malformed"});
}

TEST(World, SlurmLocalSizeFallsBackToFlagsAndThenIsMissing) {
  const Variables bare = without(kSlurm, "SLURM_STEP_TASKS_PER_NODE");
  EXPECT_EQ(detect(bare + Variables{{"SLURM_NTASKS_PER_NODE", "4"}}).local_world_size, 4);
  EXPECT_EQ(detect(bare + Variables{{"SLURM_NNODES", "1"}}).local_world_size, 8);
  test::expect_mentions(refusal(bare + Variables{{"SLURM_NNODES", "2"}}),
                        {"only partly set", "missing SLURM_NTASKS_PER_NODE"});
}

TEST(World, ShellsOfSlurmAreNoRanks) {
  const Variables allocation = {
      {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NODELIST", "node[1-2]"}};
  EXPECT_EQ(detect(allocation).launcher, "none");  // salloc
  const Variables batch = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NAME", "job.sh"}};
  EXPECT_EQ(detect(batch).launcher, "none");  // sbatch with one task
  for (const char* name : {"bash", "interactive"}) {
    const Variables shell =
        kSlurm + Variables{{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_NAME", name}};
    EXPECT_EQ(detect(shell).launcher, "none") << name;
  }
}

TEST(World, SrunInsideAnInteractiveAllocationIsSeenByEveryRank) {
  for (const char* rank : {"0", "3"}) {
    const Variables step = kSlurm + Variables{{"SLURM_JOB_NAME", "interactive"},
                                              {"SLURM_STEP_NUM_TASKS", "8"},
                                              {"SLURM_PROCID", rank},
                                              {"SLURM_LOCALID", rank},
                                              {"SLURM_NODEID", "0"}};
    EXPECT_EQ(detect(step).launcher, "slurm") << rank;
    EXPECT_EQ(detect(step).world_size, 8);
  }
}

TEST(World, BatchScriptOfSeveralTasksMustCallSrun) {
  const Variables script =
      without(kSlurm + Variables{{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}}, "SLURM_STEP_ID");
  test::expect_mentions(refusal(script), {"only partly set", "SLURM_STEP_ID", "srun"});
}

TEST(World, EveryHalfSetListsWhatIsPresentAndWhatIsMissing) {
  const Variables complete[] = {kRanks, kTorchrun, kOpenMpi + kMaster, kPmi + kMaster};
  const std::vector<std::string> needed[] = {
      {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"},
      {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}};
  for (size_t job = 0; job < std::size(complete); ++job) {
    for (const std::string& name : needed[job]) {
      const std::string message = refusal(without(complete[job], name));
      test::expect_mentions(message, {"only partly set"});
      const size_t missing = message.find("missing ");
      ASSERT_NE(missing, std::string::npos) << message;
      EXPECT_NE(message.find(name, missing), std::string::npos) << message;
      const std::string& present = needed[job][name == needed[job][0] ? 1 : 0];
      EXPECT_LT(message.find(present + "="), missing) << message;
    }
  }
}

TEST(World, FiveVariablesAreEnough) {
  const WorldSpec spec = detect(without(kRanks, "LOCAL_WORLD_SIZE"));
  EXPECT_EQ(spec.rank, 5);
  EXPECT_EQ(spec.world_size, 8);
  EXPECT_EQ(spec.local_rank, 1);
  EXPECT_EQ(spec.local_world_size, 0) << "not known";
  EXPECT_EQ(spec.ranks_here(), 2) << "local rank 0 and this one";
  EXPECT_EQ(spec.master_addr, "node1");
  EXPECT_EQ(spec.master_port, 29400);
  test::expect_mentions(refusal(without(kRanks, "LOCAL_WORLD_SIZE") + Variables{{"LOCAL_RANK", "8"}}),
                        {"out of range", "LOCAL_RANK=8"});
}

TEST(World, TheJobKeyIsTakenUnderEveryLauncher) {
  const Variables key = {{"TRIREME_JOB_KEY", "0123abcd"}};
  for (const Variables& job : {kRanks, kTorchrun, kOpenMpi + kMaster, kPmi + kMaster, kSlurm}) {
    EXPECT_EQ(detect(job + key).job_key, "0123abcd");
    EXPECT_EQ(detect(job).job_key, "");
  }
  test::expect_mentions(refusal(kRanks + Variables{{"TRIREME_JOB_KEY", std::string(257, 'x')}}),
                        {"TRIREME_JOB_KEY", "257"});
}

TEST(World, NeverASilentWorldOfOneUnderAnyHint) {
  for (const char* hint :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "SLURM_PROCID"}) {
    EXPECT_NE(refusal({{hint, "3"}}), "") << hint;
  }
  EXPECT_NE(refusal({{"TRIREME_LAUNCHER", "trireme"}}), "");
}

TEST(World, AWorldOfOneThatALauncherAskedForIsAccepted) {
  EXPECT_EQ(detect({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).launcher, "unknown");
  EXPECT_EQ(detect({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}).launcher, "openmpi");
  EXPECT_EQ(detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_ID", "0"}}).launcher, "slurm");
}

TEST(World, RefusesNumbersOutOfRange) {
  const Variables wrong[] = {{{"RANK", "8"}},        {{"RANK", "-1"}},          {{"WORLD_SIZE", "0"}},
                             {{"LOCAL_RANK", "4"}},  {{"LOCAL_RANK", "-1"}},    {{"LOCAL_WORLD_SIZE", "9"}},
                             {{"MASTER_PORT", "0"}}, {{"MASTER_PORT", "65536"}}};
  for (const Variables& change : wrong) {
    const auto& [name, value] = *change.begin();
    test::expect_mentions(refusal(kRanks + change), {"out of range", name + "=" + value});
  }
}

TEST(World, VariablesAreNobodysWhereNothingSaysWhoSetThem) {
  EXPECT_EQ(refusal({{"RANK", "3"}}).find("torchrun"), std::string::npos);
  EXPECT_EQ(refusal(kRanks + Variables{{"RANK", "8"}}).find("torchrun"), std::string::npos);
  test::expect_mentions(refusal({{"RANK", "3"}, {"TORCHELASTIC_RUN_ID", "x"}}),
                        {"the variables of torchrun"});
  EXPECT_EQ(launcher_in_words("slurm"), "slurm");
  EXPECT_NE(launcher_in_words("unknown"), "unknown");
}

TEST(World, RefusesTextForNumbers) {
  test::expect_mentions(refusal(kRanks + Variables{{"WORLD_SIZE", "eight"}}), {"WORLD_SIZE='eight'"});
}

TEST(World, TwoLaunchersThatAgreeFollowThePrecedence) {
  const Variables mpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                         {"OMPI_COMM_WORLD_SIZE", "8"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  EXPECT_EQ(detect(kRanks + mpi).launcher, "unknown");
  EXPECT_EQ(detect(kMaster + mpi + kPmi).launcher, "openmpi");
  EXPECT_EQ(detect(kMaster + kPmi + kSlurm).launcher, "pmi");
}

TEST(World, TwoLaunchersThatDisagreeAreBothListed) {
  const std::string ranks_and_mpi = refusal(kRanks + kOpenMpi + Variables{{"OMPI_COMM_WORLD_RANK", "4"}});
  test::expect_mentions(ranks_and_mpi, {"disagree", "RANK=5", "WORLD_SIZE=8", "OMPI_COMM_WORLD_RANK=4"});
  const std::string sizes = refusal(kMaster + kOpenMpi + kPmi + Variables{{"PMI_SIZE", "6"}});
  test::expect_mentions(sizes, {"disagree", "OMPI_COMM_WORLD_SIZE=8", "PMI_SIZE=6"});
  const std::string slurm =
      refusal(kRanks + kSlurm + Variables{{"SLURM_PROCID", "4"}, {"SLURM_LOCALID", "0"}});
  test::expect_mentions(slurm, {"disagree", "RANK=5", "SLURM_PROCID=4"});
}

TEST(World, SmallerWorldInsideALargerOneIsAMistake) {
  // mpirun -n 8 torchrun --nproc-per-node=1: eight trainings where one was meant
  const Variables inner = {{"TORCHELASTIC_RUN_ID", "none"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}};
  test::expect_mentions(refusal(inner + kOpenMpi + kMaster), {"disagree", "rank 0 of 1", "rank 5 of 8"});
}

TEST(World, LauncherInsideALauncherMayMultiplyRanks) {
  const Variables one_task_a_node = kSlurm + Variables{{"SLURM_PROCID", "1"},
                                                       {"SLURM_NTASKS", "2"},
                                                       {"SLURM_LOCALID", "0"},
                                                       {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}};
  expect_rank_5_of_8(detect(kTorchrun + one_task_a_node), "torchrun");
  expect_rank_5_of_8(detect(kOpenMpi + kMaster + one_task_a_node), "openmpi");
}

TEST(World, OurLauncherHasTheLastWord) {
  const Variables ours =
      kRanks +
      Variables{{"TRIREME_LAUNCHER", "trireme"}, {"RANK", "0"}, {"LOCAL_RANK", "0"}, {"WORLD_SIZE", "4"}};
  EXPECT_EQ(detect(ours + kSlurm).world_size, 4);
}

TEST(World, PmiOfSrunIsCompletedBySlurm) {
  const Variables echo = {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}};
  expect_rank_5_of_8(detect(kSlurm + echo), "slurm");
  test::expect_mentions(refusal(kSlurm + echo + Variables{{"PMI_RANK", "4"}}),
                        {"only partly set", "PMI_RANK=4"});
}

TEST(Nodelist, FirstHostOfEveryForm) {
  EXPECT_EQ(first_host_of_nodelist("node7"), "node7");
  EXPECT_EQ(first_host_of_nodelist("node[01-03,07],gpu5"), "node01");
  EXPECT_EQ(first_host_of_nodelist("gpu5,node[01-03,07]"), "gpu5");
  EXPECT_EQ(first_host_of_nodelist("a,b,c"), "a");
  EXPECT_EQ(first_host_of_nodelist("node[7]"), "node7");
  EXPECT_EQ(first_host_of_nodelist("node[098-102]"), "node098");
  EXPECT_EQ(first_host_of_nodelist("rack[1-2]node[3-4]"), "rack1node3");
  EXPECT_EQ(first_host_of_nodelist("node[1,3]-ib"), "node1-ib");
  EXPECT_EQ(first_host_of_nodelist("c1-2.cluster.example.org"), "c1-2.cluster.example.org");
}

TEST(Nodelist, RefusesMalformedLists) {
  for (const char* list :
       {"", ",a", "node[", "node[01-03", "node[]", "node[a-b]", "node[1-]", "node]", "no de", "[,1]"}) {
    EXPECT_THROW(first_host_of_nodelist(list), ConfigError) << "'" << list << "'";
  }
}

}  // namespace
}  // namespace trireme::plan
