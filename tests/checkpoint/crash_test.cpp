// A save, its commit and the removal of the checkpoint before, ended or failed at every system call that they
// make. Whatever is left, a checkpoint that is whole is found, and the next run can save again.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>

#include "tests/checkpoint/faults.h"
#include "tests/checkpoint/saved.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/new_folder.h"
#include "trireme/checkpoint/tensor_file.h"
#include "trireme/checkpoint/unfinished.h"

namespace trireme::checkpoint::testing {
namespace {

const Layout kTwo{.replicas = 1, .shards = 2, .stages = 1, .tensor = 1};

enum Outcome : int { kCommitted = 0, kFailedThenCommitted = 1, kFailedTwice = 2, kNeverBegan = 3 };

struct CrashPlace {
  Scratch scratch;
  std::string folder() const { return scratch.path("checkpoints"); }
  bool committed() const { return std::filesystem::exists(scratch.path("committed")); }

  /// A run that has saved step 1 and ended.
  void begin() const {
    for (const auto& entry : std::filesystem::directory_iterator(scratch.path("")))
      std::filesystem::remove_all(entry.path());
    Store store(folder());
    save(store, kTwo, 1);
  }

  /// The run under test: step 2 is saved, and step 1 removed.
  int continue_run() const {
    std::unique_ptr<Store> store;
    try {
      store = std::make_unique<Store>(folder());
    } catch (const EnvironmentError&) {
      return kNeverBegan;
    }
    for (int64_t attempt = 1; attempt <= 2; ++attempt) {
      try {
        save(*store, kTwo, 2, attempt);
        scratch.write("committed", "");
        store->prune(1);
        return attempt == 1 ? kCommitted : kFailedThenCommitted;
      } catch (const Error&) {
        if (committed()) return kCommitted;
        store->abandon(temporary_name(2, store->generation(), attempt));
      }
    }
    return kFailedTwice;
  }
};

/// `body` in a process of its own; its result.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int64_t calls_of_a_save() {
  const CrashPlace place;
  place.begin();
  plan_fault({});
  EXPECT_EQ(place.continue_run(), kCommitted);
  return end_faults();
}

/// The step that a resuming run would load; it is whole.
int64_t loadable_step(const CrashPlace& place) {
  const Newest newest = newest_checkpoint(Folder(place.folder()));
  if (!newest.checkpoint) return -1;
  EXPECT_EQ(newest.checkpoint->verify(), std::vector<std::string>{});
  for (int64_t rank = 0; rank < kTwo.ranks(); ++rank)
    EXPECT_EQ(read_error(*newest.checkpoint, kTwo, rank), "");
  return newest.checkpoint->commit().step;
}

/// The run after: it saves, and cleans up.
void expect_next_run_works(const CrashPlace& place) {
  Store store(place.folder());
  save(store, kTwo, 3);
  EXPECT_EQ(loadable_step(place), 3);
  store.prune(1);
  EXPECT_EQ(store.folder().names(), (std::vector<std::string>{"GENERATION", "LOCK", "step-00000003"}));
}

/// The name of a checkpoint leads to all of it, from the moment it has it until it has lost it.
void expect_no_halves(const CrashPlace& place) {
  for (const Listed& entry : list_checkpoints(Folder(place.folder())))
    EXPECT_FALSE(entry.unfinished) << entry.problem;
}

void expect_survives_kills(Unsynced unsynced) {
  const CrashPlace place;
  const int64_t calls = calls_of_a_save();
  EXPECT_GE(calls, 50);
  int64_t first_new = 0;
  for (int64_t at = 1; at <= calls; ++at) {
    place.begin();
    const int code = in_child([&] {
      plan_fault({.fault = Fault::kKill, .at = at, .unsynced = unsynced});
      return place.continue_run();
    });
    ASSERT_EQ(code, kKilled) << at;
    const int64_t step = loadable_step(place);
    ASSERT_TRUE(step == 1 || step == 2) << "call " << at << ": " << step;
    if (place.committed()) {
      EXPECT_EQ(step, 2) << "call " << at;
    }
    if (first_new > 0) {
      EXPECT_EQ(step, 2) << "call " << at;
    }
    if (step == 2 && first_new == 0) first_new = at;
    expect_no_halves(place);
    expect_next_run_works(place);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(first_new, 0);
}

TEST(Crash, KilledAtEverySystemCallNothingIsLost) {
  expect_survives_kills(Unsynced::kKept);
}

TEST(Crash, PowerCutAtEverySystemCallThatLosesBytesNothingIsLost) {
  expect_survives_kills(Unsynced::kEmptied);
}

TEST(Crash, PowerCutAtEverySystemCallThatLosesBytesAndNamesNothingIsLost) {
  expect_survives_kills(Unsynced::kUndone);
}

void expect_survives_error(int error) {
  const CrashPlace place;
  const int64_t calls = calls_of_a_save();
  int64_t failed = 0;
  for (int64_t at = 1; at <= calls; ++at) {
    place.begin();
    const int code = in_child([&] {
      plan_fault({.fault = Fault::kError, .at = at, .error = error});
      return place.continue_run();
    });
    ASSERT_TRUE(code == kCommitted || code == kFailedThenCommitted || code == kNeverBegan)
        << "call " << at << ": " << code;
    failed += code == kCommitted ? 0 : 1;
    ASSERT_EQ(loadable_step(place), code == kNeverBegan ? 1 : 2) << "call " << at;
    expect_next_run_works(place);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(failed, calls / 2);
}

TEST(Crash, AFullDiskAtAnyCallFailsOneSaveOnly) {
  expect_survives_error(ENOSPC);
}

TEST(Crash, AnErrorOfTheDiskAtAnyCallFailsOneSaveOnly) {
  expect_survives_error(EIO);
}

/// On a full disk the note itself may find no room.
TEST(Crash, ARankThatFailsIsHeardOfWhicheverCallOfItsNoteFails) {
  for (int64_t at = 1; at <= 8; ++at) {
    SCOPED_TRACE(at);
    const Scratch scratch;
    Store store(scratch.path("checkpoints"));
    const std::string temporary = temporary_name(5, 1, 1);
    const Folder folder = store.begin(temporary);
    plan_fault({.fault = Fault::kError, .at = at, .error = ENOSPC});
    report_failure(folder.path(), 1, "the disk is full");
    end_faults();
    const std::string message = message_of<EnvironmentError>([&] {
      store.commit({.temporary = temporary, .step = 5, .ranks = 2, .state = "{}", .seconds = 0.05});
    });
    const bool why = message.find("rank 1 could not write its part: the disk is full") != std::string::npos;
    const bool where = message.find("rank 1 could not write its part: there was") != std::string::npos;
    EXPECT_TRUE(why || where) << message;
  }
}

TEST(Crash, ShortWritesAreContinued) {
  const CrashPlace place;
  const int64_t calls = calls_of_a_save();
  for (int64_t at = 1; at <= calls; at += 1) {
    place.begin();
    const int code = in_child([&] {
      plan_fault({.fault = Fault::kShortWrite, .at = at});
      return place.continue_run();
    });
    ASSERT_EQ(code, kCommitted);
    ASSERT_EQ(loadable_step(place), 2);
  }
}

/// Steps 1 to 3, of which the run under test goes back to the first.
int go_back(const CrashPlace& place) {
  Store store(place.folder());
  store.go_back_to("step-00000001");
  return kCommitted;
}

void begin_three(const CrashPlace& place) {
  place.begin();
  Store store(place.folder());
  for (const int64_t step : {2, 3}) save(store, kTwo, step);
}

/// Files that are set aside stay so, whenever the power goes.
TEST(Crash, GoingBackIsBegunOrNotAtEverySystemCallAndNeverUndone) {
  const CrashPlace place;
  begin_three(place);
  plan_fault({});
  ASSERT_EQ(go_back(place), kCommitted);
  const int64_t calls = end_faults();
  for (const Unsynced unsynced : {Unsynced::kKept, Unsynced::kEmptied, Unsynced::kUndone}) {
    bool has_begun = false;
    for (int64_t at = 1; at <= calls; ++at) {
      begin_three(place);
      const int code = in_child([&] {
        plan_fault({.fault = Fault::kKill, .at = at, .unsynced = unsynced});
        return go_back(place);
      });
      ASSERT_EQ(code, kKilled) << at;
      const int64_t step = loadable_step(place);
      ASSERT_TRUE(step == 1 || (step == 3 && !has_begun)) << "call " << at << ": " << step;
      has_begun = step == 1;
      const Store next(place.folder());
      EXPECT_EQ(loadable_step(place), step) << "call " << at;
      EXPECT_FALSE(next.folder().has("ROLLBACK")) << "call " << at;
    }
    EXPECT_TRUE(has_begun);
  }
}

void write_new_file(const std::string& path) {
  UnfinishedFile file(path);
  file.write(0, "whole", 5);
  file.finish();
}

void write_new_folder(const std::string& path) {
  NewFolder folder(path, false);
  OutputFile file = folder.folder().create_file("a");
  file.append("whole", 5);
  file.finish();
  folder.commit();
}

TEST(Crash, WhatHasItsNameIsWholeAndOnceItIsDoneKeepsItThroughAPowerCut) {
  const std::pair<const char*, std::function<void(const std::string&)>> writers[] = {
      {"new", write_new_file}, {"new/a", write_new_folder}};
  for (const auto& [file, write] : writers) {
    for (const Unsynced unsynced : {Unsynced::kEmptied, Unsynced::kUndone}) {
      int code = kKilled;
      for (int64_t at = 1; code == kKilled; ++at) {
        const Scratch scratch;
        const std::string path = scratch.path("new");
        code = in_child([&] {
          plan_fault({.fault = Fault::kKill, .at = at, .unsynced = unsynced});
          write(path);
          cut_power();
          return 0;
        });
        if (code == 0 || std::filesystem::exists(path)) {
          EXPECT_EQ(trireme::testing::slurp(scratch.path(file)), "whole") << file << ", call " << at;
        }
      }
      EXPECT_EQ(code, 0) << file;
    }
  }
}

/// Otherwise fsync() at the end has all of it to wait for.
TEST(Crash, TheDiskWritesAlreadyWhileMoreBytesCome) {
  constexpr int64_t kMiB = int64_t{1} << 20, kParts = 40, kMostLeft = 16;
  const std::string part(kMiB, 'x');
  const Scratch scratch;
  OutputFile file = Folder(scratch.path("")).create_file("a");
  plan_fault({});
  for (int64_t i = 0; i < kParts; ++i) file.append(part.data(), kMiB);
  EXPECT_GE(bytes_begun(), (kParts - kMostLeft) * kMiB);
  UnfinishedFile unfinished(scratch.path("b"));
  plan_fault({});
  for (int64_t i = 0; i < 3; ++i) unfinished.write(i * kMiB, part.data(), kMiB);
  EXPECT_EQ(bytes_begun(), 3 * kMiB);
  end_faults();
}

TEST(Crash, AnErrorOfTheDiskComesWithWhatToDo) {
  const std::pair<int, const char*> advised[] = {
      {ENOSPC, "free some space"},   {EDQUOT, "free some space"},  {EROFS, "choose a writable folder"},
      {EACCES, "choose a writable"}, {EPERM, "choose a writable"}, {EIO, "check the path and the disk"}};
  const Scratch scratch;
  const Folder folder(scratch.path(""));
  for (const auto& [error, advice] : advised) {
    plan_fault({.fault = Fault::kError, .at = 1, .error = error});
    EXPECT_THAT(message_of<EnvironmentError>([&] { folder.create_file("a"); }), ::testing::HasSubstr(advice));
    end_faults();
  }
}

/// Nothing but zeros, of any size.
class Zeros : public Source {
 public:
  Zeros() : Source("zeros") { tensors_ = {{"a", {"F32", {300}}}}; }
  const std::map<std::string, std::string>& metadata() const override { return none_; }
  void read(const std::string&, const plan::Region& region, void* out) const override {
    std::memset(out, 0, static_cast<size_t>(region.numel()) * sizeof(float));
  }

 private:
  std::map<std::string, std::string> none_;
};

/// A disk that is too full says so before minutes were spent on writing.
TEST(Crash, RoomIsReservedBeforeTheFirstByteOfALargeFile) {
  const Scratch scratch;
  const Folder folder(scratch.path(""));
  const std::pair<std::string, std::function<void()>> writers[] = {
      {"shard-00000.safetensors", [&] { write_rank(folder, kTwo, 0, 1, 1); }},
      {"model.safetensors", [&] {
         const Zeros source;
         write_tensor_file(folder, "model.safetensors", source, {whole_entry(source, "a")}, {});
       }}};
  for (const auto& [name, write] : writers) {
    write();
    const auto bytes = std::filesystem::file_size(scratch.path(name));
    for (const std::string& written : folder.names()) folder.remove(written);
    plan_fault({.fault = Fault::kReserve, .error = ENOSPC});
    EXPECT_THAT(message_of<EnvironmentError>(write),
                ::testing::HasSubstr(fmt::format("cannot reserve {} bytes", bytes)))
        << name;
    end_faults();
    EXPECT_EQ(std::filesystem::file_size(scratch.path(name)), 0) << name;
  }
}

TEST(Crash, FileSystemsThatCannotCheckAndRenameAtOnceGetNewFolders) {
  const Scratch scratch;
  plan_fault({.fault = Fault::kRenameToFree, .error = EINVAL});
  NewFolder first(scratch.path("out"), false), second(scratch.path("out"), false);
  first.folder().write_file("a", "1");
  first.commit();
  EXPECT_THROW(second.commit(), EnvironmentError) << "the name is taken";
  end_faults();
  EXPECT_EQ(Folder(scratch.path("out")).names(), std::vector<std::string>{"a"});
}

TEST(Crash, FileSystemsThatReserveNothingAreWrittenTo) {
  for (const int error : {EOPNOTSUPP, ENOSYS, EINTR}) {
    const CrashPlace place;
    place.begin();
    plan_fault({.fault = Fault::kReserve, .error = error});
    EXPECT_EQ(place.continue_run(), kCommitted) << error;
    end_faults();
    EXPECT_EQ(loadable_step(place), 2) << error;
  }
}

}  // namespace
}  // namespace trireme::checkpoint::testing
