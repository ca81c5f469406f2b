// The command line itself: help, versions, typing errors.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/build_info.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/cli/request.h"

namespace trireme::cli {
namespace {

const std::vector<std::string> kVerbs = {"train",  "generate", "eval",    "doctor", "plan",  "presets",
                                         "config", "version",  "bench",   "ckpt",   "data",  "launch",
                                         "lab",    "pipeline", "report",  "sweep",  "serve", "ps",
                                         "top",    "worker",   "find-lr", "replay"};

/// Every way to ask for help: the command, its verbs, and their subcommands.
std::vector<std::vector<std::string>> all_commands() {
  std::vector<std::vector<std::string>> commands = {{},
                                                    {"plan", "policy"},
                                                    {"plan", "step"},
                                                    {"plan", "time"},
                                                    {"plan", "mesh"},
                                                    {"plan", "placements"},
                                                    {"plan", "signals"},
                                                    {"bench", "speed"},
                                                    {"bench", "memory"},
                                                    {"bench", "pipeline"},
                                                    {"bench", "list-targets"},
                                                    {"bench", "run"},
                                                    {"bench", "compare"},
                                                    {"bench", "expectations"},
                                                    {"bench", "export"},
                                                    {"data", "inspect"},
                                                    {"data", "train-tokenizer"},
                                                    {"lab"},
                                                    {"config", "show"},
                                                    {"config", "schema"},
                                                    {"config", "keys"}};
  for (const std::string& verb : kVerbs) commands.push_back({verb});
  return commands;
}

std::vector<std::string> with(std::vector<std::string> words, const std::string& word) {
  words.push_back(word);
  return words;
}

TEST(Help, ListsEveryVerbOnALineAndTwoExamples) {
  const Outcome help = FrontProcess().run({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(help.err, "");
  const auto lines = split(help.out, '\n');
  for (const std::string& verb : kVerbs) {
    const auto starts = [&](const std::string& line) { return line.starts_with("  " + verb + " "); };
    EXPECT_EQ(std::ranges::count_if(lines, starts), 1) << verb;
  }
  EXPECT_TRUE(contains(help.out, "\n  trireme train ")) << help.out;
  EXPECT_TRUE(contains(help.out, "\n  trireme generate ")) << help.out;
}

TEST(Help, IsGivenByEveryVerbOnStdout) {
  const FrontProcess front;
  for (const auto& command : all_commands()) {
    for (const char* flag : {"--help", "-h"}) {
      const Outcome help = front.run(with(command, flag));
      EXPECT_EQ(help.code, 0) << join(command, " ");
      EXPECT_EQ(help.err, "") << join(command, " ");
      EXPECT_TRUE(contains(help.out, "Usage: trireme")) << join(command, " ") << help.out;
    }
  }
}

/// Processor time of the children that have been waited for.
double seconds_of_children() {
  rusage used = {};
  ::getrusage(RUSAGE_CHILDREN, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// The front command must feel instant: no verb loads torch or a driver before it knows that it must.
// Processor time is what it takes on a machine with nothing else to do.
TEST(Help, TakesFiftyMilliseconds) {
#ifdef TRIREME_SANITIZED
  GTEST_SKIP() << "instrumented code is slower";
#endif
  const FrontProcess front;
  for (const auto& command : all_commands()) {
    double least = 1.0;
    for (int i = 0; i < 5; ++i) {
      const double before = seconds_of_children();
      front.run(with(command, "--help"));
      least = std::min(least, seconds_of_children() - before);
    }
    EXPECT_LT(least, 0.050) << join(command, " ");
  }
}

TEST(Version, IsTheSameInBothForms) {
  const FrontProcess front;
  const Outcome flag = front.run({"--version"});
  const Outcome verb = front.run({"version"});
  EXPECT_EQ(flag.code, 0);
  EXPECT_EQ(flag.out, verb.out);
  EXPECT_TRUE(verb.out.starts_with(fmt::format("trireme {} (", kVersion))) << verb.out;
  const auto json = front.run({"version", "--json"}).json();
  EXPECT_EQ(json["version"], kVersion);
  EXPECT_EQ(json["torch"], kTorchVersion);
  EXPECT_EQ(json["cuda"], kHasCuda);
}

struct Mistake {
  std::vector<std::string> words;
  std::string said;  ///< on stderr
  std::string hint;  ///< on stderr
};

TEST(Usage, MistakesExitWithTwoAndSayWhatIsNear) {
  const FrontProcess front;
  const Mistake mistakes[] = {
      {{}, "no command given", "trireme --help"},
      {{"trian"}, "'trian' is not a command", "did you mean 'train'?"},
      {{"xyzzy"}, "'xyzzy' is not a command", "trireme --help"},
      {{"--versoin"}, "unknown option '--versoin'", "did you mean '--version'?"},
      {{"train", "--dry-rum"}, "unknown option '--dry-rum'", "did you mean '--dry-run'?"},
      {{"train", "--run-dri=x"}, "unknown option '--run-dri'", "did you mean '--run-dir'?"},
      {{"train", "--steps", "5"}, "unknown option '--steps'", "did you mean '--train.steps'?"},
      {{"train", "--lr=1e-3"}, "unknown option '--lr'", "did you mean '--optim.lr'?"},
      {{"train", "--step=5"}, "unknown option '--step'", "did you mean '--train.steps'?"},
      {{"train", "--grad-clip=1"}, "unknown option '--grad-clip'", "did you mean '--train.grad_clip'?"},
      {{"train", "--batch-size=8"},
       "unknown option '--batch-size'",
       "did you mean '--train.global_batch' or '--train.micro_batch'?"},
      {{"train", "--learning-rate=1"}, "unknown option '--learning-rate'", "did you mean '--optim.lr'?"},
      {{"bench", "speed", "--lr=1e-3"}, "unknown option '--lr'", "did you mean '--optim.lr'?"},
      {{"config", "show", "--lr=1e-3"}, "unknown option '--lr'", "did you mean '--optim.lr'?"},
      {{"train", "--sead=3"}, "unknown option '--sead'", "did you mean '--seed'?"},
      {{"train", "a.yaml", "b.yaml"}, "unexpected argument 'b.yaml'", "trireme train --help"},
      {{"train", "-n", "two"}, "[cli] --ranks: 'two' is not a whole number", "trireme train --help"},
      {{"train", "--train.steps"}, "--train.steps has no value", "--train.steps=VALUE"},
      {{"train", "--train.steps", "--dry-run"}, "--train.steps has no value", "--train.steps=VALUE"},
      {{"generate"}, "RUN", "trireme generate --help"},
      {{"eval"}, "RUN", "trireme eval --help"},
      {{"config", "shwo"}, "'shwo'", "did you mean 'show'?"},
      {{"config"}, "subcommand", "trireme config --help"},
      {{"config", "keys", "--train.steps=3"}, "unknown option '--train.steps'", "trireme config keys --help"},
      {{"presets", "--jsno"}, "unknown option '--jsno'", "did you mean '--json'?"},
      {{"train", "--max-restarts", "-1"}, "-1 not in range ", "trireme train --help"},
      {{"bench", "speed", "--micro-batch-sizes", "4,0"}, "0 not in range ", "bench speed --help"},
      {{"data", "make", "digits", "--seed", "-2"}, "-2 not in range ", "data make digits --help"},
  };
  for (const Mistake& mistake : mistakes) {
    const Outcome outcome = front.run(mistake.words);
    EXPECT_EQ(outcome.code, 2) << join(mistake.words, " ");
    EXPECT_EQ(outcome.out, "") << join(mistake.words, " ");
    EXPECT_TRUE(outcome.err.starts_with("error: ")) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, mistake.said)) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "\nhint: ")) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, mistake.hint)) << outcome.err;
  }
}

TEST(Usage, NamesOfOtherTrainersLeadToOursOrNowhere) {
  const FrontProcess front;
  const std::pair<const char*, const char*> hints[] = {
      {"--epochs", "did you mean '--train.epochs'? "},
      {"--gpus", "did you mean '--ranks'? "},
      {"--grad-accum", "did you mean '--train.micro_batch'? "},
      {"--grad_accum_steps", "did you mean '--train.micro_batch'? "},
      {"--fsdp", "did you mean '--parallel.policy'? "},
      {"--n-stages", "did you mean '--parallel.pp'? "},
      {"--save-every", "did you mean '--checkpoint.every'? "},
      {"--eval-interval", "did you mean '--train.val_every'? "},
      {"--n_embd", "did you mean '--model.d_model'? "},
      {"--output-dir", "did you mean '--run-dir'? "},
      {"--wandb", ""},
      {"--mode", ""},
  };
  for (const auto& [option, hint] : hints) {
    const Outcome outcome = front.run({"train", std::string(option) + "=4"});
    EXPECT_EQ(outcome.code, 2) << option;
    EXPECT_TRUE(contains(outcome.err, std::string("\nhint: ") + hint + "see 'trireme train --help'"))
        << option << ": " << outcome.err;
  }
  const Outcome sizes = front.run({"bench", "speed", "--micro-batches", "4"});
  EXPECT_TRUE(contains(sizes.err, "did you mean '--micro-batch-sizes'?")) << sizes.err;
}

TEST(Help, IsAVerbAsWell) {
  const FrontProcess front;
  EXPECT_EQ(front.run({"help"}).out, front.run({"--help"}).out);
  for (const Words& verb : {Words{"train"}, Words{"bench", "speed"}, Words{"ckpt"}}) {
    const Outcome help = front.run(Words{"help"} + verb);
    EXPECT_EQ(help.code, 0) << help.err;
    EXPECT_EQ(help.out, front.run(verb + Words{"--help"}).out);
  }
  const Outcome none = front.run({"help", "trian"});
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(contains(none.err, "did you mean 'train'?")) << none.err;
}

/// A key that has no effect would make a user believe that it had one.
TEST(Usage, KeysThatAVerbDoesNotReadAreRefused) {
  FrontProcess front;
  front.set_worker("touch started");
  const Mistake mistakes[] = {
      {{"lab", "pipeline_1f1b", "--precision.compute=bf16"},
       "'trireme lab' does not read precision.compute",
       "device, seed, comm.timeout_s, comm.peer_memory, comm.gather"},
      {{"lab", "pipeline_1f1b", "--model.preset", "gpt-tiny"}, "does not read model.preset", "device, seed"},
      {{"lab", "pipeline_1f1b", "--train.steps=3"}, "does not read train.steps", "device, seed"},
      {{"bench", "pipeline", "--optim.lr=7"}, "does not read optim.lr", "model.*"},
      {{"bench", "pipeline", "--training.learning_rate=7"},
       "does not read training.learning_rate",
       "model.*"},
      {{"bench", "pipeline", "--model.weights=x"}, "does not read model.weights", "model.*"},
      {{"bench", "pipeline", "--lr=7"}, "unknown option '--lr'", "trireme bench pipeline --help"},
      {{"bench", "comm", "--model.n_layers=0"},
       "unknown option '--model.n_layers'",
       "'trireme bench comm' takes no config keys"},
      {{"data", "inspect", "docs", "--train.steps=3"},
       "'trireme data inspect' does not read train.steps",
       "data.tokenizer, data.seq_len"},
      {{"bench", "images", "--train.steps=3"},
       "unknown option '--train.steps'",
       "'trireme bench images' takes no config keys"},
      {{"pipeline", "show", "1f1b", "--train.steps=3"},
       "unknown option '--train.steps'",
       "'trireme pipeline show' takes no config keys"},
      {{"report", "g", "--seed=3"}, "unknown option '--seed'", "'trireme report' takes no config keys"},
  };
  for (const Mistake& mistake : mistakes) {
    const Outcome outcome = front.run(mistake.words);
    EXPECT_EQ(outcome.code, 2) << join(mistake.words, " ") << outcome.out;
    EXPECT_TRUE(contains(outcome.err, mistake.said)) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, mistake.hint)) << outcome.err;
    EXPECT_FALSE(contains(outcome.err, "did you mean")) << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
  for (const Words& words : {Words{"lab", "pipeline_1f1b", "--device=cpu", "--seed=3", "--comm.timeout_s=9"},
                             Words{"bench", "pipeline", "-n", "2", "--device=cpu", "--precision.compute=fp32",
                                   "--parallel.policy=zero1", "--pipeline.spread_head=true"}})
    EXPECT_EQ(front.run(words).code, 0) << join(words, " ");
}

/// A script's variable that is not set must not delete the newest run's checkpoints.
TEST(Usage, EmptyWordsAreRefused) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("c.yaml"), "seed: 7\n");
  for (const Words& words :
       {Words{"ckpt", "prune", "", "--keep", "1"}, Words{"ckpt", "list", ""}, Words{"ckpt", "inspect", ""},
        Words{"ckpt", "verify", ""}, Words{"ckpt", "export-hf", "", "out"}, Words{"ckpt", "diff", "a", ""},
        Words{"generate", ""}, Words{"report", ""}, Words{"train", ""}, Words{"train", "--run-dir", ""},
        Words{"train", "--run-dir=", "c.yaml"}, Words{"config", "show", ""},
        Words{"config", "show", "--config="}, Words{"plan", "step", "--check", ""},
        Words{"data", "make", "digits", "--out", ""}, Words{"data", "make", "digits", "--out="}}) {
    const Outcome outcome = front.run(words);
    EXPECT_EQ(outcome.code, 2) << join(words, " ") << outcome.out;
    EXPECT_TRUE(contains(outcome.err, " has an empty value\n")) << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

/// What they may be knows who makes them.
TEST(DataMake, NumbersThatAreGivenAreThoseThatAreAskedFor) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const auto asked = [&](const Words& more) {
    EXPECT_EQ(front.run(Words{"data", "make", "digits"} + more).code, 0);
    return request_from_json(read_file(front.file("request-none"))).data.train;
  };
  EXPECT_EQ(asked({}), 50000);
  EXPECT_EQ(asked({"--format=mnist"}), 60000);
  for (const int64_t count : {0, -5, 70}) EXPECT_EQ(asked({"--train", std::to_string(count)}), count);
}

/// Training goes on without a place for its lines, and the run is whole.
TEST(Streams, LinesOfTrainingThatStdoutDidNotTakeEndWithThree) {
  FrontProcess front;
  front.set_worker("echo a line\nsleep 0.1\necho another");
  const std::string line = "cd " + front.file("") +
                           " && PATH=/usr/bin:/bin ./bin/trireme train -n 1 --device=cpu --quiet > /dev/full "
                           "2> said";
  EXPECT_EQ(WEXITSTATUS(std::system(line.c_str())), 3);
  const std::string said = read_file(front.file("said"));
  const size_t warning = said.find("cannot write to standard output");
  EXPECT_NE(warning, std::string::npos) << said;
  EXPECT_EQ(said.find("cannot write to", warning + 1), std::string::npos) << said;
  EXPECT_EQ(front.manifest()["exit_code"], 0);
}

/// The exit code of a line of shell in which $T is the command.
int code_of(const std::string& line) {
  return WEXITSTATUS(std::system(("T=" TRIREME_FRONT "; " + line).c_str()));
}

TEST(Streams, ResultsThatStdoutDidNotTakeEndWithThree) {
  const TemporaryFolder folder;
  const std::string said = folder.file("said");
  for (const char* words : {"--help", "version", "presets", "config show", "config schema", "plan step",
                            "train --dry-run -n 1", "version >&-;exit $?"}) {
    EXPECT_EQ(code_of(fmt::format("exec 2>{} >/dev/full; $T {}", said, words)), 3) << words;
    const std::string text = read_file(said);
    EXPECT_TRUE(contains(text, "error: [base.streams] could not write all results to standard output"))
        << text;
    EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  }
}

TEST(Streams, AReaderThatHasLeftIsNoError) {
  const TemporaryFolder folder;
  const std::string said = folder.file("said");
  code_of(fmt::format("(trap '' PIPE; sleep 0.2; $T config schema 2>{0}; echo $? >>{0}) | true", said));
  EXPECT_EQ(read_file(said), "0\n");
}

TEST(Streams, ErrorsKeepTheirExitCodeWhereStderrTakesNothing) {
  EXPECT_EQ(code_of("$T train no_such.yaml 2>/dev/full"), 2);
  EXPECT_EQ(code_of("$T train no_such.yaml 2>&-"), 2);
  EXPECT_EQ(code_of("$T trian 2>/dev/full"), 2);
}

}  // namespace
}  // namespace trireme::cli
