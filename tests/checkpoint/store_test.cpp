#include "trireme/checkpoint/store.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/checkpoint/saved.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/source.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::checkpoint::testing {
namespace {

using Names = std::vector<std::string>;
const Layout kFour{.replicas = 2, .shards = 2, .stages = 1, .tensor = 1};

TEST(Store, SavesWhatIsReadBack) {
  const Scratch scratch;
  Store store(scratch.path("run/checkpoints"));
  EXPECT_EQ(store.generation(), 1);
  EXPECT_EQ(save(store, kFour, 100), "step-00000100");
  EXPECT_EQ(Folder(store.folder().path_of("step-00000100")).names(),
            (Names{"COMMIT.json", "index.json", "shard-00000.safetensors", "shard-00001.safetensors",
                   "shard-00002.safetensors", "shard-00003.safetensors", "state.json"}));
  const Newest newest = newest_checkpoint(store.folder());
  EXPECT_TRUE(newest.passed_over.empty());
  const Checkpoint& checkpoint = *newest.checkpoint;
  EXPECT_EQ(checkpoint.commit().step, 100);
  EXPECT_EQ(checkpoint.index().metadata, (std::map<std::string, std::string>{{"tied", "embedding"}}));
  for (int64_t rank = 0; rank < kFour.ranks(); ++rank) EXPECT_EQ(read_error(checkpoint, kFour, rank), "");
  const auto state = nlohmann::json::parse(checkpoint.state());
  EXPECT_EQ(state["run"]["step"], 100);
  EXPECT_EQ(state["ranks"]["3"]["random"], "33");
  EXPECT_TRUE(checkpoint.verify().empty());
}

TEST(Store, CommitsNothingThatNobodyCouldRead) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  const std::string temporary = temporary_name(1, store.generation(), 1);
  const Folder folder = store.begin(temporary);
  for (int64_t rank = 0; rank < kFour.ranks(); ++rank) write_rank(folder, kFour, rank, 1, store.generation());
  const std::string state = fmt::format(R"({{"long":"{}"}})", std::string(kMaxJsonBytes, 'x'));
  const std::string message = message_of<EnvironmentError>(
      [&] { store.commit({.temporary = temporary, .step = 1, .ranks = kFour.ranks(), .state = state}); });
  EXPECT_NE(message.find("state.json would have"), std::string::npos) << message;
  EXPECT_FALSE(store.folder().has("step-00000001"));
}

/// Each report of a rank is short enough, and all of them together are not.
TEST(Store, CommitsNoIndexThatNobodyCouldRead) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  const std::string temporary = temporary_name(1, store.generation(), 1);
  const Folder folder = store.begin(temporary);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const ShardSpec spec{.rank = rank,
                         .step = 1,
                         .generation = store.generation(),
                         .pieces = {},
                         .metadata = {{std::to_string(rank), std::string(kMaxJsonBytes / 2, 'x')}},
                         .state = {}};
    write_shard(folder, spec, [](size_t) { return nullptr; });
  }
  const std::string message = message_of<EnvironmentError>(
      [&] { store.commit({.temporary = temporary, .step = 1, .ranks = 2, .state = "{}"}); });
  EXPECT_NE(message.find("index.json would have"), std::string::npos) << message;
  EXPECT_FALSE(store.folder().has("step-00000001"));
}

TEST(Store, RefusesASecondWriter) {
  const Scratch scratch;
  auto first = std::make_unique<Store>(scratch.path("checkpoints"));
  const std::string message = message_of<EnvironmentError>([&] { Store(scratch.path("checkpoints")); });
  EXPECT_NE(message.find(std::to_string(::getpid())), std::string::npos) << message;
  first.reset();
  EXPECT_EQ(Store(scratch.path("checkpoints")).generation(), 2);
}

TEST(Store, SweepsWhatADeadRunLeftAndTouchesNothingElse) {
  const Scratch scratch;
  scratch.write("checkpoints/tmp-00000007-g1-a1/shard-00000.safetensors", "half");
  scratch.write("checkpoints/final/model.safetensors", "weights");
  scratch.write("checkpoints/step-00000003/index.json", "no commit");
  const Store store(scratch.path("checkpoints"));
  EXPECT_EQ(store.folder().names(), (Names{"GENERATION", "LOCK", "final", "step-00000003"}));
}

TEST(Store, ASaveThatDidNotEndIsPassedOverAndIsNoDamage) {
  const Scratch scratch;
  scratch.write("checkpoints/step-00000003/index.json", "no commit");
  const Newest nothing = newest_checkpoint(Folder(scratch.path("checkpoints")));
  EXPECT_EQ(nothing.checkpoint, nullptr);
  EXPECT_EQ(nothing.passed_over.size(), 1u);
  EXPECT_EQ(nothing.damaged, 0);
  EXPECT_EQ(list_checkpoints(Folder(scratch.path("checkpoints"))).at(0).step, 3);
  scratch.write("checkpoints/step-00000004/COMMIT.json", "not a commit");
  EXPECT_EQ(newest_checkpoint(Folder(scratch.path("checkpoints"))).damaged, 1);
}

TEST(Store, WhatOthersPutIntoALeftFolderKeepsNoRunFromStarting) {
  const Scratch scratch;
  scratch.write("checkpoints/tmp-00000007-g1-a1/notes/mine.txt", "a folder inside");
  Store store(scratch.path("checkpoints"));
  EXPECT_EQ(save(store, kFour, 8), "step-00000008");
}

TEST(Store, AnEarlierRunThatIsNotDeadCommitsNothing) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  save(store, kFour, 1);
  scratch.write("checkpoints/GENERATION", "2\n");  // by a run on a host that does not see the lock
  const std::string message = message_of<EnvironmentError>([&] { save(store, kFour, 2); });
  EXPECT_NE(message.find("generation 2"), std::string::npos) << message;
  EXPECT_EQ(newest_checkpoint(store.folder()).checkpoint->commit().step, 1);
}

/// A run that goes on from an earlier step counts from there, even where later steps of its predecessor are.
TEST(Store, TheLastRunCountsAndThenItsLastStep) {
  const Scratch scratch;
  for (const int64_t steps : {300, 100}) {
    Store store(scratch.path("checkpoints"));
    for (int64_t step = 100; step <= steps; step += 100) save(store, kFour, step);
  }
  const Folder folder(scratch.path("checkpoints"));
  Names names;
  for (const Listed& listed : list_checkpoints(folder)) names.push_back(listed.name);
  EXPECT_EQ(names, (Names{"step-00000100", "step-00000200", "step-00000300", "step-00000100.2"}));
  Newest newest = newest_checkpoint(folder);
  EXPECT_EQ(newest.checkpoint->path(), folder.path_of("step-00000100.2"));
  newest = newest_checkpoint(folder, "step-00000100.2");
  EXPECT_EQ(newest.checkpoint->path(), folder.path_of("step-00000300"));
}

Names names_of(const std::vector<Listed>& all) {
  Names names;
  for (const Listed& listed : all) names.push_back(listed.name);
  return names;
}

/// A folder with a run's saves of these steps.
void leave_saves(const Scratch& scratch, std::initializer_list<int64_t> steps) {
  Store store(scratch.path("checkpoints"));
  for (const int64_t step : steps) save(store, kFour, step);
}

const Names kThreeUndone = {"step-00000020.undone", "step-00000030.undone", "step-00000040.undone"};

TEST(Store, WhatIsGoneBackFromIsSetAsideAndTakenUpByItsName) {
  const Scratch scratch;
  leave_saves(scratch, {10, 20, 30, 40});
  scratch.write("checkpoints/step-00000050/index.json", "no commit");
  const Folder folder(scratch.path("checkpoints"));
  {
    Store store(folder.path());
    EXPECT_TRUE(store.go_back_to("step-00000040").size() == 1) << "the save of step 50 that did not end";
    EXPECT_TRUE(store.go_back_to("step-00000040").empty());
    EXPECT_EQ(store.go_back_to("step-00000010").size(), 3u);
  }
  EXPECT_EQ(names_of(list_checkpoints(folder)), Names{"step-00000010"});
  EXPECT_EQ(newest_checkpoint(folder).checkpoint->commit().step, 10);
  EXPECT_EQ(newest_checkpoint(folder).damaged, 0);
  Store store(folder.path());
  save(store, kFour, 20);
  EXPECT_EQ(names_of(list_checkpoints(folder)), (Names{"step-00000010", "step-00000020"}));
  const auto aside = store.go_back_to("step-00000040.undone");
  ASSERT_EQ(aside.size(), 1u);
  EXPECT_EQ(aside[0].name, "step-00000020");
  EXPECT_EQ(aside[0].aside, "step-00000020.undone.2");
  EXPECT_EQ(names_of(list_checkpoints(folder)), (Names{"step-00000010", "step-00000040"}));
  EXPECT_EQ(newest_checkpoint(folder).checkpoint->commit().step, 40);
  save(store, kFour, 44);
  EXPECT_EQ(newest_checkpoint(folder).checkpoint->commit().step, 44);
}

/// Whatever number of names it had given when it was killed.
TEST(Store, ARollbackThatAProcessDiedInCountsAtOnceAndIsEndedByTheNext) {
  for (const size_t given : {0u, 1u, 2u, 3u}) {
    const Scratch scratch;
    leave_saves(scratch, {10, 20, 30, 40});
    const Folder folder(scratch.path("checkpoints"));
    scratch.write("checkpoints/ROLLBACK", "step-00000010\n");
    for (size_t i = 0; i < given; ++i)
      folder.rename(kThreeUndone[i].substr(0, kThreeUndone[i].find('.')), kThreeUndone[i]);
    EXPECT_EQ(names_of(list_checkpoints(folder)), Names{"step-00000010"}) << given;
    EXPECT_EQ(list_undone(folder).size(), 3u) << given;
    EXPECT_EQ(newest_checkpoint(folder).checkpoint->commit().step, 10) << given;
    const Store store(folder.path());
    EXPECT_FALSE(folder.has("ROLLBACK"));
    EXPECT_EQ(names_of(list_undone(folder)), kThreeUndone) << given;
  }
}

TEST(Store, WhatWasSetAsideGoesWhenEnoughOfTheNewBranchCanBeRead) {
  const Scratch scratch;
  leave_saves(scratch, {10, 20, 30, 40});
  Store store(scratch.path("checkpoints"));
  store.go_back_to("step-00000030");
  save(store, kFour, 35);
  EXPECT_EQ(store.prune(2), (Names{"step-00000020", "step-00000010"})) << "the parent of step 35 stays";
  EXPECT_EQ(names_of(list_checkpoints(store.folder())), (Names{"step-00000030", "step-00000035"}));
  EXPECT_EQ(names_of(list_undone(store.folder())), Names{"step-00000040.undone"});
  save(store, kFour, 36);
  EXPECT_EQ(store.prune(2), (Names{"step-00000030", "step-00000040.undone"}));
}

TEST(Store, AClaimChangesNothing) {
  const Scratch scratch;
  leave_saves(scratch, {1});
  scratch.write("checkpoints/LOCK", "4711");
  scratch.write("checkpoints/tmp-00000007-g1-a1/shard-00000.safetensors", "half");
  const Folder folder(scratch.path("checkpoints"));
  const Names before = folder.names();
  {
    const Claim claim(folder.path());
    EXPECT_EQ(claim.generation(), 2);
    EXPECT_NE(message_of<EnvironmentError>([&] { Store(folder.path()); }), "") << "it holds the lock";
  }
  EXPECT_EQ(folder.names(), before);
  EXPECT_EQ(folder.open_file("GENERATION").text(100), "1\n");
  EXPECT_EQ(folder.open_file("LOCK").text(100), "4711");
}

TEST(Store, KeepsTheNewestThatCanBeRead) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  for (int64_t step = 1; step <= 6; ++step) save(store, kFour, step);
  std::filesystem::remove(scratch.path("checkpoints/step-00000006/shard-00001.safetensors"));
  scratch.write("checkpoints/step-00000005/COMMIT.json", "damaged");
  scratch.write("checkpoints/step-00000009/index.json", "a commit that was interrupted");
  EXPECT_EQ(store.prune(0), Names{});
  EXPECT_EQ(store.prune(2), (Names{"step-00000002", "step-00000001", "step-00000009"}));
  Names left;
  for (const Listed& listed : list_checkpoints(store.folder())) left.push_back(listed.name);
  EXPECT_EQ(left, (Names{"step-00000005", "step-00000003", "step-00000004", "step-00000006"}));
  EXPECT_EQ(newest_checkpoint(store.folder()).checkpoint->commit().step, 4);
}

TEST(Store, KeepsEverythingWhileTooFewCanBeRead) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  for (int64_t step = 1; step <= 3; ++step) save(store, kFour, step);
  for (const char* name : {"step-00000002", "step-00000003"})
    std::filesystem::resize_file(scratch.path(fmt::format("checkpoints/{}/index.json", name)), 10);
  EXPECT_EQ(store.prune(2), Names{});
  EXPECT_EQ(newest_checkpoint(store.folder()).checkpoint->commit().step, 1);
}

/// Changes the last byte of a file of a checkpoint.
void flip(const Store& store, const std::string& name, const std::string& file) {
  const std::string path = store.folder().path_of(name) + "/" + file;
  std::string content = trireme::testing::slurp(path);
  content.back() ^= 1;
  std::ofstream(path, std::ios::binary) << content;
}

Names names_in(const Folder& folder) {
  Names names;
  for (const Listed& listed : list_checkpoints(folder)) names.push_back(listed.name);
  return names;
}

/// Sizes prove nothing: an intact one must not go in favour of one with a flipped bit.
TEST(Store, WhatIsKeptHasBeenReadBackBeforeAnythingIsRemoved) {
  const Scratch scratch;
  {
    Store store(scratch.path("checkpoints"));
    for (int64_t step = 1; step <= 4; ++step) save(store, kFour, step);
    flip(store, "step-00000003", "shard-00001.safetensors");
    flip(store, "step-00000004", "state.json");
  }
  EXPECT_EQ(prune_checkpoints(scratch.path("checkpoints"), 2), Names{});
  Store store(scratch.path("checkpoints"));
  EXPECT_EQ(store.prune(2), Names{});
  save(store, kFour, 5);
  EXPECT_EQ(store.prune(2), Names{"step-00000001"});
  EXPECT_EQ(names_in(store.folder()),
            (Names{"step-00000002", "step-00000003", "step-00000004", "step-00000005"}));
}

TEST(Store, ReadsEachOnceAndOnlyWhereSomethingCanGo) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  for (int64_t step = 1; step <= 2; ++step) save(store, kFour, step);
  flip(store, "step-00000001", "shard-00000.safetensors");
  EXPECT_EQ(store.prune(2), Names{}) << "which has read none of the two";
  flip(store, "step-00000001", "shard-00000.safetensors");  // as it was
  save(store, kFour, 3);
  EXPECT_EQ(store.prune(2), Names{"step-00000001"});
  flip(store, "step-00000003", "shard-00000.safetensors");
  save(store, kFour, 4);
  EXPECT_EQ(store.prune(2), Names{"step-00000002"}) << "this store has read step 3 when it was intact";
}

TEST(Store, RemovesNothingWhenReadingBackIsCancelled) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  for (int64_t step = 1; step <= 2; ++step) save(store, kFour, step);
  EXPECT_EQ(store.prune(1, [] { return true; }), Names{});
  EXPECT_EQ(store.prune(1, [] { return false; }), Names{"step-00000001"});
}

/// A later run must not take a number again, though the note of the last one is gone.
TEST(Store, CountsGenerationsFromTheCheckpointsWhereTheNoteIsGone) {
  const Scratch scratch;
  for (int64_t step = 1; step <= 3; ++step) {
    Store store(scratch.path("checkpoints"));
    save(store, kFour, step);
  }
  scratch.write("checkpoints/step-00000002/COMMIT.json", "damaged");
  for (const char* note : {"", "not a number"}) {
    std::filesystem::remove(scratch.path("checkpoints/GENERATION"));
    if (*note != '\0') scratch.write("checkpoints/GENERATION", note);
    EXPECT_EQ(Store(scratch.path("checkpoints")).generation(), 4);
  }
}

/// The digests hold, so that nothing but the proof of coverage finds it.
TEST(Store, AnIndexThatLeavesElementsOutIsRefusedThoughItWasCommitted) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  const std::string name = save(store, kFour, 1);
  const Folder folder(store.folder().path_of(name));
  Index index = Checkpoint(folder.path()).index();
  const Commit commit = Checkpoint(folder.path()).commit();
  ++index.tensors.at("embedding").shape.front();
  const std::string text = format_index(index);
  ASSERT_NO_THROW(parse_index(text, "index.json"));
  folder.write_file("index.json", text);
  folder.write_file("COMMIT.json", format_commit({.step = commit.step,
                                                  .generation = commit.generation,
                                                  .index_bytes = static_cast<int64_t>(text.size()),
                                                  .index_digest = xxh3(text)}));
  const std::string message = message_of<DataError>([&] { Checkpoint{folder.path()}; });
  EXPECT_NE(message.find("tensor 'embedding'"), std::string::npos) << message;
  EXPECT_NE(message.find("are missing"), std::string::npos) << message;
  EXPECT_EQ(newest_checkpoint(store.folder()).checkpoint, nullptr);
}

TEST(Store, WhatIsRemovedWhileItIsReadIsNotDamaged) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  save(store, kFour, 1);
  const std::string path = store.folder().path_of("step-00000001");
  const Checkpoint open(path);
  save(store, kFour, 2);
  ASSERT_EQ(store.prune(1), Names{"step-00000001"});
  EXPECT_THROW(open.check_files(), Removed);
  EXPECT_THROW(open.state(), Removed);
  EXPECT_THROW(open.verify(), Removed);
  EXPECT_THROW(read_error(open, kFour, 0), Removed);
  EXPECT_THROW(Checkpoint{path}, Removed);
  EXPECT_EQ(Removed(path).exit_code(), ExitCode::kEnvironment);
  EXPECT_THROW(open_source(path), EnvironmentError);
}

TEST(Store, BesideARunThatPrunesNothingIsDamaged) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  save(store, kFour, 1);
  const std::jthread run([&](const std::stop_token& stop) {
    for (int64_t step = 2; !stop.stop_requested(); ++step) {
      save(store, kFour, step);
      store.prune(1);
    }
  });
  const Folder folder(scratch.path("checkpoints"));
  for (int round = 0; round < 200; ++round) {
    for (const Listed& listed : list_checkpoints(folder)) {
      EXPECT_TRUE(listed.commit) << listed.problem << ": not while it is written either";
      try {
        open_source(folder.path_of(listed.name));
      } catch (const EnvironmentError& error) {
        EXPECT_NE(std::string(error.what()).find("was removed meanwhile"), std::string::npos) << error.what();
      }
    }
    const Newest newest = newest_checkpoint(folder);
    EXPECT_EQ(newest.damaged, 0) << newest.passed_over.front();
    ASSERT_NE(newest.checkpoint, nullptr);
    try {
      EXPECT_EQ(newest.checkpoint->verify(), Names{});
    } catch (const Removed&) {
    }
  }
}

/// Digests are what a checkpoint has over a folder of files.
TEST(Store, ACheckpointWithoutItsIndexIsNoFolderOfFiles) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  const std::string name = save(store, {.replicas = 1, .shards = 1, .stages = 1, .tensor = 1}, 1);
  const std::string path = store.folder().path_of(name);
  std::filesystem::remove(path + "/index.json");
  EXPECT_TRUE(is_checkpoint(path));
  EXPECT_FALSE(is_model_folder(path));
  std::string message = message_of<DataError>([&] { open_source(path); });
  EXPECT_NE(message.find("index.json"), std::string::npos) << message;
  std::filesystem::remove(path + "/COMMIT.json");
  message = message_of<DataError>([&] { open_source(path); });
  EXPECT_NE(message.find("index.json and COMMIT.json are gone"), std::string::npos) << message;
}

struct Begun {
  Scratch scratch;
  Store store{scratch.path("checkpoints")};
  std::string temporary = temporary_name(5, 1, 1);
  Folder folder = store.begin(temporary);

  std::string commit(double seconds = 0.05, std::function<bool()> cancelled = {}) {
    return store.commit({.temporary = temporary,
                         .step = 5,
                         .ranks = 4,
                         .state = "{}",
                         .seconds = seconds,
                         .cancelled = std::move(cancelled)});
  }
  void expect_nothing_committed() {
    EXPECT_EQ(newest_checkpoint(store.folder()).checkpoint, nullptr);
    store.abandon(temporary);
    EXPECT_EQ(store.folder().names(), (Names{"GENERATION", "LOCK"}));
  }
};

TEST(Store, WaitsForRanksAndNamesThoseThatAreLate) {
  Begun save;
  write_rank(save.folder, kFour, 0, 5, 1);
  write_rank(save.folder, kFour, 2, 5, 1);
  const std::string message = message_of<EnvironmentError>([&] { save.commit(); });
  EXPECT_NE(message.find("ranks 1, 3 have not written"), std::string::npos) << message;
  const std::jthread late([&] {
    write_rank(save.folder, kFour, 1, 5, 1);
    write_rank(save.folder, kFour, 3, 5, 1);
  });
  EXPECT_EQ(save.commit(30.0), "step-00000005");
}

TEST(Store, GivesUpWhenARankFailsOrTheRunSaysSo) {
  Begun save;
  EXPECT_THROW(save.commit(30.0, [] { return true; }), EnvironmentError);
  report_failure(save.folder.path(), 2, "the disk is full");
  const std::string message = message_of<EnvironmentError>([&] { save.commit(30.0); });
  EXPECT_NE(message.find("rank 2 could not write its part: the disk is full"), std::string::npos) << message;
  save.expect_nothing_committed();
}

TEST(Store, RefusesPartsThatDoNotMakeAWhole) {
  {
    Begun save;  // one rank writes as if there were fewer of them
    for (int64_t rank = 0; rank < 4; ++rank)
      write_rank(save.folder,
                 rank == 3 ? Layout{.replicas = 4, .shards = 1, .stages = 1, .tensor = 1} : kFour, rank, 5,
                 1);
    EXPECT_NE(message_of<DataError>([&] { save.commit(); }).find("tensor '"), std::string::npos);
    save.expect_nothing_committed();
  }
  {
    Begun save;  // one of another step
    for (int64_t rank = 0; rank < 4; ++rank) write_rank(save.folder, kFour, rank, rank == 1 ? 6 : 5, 1);
    EXPECT_NE(message_of<DataError>([&] { save.commit(); }).find("is from step 6"), std::string::npos);
    save.expect_nothing_committed();
  }
  {
    Begun save;  // one of a run before
    for (int64_t rank = 0; rank < 4; ++rank) write_rank(save.folder, kFour, rank, 5, rank == 1 ? 0 : 1);
    EXPECT_NE(message_of<DataError>([&] { save.commit(); }).find("generation 0"), std::string::npos);
    save.expect_nothing_committed();
  }
}

TEST(Store, NamesAFolderThatCannotBeWritten) {
  EXPECT_THROW(Store("/proc/checkpoints"), EnvironmentError);
  const Scratch scratch;
  const std::string file = scratch.write("file", "");
  EXPECT_NE(message_of<EnvironmentError>([&] { Store{file}; }).find(file), std::string::npos);
}

}  // namespace
}  // namespace trireme::checkpoint::testing
