// Ranges of NVTX as a profiler sees them: a library that NVTX loads writes them down.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/cli/worker_fixture.h"

namespace trireme::cli {
namespace {

#ifdef TRIREME_NVTX_LISTENER
/// The ranges of a process, with how often each began. They nest on each thread.
std::map<std::string, int64_t> ranges_in(const std::string& path) {
  std::map<std::string, int64_t> counts, open;
  std::ifstream file(path);
  std::string thread, rest;
  while (file >> thread && std::getline(file, rest)) {
    rest.erase(0, 1);
    if (rest.starts_with('+')) ++counts[rest.substr(1)];
    open[thread] += rest.starts_with('+') ? 1 : -1;
    EXPECT_GE(open[thread], 0) << path << ": a range ends that did not begin";
  }
  for (const auto& [number, left] : open) EXPECT_EQ(left, 0) << path << ": a range does not end";
  return counts;
}

TEST_F(Worker, AProfilerSeesWhatUnitsDo) {
  front_.set("NVTX_INJECTION64_PATH", TRIREME_NVTX_LISTENER);
  front_.set("TRIREME_NVTX_LISTENS", front_.file("ranges"));
  const Outcome outcome = front_.run(
      kTiny + Words{"-n", "2", "--train.steps=3", "--parallel.policy=zero3", "--train.val_every=0"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  int64_t ranks = 0;
  for (const auto& entry : std::filesystem::directory_iterator(front_.file("."))) {
    if (!entry.path().filename().string().starts_with("ranges.")) continue;
    ++ranks;
    const auto counts = ranges_in(entry.path());
    for (const char* name : {"backward transformer.h.0", "reduce transformer.h.0", "reduce root", "update"}) {
      ASSERT_TRUE(counts.contains(name)) << name;
      EXPECT_EQ(counts.at(name), 3) << name;
    }
    ASSERT_TRUE(counts.contains("forward transformer.h.0"));
    EXPECT_GE(counts.at("forward transformer.h.0"), 3) << "and validation at the end";
    ASSERT_TRUE(counts.contains("gather transformer.h.0"));
    EXPECT_GE(counts.at("gather transformer.h.0"), 6) << "forward and backward";
  }
  EXPECT_EQ(ranks, 2);
}
#endif

}  // namespace
}  // namespace trireme::cli
