#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/checkpoint/saved.h"
#include "tests/cli/front_process.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/source.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;
using checkpoint::Store;
using checkpoint::testing::Layout;

const Layout kTwo{.replicas = 1, .shards = 2, .stages = 1, .tensor = 1};
const Layout kFour{.replicas = 2, .shards = 1, .stages = 1, .tensor = 2};

/// A folder with a run's checkpoints of steps 10 and 20, written by two ranks and by four.
struct TwoCheckpoints {
  FrontProcess front;
  std::string folder = front.file("checkpoints");
  TwoCheckpoints() {
    Store store(folder);
    checkpoint::testing::save(store, kTwo, 10);
    checkpoint::testing::save(store, kFour, 20);
  }
  std::string step(int64_t number) const { return fmt::format("{}/step-{:08}", folder, number); }
  void damage(const std::string& file) const {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary | std::ios::ate);
    const auto end = stream.tellg();
    stream.seekg(-1, std::ios::end);
    const int last = stream.get();
    stream.seekp(end - std::streamoff(1));
    stream.put(static_cast<char>(last ^ 1));
  }
};

TEST(Ckpt, ListsWhatIsThereAndWhatIsWrongWithIt) {
  const TwoCheckpoints fixture;
  fs::resize_file(fixture.step(10) + "/index.json", 100);
  fs::create_directory(fixture.step(30));
  const auto rows = fixture.front.run({"ckpt", "list", fixture.folder, "--json"}).json()["checkpoints"];
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["state"], "unfinished");
  EXPECT_EQ(rows[1]["state"], "damaged");
  EXPECT_EQ(rows[2]["state"], "complete");
  EXPECT_EQ(rows[2]["step"], 20);
  EXPECT_EQ(rows[2]["files"], 4);
  const Outcome table = fixture.front.run({"ckpt", "list", fixture.folder});
  EXPECT_EQ(table.code, 0);
  EXPECT_TRUE(contains(table.out, "step-00000020")) << table.out;
  EXPECT_TRUE(contains(table.out, "complete, not read")) << table.out;
}

/// What `ckpt verify` says, where it has read; otherwise that it has not.
TEST(Ckpt, ListSaysWhatVerifySaysOrThatItHasNotRead) {
  const TwoCheckpoints fixture;
  fixture.damage(fixture.step(20) + "/shard-00001.safetensors");
  const auto rows = [&](const Words& more) {
    return fixture.front.run(Words{"ckpt", "list", fixture.folder, "--json"} + more).json()["checkpoints"];
  };
  EXPECT_EQ(rows({})[1]["state"], "complete");
  EXPECT_EQ(rows({})[1]["read"], false);
  const auto read = rows({"--verify"});
  EXPECT_EQ(read[0]["state"], "complete");
  EXPECT_EQ(read[0]["read"], true);
  EXPECT_EQ(read[1]["state"], "damaged");
  EXPECT_TRUE(contains(read[1]["problem"].get<std::string>(), "(tensor '")) << read[1];
}

/// Though its files could be read as those of others.
TEST(Ckpt, ACheckpointWhoseIndexIsGoneIsDamagedForEveryVerb) {
  const TwoCheckpoints fixture;
  ASSERT_EQ(fixture.front.run({"ckpt", "convert", fixture.step(10), fixture.front.file("one")}).code, 0);
  const std::string one = fixture.front.file("one/step-00000010");
  fs::remove(one + "/index.json");
  for (const Words& words :
       {Words{"inspect", one}, Words{"verify", one}, Words{"diff", one, fixture.step(20)},
        Words{"convert", one, "out"}, Words{"export-hf", one, "out"}}) {
    const Outcome outcome = fixture.front.run(Words{"ckpt"} + words);
    EXPECT_EQ(outcome.code, 7) << words[0] << outcome.out << outcome.err;
    EXPECT_TRUE(contains(outcome.out + outcome.err, "index.json")) << words[0] << outcome.err;
  }
}

TEST(Ckpt, NamesOfTensorsCannotControlATerminal) {
  const FrontProcess front;
  const std::string json = R"({"a\u001b[2Jb\nc":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const auto file = [&](const char* name, char value) {
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(json.size());
    write_file_atomic(front.file(name), bytes + json + value);
  };
  file("m.safetensors", 'x');
  file("n.safetensors", 'y');
  const Outcome outcome = front.run({"ckpt", "inspect", "m.safetensors"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "a?[2Jb?c")) << outcome.out;
  const Outcome differ = front.run({"ckpt", "diff", "m.safetensors", "n.safetensors"});
  EXPECT_TRUE(contains(differ.out, "a?[2Jb?c")) << differ.out;
  EXPECT_EQ(front.run({"ckpt", "inspect", "m.safetensors", "--json"}).json()["tensors"].size(), 1u);
}

TEST(Ckpt, InspectsTheNewestOfARunThatIsWhole) {
  const TwoCheckpoints fixture;
  fs::remove(fixture.step(20) + "/shard-00003.safetensors");
  const Outcome outcome = fixture.front.run({"ckpt", "inspect", fixture.folder, "--json"});
  EXPECT_TRUE(contains(outcome.err, "skipped step-00000020")) << outcome.err;
  EXPECT_EQ(outcome.json()["step"], 10);
  EXPECT_EQ(outcome.json()["tensors"]["embedding"]["shape"], (std::vector<int64_t>{53, 12}));
  EXPECT_EQ(outcome.json()["state"]["run"]["step"], 10);
  EXPECT_TRUE(contains(fixture.front.run({"ckpt", "inspect", fixture.step(10)}).out, "53 x 12"));
}

TEST(Ckpt, VerifyNamesTheTensorAndExitsWith7) {
  const TwoCheckpoints fixture;
  EXPECT_EQ(fixture.front.run({"ckpt", "verify", fixture.folder}).code, 0);
  fixture.damage(fixture.step(20) + "/shard-00001.safetensors");
  const Outcome outcome = fixture.front.run({"ckpt", "verify", fixture.folder});
  EXPECT_EQ(outcome.code, 7);
  EXPECT_TRUE(contains(outcome.out, "(tensor '")) << outcome.out;
  EXPECT_EQ(fixture.front.run({"ckpt", "verify", fixture.step(10)}).code, 0);
  const auto json = fixture.front.run({"ckpt", "verify", fixture.step(20), "--json"}).json();
  EXPECT_EQ(json["good"], false);
  EXPECT_EQ(json["checkpoints"][0]["problems"].size(), 1u);
}

TEST(Ckpt, OfARunWithoutCheckpointsThereAreFinalWeightsOrNothing) {
  const TwoCheckpoints fixture;
  const auto run = report::RunDirectory::create(fixture.front.file("runs"), "none", {});
  const auto expect_none = [&](const char* verb) {
    const Outcome outcome = fixture.front.run({"ckpt", verb, "none"});
    EXPECT_EQ(outcome.code, 2) << verb << outcome.out << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "has no checkpoints")) << verb << outcome.err;
  };
  expect_none("verify");
  expect_none("inspect");
  fs::create_directory(run.file("checkpoints/final"));
  const std::string weights = run.file("checkpoints/final/model.safetensors");
  ASSERT_EQ(fixture.front.run({"ckpt", "convert", fixture.step(10), weights}).code, 0);
  expect_none("verify");
  const Outcome inspected = fixture.front.run({"ckpt", "inspect", "none", "--json"});
  ASSERT_EQ(inspected.code, 0) << inspected.err;
  EXPECT_TRUE(fs::equivalent(inspected.json()["path"].get<std::string>(), weights));
  EXPECT_EQ(fixture.front.run({"ckpt", "diff", "none", fixture.step(10)}).code, 0);
}

/// Nor a file of the user's that has the name of ours while it is written.
TEST(Ckpt, ConvertFollowsLinksAndReplacesNoPipe) {
  const TwoCheckpoints fixture;
  const auto convert_to = [&](const char* name) {
    return fixture.front.run({"ckpt", "convert", fixture.step(10), name}).code;
  };
  fs::create_directory(fixture.front.file("elsewhere"));
  fs::create_symlink("elsewhere/there.safetensors", fixture.front.file("link.safetensors"));
  std::ofstream(fixture.front.file("elsewhere/there.safetensors.tmp")) << "mine";
  EXPECT_EQ(convert_to("link.safetensors"), 0);
  EXPECT_TRUE(fs::is_symlink(fixture.front.file("link.safetensors")));
  EXPECT_EQ(read_file(fixture.front.file("elsewhere/there.safetensors.tmp")), "mine");
  EXPECT_EQ(checkpoint::open_source(fixture.front.file("elsewhere/there.safetensors"))->tensors().size(),
            checkpoint::open_source(fixture.step(10))->tensors().size());
  ASSERT_EQ(::mkfifo(fixture.front.file("pipe.safetensors").c_str(), 0600), 0);
  EXPECT_EQ(convert_to("pipe.safetensors"), 2);
  EXPECT_TRUE(fs::is_fifo(fixture.front.file("pipe.safetensors")));
}

TEST(Ckpt, ConvertReplacesNothingUnaskedAndTakesAnyName) {
  const TwoCheckpoints fixture;
  const auto convert = [&](const std::string& name, const Words& more) {
    return fixture.front.run(Words{"ckpt", "convert", fixture.step(10), name} + more);
  };
  const std::string file = "gr\u00fc\u00dfe und mehr.safetensors", folder = "f\u00fcr dcp";
  for (const auto& [name, words] : {std::pair(file, Words{}), std::pair(folder, Words{"--to=dcp"})}) {
    ASSERT_EQ(convert(name, words).code, 0) << name;
    const auto tensors = checkpoint::open_source(fixture.front.file(name))->tensors().size();
    EXPECT_EQ(tensors, checkpoint::open_source(fixture.step(10))->tensors().size());
    const Outcome again = convert(name, words);
    EXPECT_EQ(again.code, 3) << again.err;
    EXPECT_TRUE(contains(again.err, "exists already; choose another ")) << again.err;
    EXPECT_TRUE(contains(again.err, "or replace it with --force")) << again.err;
    EXPECT_EQ(convert(name, words + Words{"--force"}).code, 0);
  }
  write_file_atomic(fixture.front.file("mine.safetensors"), "mine");
  EXPECT_EQ(convert("mine.safetensors", {}).code, 3);
  EXPECT_EQ(read_file(fixture.front.file("mine.safetensors")), "mine");
}

TEST(Ckpt, DiffComparesWhateverTheLayoutAndExitsWith8) {
  const TwoCheckpoints fixture;
  const Outcome equal = fixture.front.run({"ckpt", "diff", fixture.step(10), fixture.step(20)});
  EXPECT_EQ(equal.code, 0) << equal.out << equal.err;
  EXPECT_TRUE(contains(equal.out, "equal")) << equal.out;

  const std::string file = fixture.front.file("weights.safetensors");
  EXPECT_EQ(fixture.front.run({"ckpt", "convert", fixture.step(20), file, "--weights-only"}).code, 0);
  const Outcome fewer = fixture.front.run({"ckpt", "diff", fixture.step(10), file, "--json"});
  EXPECT_EQ(fewer.code, 8);
  const auto differences = fewer.json()["differences"];
  EXPECT_EQ(differences.size(), 18u);  // two moments of nine parameters
  for (const auto& row : differences) EXPECT_EQ(row["what"], "only in the first");

  const std::string copy = fixture.front.file("copy.safetensors");
  EXPECT_EQ(fixture.front.run({"ckpt", "convert", fixture.step(20), copy}).code, 0);
  fixture.damage(copy);
  const Outcome one = fixture.front.run({"ckpt", "diff", copy, fixture.step(20), "--json"});
  EXPECT_EQ(one.code, 8);
  ASSERT_EQ(one.json()["differences"].size(), 1u);
  EXPECT_EQ(one.json()["differences"][0]["elements"], 1);
}

/// A run must not go on from weights as if their optimizer had never made a step.
TEST(Ckpt, WeightsAloneAreNoStateOfARun) {
  const TwoCheckpoints fixture;
  EXPECT_EQ(
      fixture.front.run({"ckpt", "convert", fixture.step(10), fixture.front.file("thin"), "--weights-only"})
          .code,
      0);
  const checkpoint::Checkpoint thin(fixture.front.file("thin/step-00000010"));
  EXPECT_FALSE(thin.index().metadata.contains("trireme.state"));
  EXPECT_EQ(thin.state().find("\"step\""), std::string::npos) << thin.state();
}

TEST(Ckpt, ConvertsToAnyNumberOfFilesAndBack) {
  const TwoCheckpoints fixture;
  const Outcome outcome =
      fixture.front.run({"ckpt", "convert", fixture.step(10), fixture.front.file("other"), "--files", "3"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, fixture.front.file("other/step-00000010\n"));
  const checkpoint::Checkpoint converted(fixture.front.file("other/step-00000010"));
  EXPECT_EQ(converted.index().files.size(), 3u);
  for (int64_t rank = 0; rank < kFour.ranks(); ++rank)
    EXPECT_EQ(checkpoint::testing::read_error(converted, kFour, rank), "");
  EXPECT_EQ(converted.state(), "{\n \"run\": {\n  \"step\": 10\n },\n \"ranks\": {}\n}\n");
  EXPECT_EQ(fixture.front.run({"ckpt", "convert", fixture.step(10), "a.safetensors", "--files", "3"}).code,
            2);
  EXPECT_EQ(fixture.front.run({"ckpt", "convert", fixture.step(10), "other", "--files", "0"}).code, 2);
}

TEST(Ckpt, PruneKeepsTheNewestAndRefusesWhileARunWrites) {
  const TwoCheckpoints fixture;
  {
    const Store running(fixture.folder);
    const Outcome refused = fixture.front.run({"ckpt", "prune", fixture.folder, "--keep", "1"});
    EXPECT_EQ(refused.code, 3);
    EXPECT_TRUE(contains(refused.err, "another run")) << refused.err;
  }
  EXPECT_EQ(fixture.front.run({"ckpt", "prune", fixture.folder, "--keep", "0"}).code, 2);
  const Outcome pruned = fixture.front.run({"ckpt", "prune", fixture.folder, "--keep", "1", "--json"});
  EXPECT_EQ(pruned.json()["removed"], std::vector<std::string>{"step-00000010"});
  EXPECT_TRUE(fs::exists(fixture.step(20)));
}

TEST(Ckpt, PruneRemovesNothingIntactInFavourOfWhatIsDamaged) {
  const TwoCheckpoints fixture;
  fixture.damage(fixture.step(20) + "/shard-00001.safetensors");
  const Outcome outcome = fixture.front.run({"ckpt", "prune", fixture.folder, "--keep", "1"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "step-00000020 does not count as kept")) << outcome.err;
  EXPECT_TRUE(fs::exists(fixture.step(10)));
  EXPECT_EQ(fixture.front.run({"ckpt", "verify", fixture.step(10)}).code, 0);
}

/// What makes a run one to go on with, or one without final weights, is a checkpoint.
TEST(Ckpt, PruneLeavesARunWithoutCheckpointsAsItIs) {
  const TwoCheckpoints fixture;
  const auto run = report::RunDirectory::create(fixture.front.file("runs"), "none", {});
  const std::string weights = run.file("checkpoints/final/model.safetensors");
  fs::create_directory(run.file("checkpoints/final"));
  ASSERT_EQ(fixture.front.run({"ckpt", "convert", fixture.step(10), weights}).code, 0);
  for (const std::string& word : {std::string("none"), std::string("latest"), run.path()}) {
    const Outcome outcome = fixture.front.run({"ckpt", "prune", word, "--keep", "1"});
    EXPECT_EQ(outcome.code, 2) << word << outcome.out << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "has no checkpoints")) << outcome.err;
  }
  const auto entries = fs::directory_iterator(run.file("checkpoints"));
  EXPECT_EQ(std::distance(entries, {}), 1) << "final alone";
}

TEST(Ckpt, PruneBeginsNoGeneration) {
  const TwoCheckpoints fixture;
  const std::string before = read_file(fixture.folder + "/GENERATION");
  EXPECT_EQ(fixture.front.run({"ckpt", "prune", fixture.folder, "--keep", "1"}).code, 0);
  EXPECT_EQ(read_file(fixture.folder + "/GENERATION"), before);
}

TEST(Ckpt, LatestIsTheNewestRunThatHasWhatIsAskedFor) {
  const TwoCheckpoints fixture;
  const auto good = report::RunDirectory::create(fixture.front.file("runs"), "good", {});
  fs::copy(fixture.folder, good.file("checkpoints"), fs::copy_options::recursive);
  const auto failed = report::RunDirectory::create(fixture.front.file("runs"), "failed", {});
  failed.finish(6);
  const auto empty = report::RunDirectory::create(fixture.front.file("runs"), "empty", {});
  empty.finish(0);
  for (const Words& words : {Words{"list", "latest"}, Words{"verify", "latest"}, Words{"inspect", "latest"},
                             Words{"prune", "latest", "--keep", "1"}}) {
    const Outcome outcome = fixture.front.run(Words{"ckpt"} + words + Words{"--json"});
    EXPECT_EQ(outcome.code, 0) << words[0] << outcome.err;
    EXPECT_TRUE(contains(outcome.out, good.path())) << words[0] << outcome.out;
    for (const std::string& part :
         {failed.path() + " has no checkpoints", empty.path() + " has no checkpoints",
          std::string("it ended with code 6"), "using " + good.path()})
      EXPECT_TRUE(contains(outcome.err, part)) << words[0] << " " << part << " in: " << outcome.err;
  }
  EXPECT_FALSE(fs::exists(good.file("checkpoints/step-00000010")));
  EXPECT_TRUE(fs::exists(good.file("checkpoints/step-00000020")));
}

TEST(Ckpt, ForceReplacesNoFolderThatIsNoExport) {
  const TwoCheckpoints fixture;
  const std::string notes = fixture.front.file("notes");
  fs::create_directory(notes);
  const auto convert = [&] {
    return fixture.front.run({"ckpt", "convert", fixture.step(10), notes, "--to=dcp", "--force"});
  };
  write_file_atomic(notes + "/thesis.txt", "mine");
  const Outcome refused = convert();
  EXPECT_EQ(refused.code, 3) << refused.err;
  EXPECT_TRUE(contains(refused.err, "nor an earlier export")) << refused.err;
  EXPECT_EQ(read_file(notes + "/thesis.txt"), "mine");
  fs::remove(notes + "/thesis.txt");
  EXPECT_EQ(convert().code, 0) << "an empty one";
}

TEST(Ckpt, SaysWhatIsNotThere) {
  const TwoCheckpoints fixture;
  EXPECT_EQ(fixture.front.run({"ckpt", "list", "nowhere"}).code, 2);
  EXPECT_EQ(fixture.front.run({"ckpt", "inspect", "nowhere"}).code, 2);
  EXPECT_EQ(fixture.front.run({"ckpt"}).code, 2);
  EXPECT_EQ(fixture.front.run({"ckpt", "diff", fixture.step(10)}).code, 2);
}

}  // namespace
}  // namespace trireme::cli
