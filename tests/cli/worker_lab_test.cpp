// `bench run` with its real worker, where a result must be refused; docs/guide/benchmarks.md has those that
// hold.
#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

const Words kTinyLab = {"--device=cpu",
                        "--data.path=text.txt",
                        "--model.n_layers=2",
                        "--model.d_model=32",
                        "--model.n_heads=2",
                        "--model.n_kv_heads=1",
                        "--model.d_ff=64",
                        "--data.seq_len=32",
                        "--train.global_batch=4",
                        "--replicates",
                        "1",
                        "--iterations",
                        "8",
                        "--warmup",
                        "2",
                        "--out",
                        "out"};

/// The hook leaves out nearly all of the gradients: the runs are real, and so is the difference.
TEST_F(Worker, BenchRunBlocksALossyHookThatIsSaidToChangeNothing) {
  write_file_atomic(front_.file("mine.yaml"), "optim: {lr: 0.01}\nparallel: {policy: ddp, hook_start: 1}\n");
  const Outcome outcome =
      front_.run(Words{"bench", "run", "--config", "mine.yaml", "--arms", "parallel.comm_hook=none,topk",
                       "-n", "2", "--model.family=llama", "--parallel.hook_density=0.000001"} +
                 kTinyLab);
  EXPECT_EQ(outcome.code, 8) << outcome.err << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "is blocked: 'each arm gave what it owes' does not hold")) << outcome.out;
}

}  // namespace
}  // namespace trireme::cli
