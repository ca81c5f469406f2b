// Validation over uneven data without engine.evaluate(): the error says what each rank did, and what to do.
#include <gtest/gtest.h>

#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;

/// Rank 0 has two batches and rank 1 has one, behind which it calls `afterwards`. The error of each rank.
template <typename Afterwards>
std::vector<std::string> errors_of(bool peer_memory, const Afterwards& afterwards) {
  std::vector<std::string> errors(2);
  run_ranks(
      2,
      [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = parallel::fully_shard(net, mesh);
        const at::NoGradGuard no_grad;
        const auto rank = static_cast<size_t>(world->rank());
        try {
          for (size_t batch = rank; batch < 2; ++batch) net.forward(inputs(0));
          afterwards(*engine, mesh);
        } catch (const CommError& error) {
          errors[rank] = error.what();
        }
      },
      3.0, 60.0, peer_memory);
  return errors;
}

void expect_advice(const std::string& error, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(error.find(word), std::string::npos) << word << " in " << error;
  for (const char* advice :
       {"all ranks are present", "same units", "engine.evaluate()", "any_rank()", "shadow_micro_batch()"}) {
    EXPECT_NE(error.find(advice), std::string::npos) << advice << " in " << error;
  }
  for (const char* wrong : {"missing rank", "raise the timeout"})
    EXPECT_EQ(error.find(wrong), std::string::npos) << wrong << " in " << error;
}

TEST(DifferentUnits, AreNamedWhereTheRanksMeetInOneGroup) {
  const double started = monotonic_seconds();
  const std::vector<std::string> errors =
      errors_of(true, [](parallel::DataParallel& engine, const comm::Mesh&) { engine.any_rank(false); });
  expect_advice(errors[0],
                {"[comm.all_gather]", "for blocks.0 of group dp_shard", "rank 0", "rank 1 failed in"});
  expect_advice(errors[1],
                {"[comm.all_gather]", "for blocks.0'", "rank 0 failed in", "for blocks.0 of group"});
  EXPECT_LT(monotonic_seconds() - started, 20.0);
}

TEST(DifferentUnits, AreNamedWhereTheRanksWaitInTwoGroups) {
  for (const bool peer_memory : kBothTransports) {
    const std::vector<std::string> errors =
        errors_of(peer_memory, [](parallel::DataParallel&, const comm::Mesh& mesh) { mesh.all->barrier(); });
    expect_advice(errors[0], {"for blocks.0 of group dp_shard passed its deadline on rank 0", "rank 1",
                              "in barrier #1 of group all"});
    expect_advice(errors[1],
                  {"barrier #1 of group all", "on rank 1", "rank 0", "for blocks.0 of group dp_shard"});
  }
}

}  // namespace
}  // namespace trireme
