// What the command and its real worker say when something is wrong or hardly meant, and with which exit code
// they end.
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/cli/request.h"

namespace trireme::cli {
namespace {

/// Lines of stderr without those that say what runs.
Words surprises(const Outcome& outcome) {
  Words lines;
  for (const std::string& line : split(outcome.err, '\n')) {
    const std::string text = line.size() > 9 && line[2] == ':' ? line.substr(9) : line;
    const bool usual = text.starts_with("model ") || text.starts_with("data ") ||
                       text.starts_with("layout ") || text.starts_with("run ") || text.empty();
    if (!usual) lines.push_back(text);
  }
  return lines;
}

TEST_F(Worker, OneClearLineForWhatAUserHardlyMeant) {
  std::ofstream(front_.file("small.txt")) << std::string(700, 'a');
  const struct {
    Words more;
    const char* says;
  } cases[] = {
      {{"--model.vocab_size=50257"}, "note    byte tokens use 256 of model.vocab_size=50,257 rows"},
      {{"--data.path=small.txt"},
       "warning: validation is off: data.val_fraction=0.02 of 700 tokens holds out"},
  };
  for (const auto& one : cases) {
    const Outcome outcome = front_.run(kTiny + Words{"-n", "1", "--train.steps=1"} + one.more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const Words lines = surprises(outcome);
    ASSERT_EQ(lines.size(), 1u) << outcome.err;
    EXPECT_TRUE(lines[0].starts_with(one.says)) << lines[0];
  }
  const Outcome profiled = front_.run(kTiny + Words{"-n", "1", "--train.steps=3", "--profile=1"});
  EXPECT_EQ(profiled.code, 0) << profiled.err;
  const Words lines = surprises(profiled);
  ASSERT_EQ(lines.size(), 2u) << profiled.err;
  EXPECT_TRUE(contains(lines[0], "without a GPU traces CPU operators")) << lines[0];
  EXPECT_TRUE(contains(lines[1], "traces/rank-0.json")) << lines[1];
}

/// Ranks that find their text gone say so once, with the code of a config error.
TEST_F(Worker, TextThatVanishesIsOneMessageFromOneRank) {
  front_.set_worker("rm -f text.txt\nexec " TRIREME_WORKER " \"$@\"");
  const Outcome outcome = front_.run(kTiny + Words{"-n", "2", "--train.steps=2"});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  const Words lines = surprises(outcome);
  ASSERT_EQ(lines.size(), 1u) << outcome.err;
  EXPECT_TRUE(lines[0].starts_with("error: [data.source] cannot read ")) << lines[0];
}

TEST_F(Worker, ExitCodesSayWhatWentWrong) {
  const struct {
    Words more;
    int code;
    const char* says;
  } cases[] = {
      {{"--parallel.bucket_mib=1"}, 2, "parallel.bucket_mib=1"},
      {{"--train.global_batch=5"}, 2, "cannot be split"},
      {{"--optim.lr=1e30", "--train.grad_clip=0"}, 6, "the gradient of transformer."},
      {{"--data.path=nowhere.txt"}, 2, "nowhere.txt"},
      {{"--model.n_layers=10000", "--model.d_model=100000", "--model.n_heads=10"},
       4,
       "memory.recompute=cheap"},
  };
  for (const auto& one : cases) {
    const Outcome outcome = front_.run(kTiny + Words{"-n", "2", "--train.steps=20"} + one.more);
    EXPECT_EQ(outcome.code, one.code) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, one.says)) << one.says << " in:\n" << outcome.err;
  }
}

/// A model of 6 GiB that fits this host, but not what the process may use.
TEST_F(Worker, OutOfHostMemoryIsExitCode4WithAdvice) {
  front_.limit_memory(int64_t{2} << 30);
  const Outcome outcome = front_.run(kTiny + Words{"-n", "1", "--train.steps=1", "--model.d_model=1024",
                                                   "--model.n_layers=32", "--model.n_heads=16"});
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "the host is out of memory")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "Try these in order, and combine them if needed: ")) << outcome.err;
}

TEST_F(Worker, OutOfHostMemoryOfTwoRanksIsOneMessage) {
  front_.limit_memory(int64_t{2} << 30);
  const Outcome outcome =
      front_.run(kTiny + Words{"-n", "2", "--train.steps=2", "--model.n_layers=24", "--model.d_model=768",
                               "--model.n_heads=8", "--parallel.policy=ddp"});
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "the host is out of memory")) << outcome.err;
  EXPECT_FALSE(contains(outcome.err, "lost a peer")) << outcome.err;
}

TEST_F(Worker, ResultsThatStdoutDidNotTakeAreAnError) {
  Request probe;
  probe.verb = "probe";
  const std::string line = fmt::format("TRIREME_REQUEST='{}' {} >/dev/full 2>{}", to_json(probe),
                                       TRIREME_WORKER, front_.file("said"));
  EXPECT_EQ(WEXITSTATUS(std::system(line.c_str())), 3);
  EXPECT_TRUE(contains(read_file(front_.file("said")), "[base.streams]")) << read_file(front_.file("said"));
}

}  // namespace
}  // namespace trireme::cli
