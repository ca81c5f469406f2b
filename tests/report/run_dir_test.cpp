#include "trireme/report/run_dir.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <regex>
#include <set>
#include <thread>

#include "tests/report/temporary_folder.h"
#include "tests/support/refusal.h"
#include "trireme/base/build_info.h"
#include "trireme/base/error.h"

namespace trireme::report {
namespace {

namespace fs = std::filesystem;

const Manifest kManifest = {.command = "trireme train -n 2",
                            .config_yaml = "train:\n  steps: 3\n",
                            .device = "cpu",
                            .mesh = "dp_shard=2",
                            .ranks = 2};

/// Another attempt begins.
void go_on(const RunDirectory& run, const Manifest& manifest = kManifest) {
  run.begin_attempt(std::ssize(run.attempts()) + 1, manifest);
}

TEST(RunDirectory, IsCompleteBeforeTheRunStarts) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  for (const char* folder : {"logs", "tensorboard", "checkpoints"})
    EXPECT_TRUE(fs::is_directory(run.file(folder)));
  EXPECT_EQ(read_file(run.file("config.yaml")), kManifest.config_yaml);
  const std::regex format("tiny-[0-9]{8}-[0-9]{6}Z-[0-9a-z]{4}");
  EXPECT_TRUE(std::regex_match(fs::path(run.path()).filename().string(), format)) << run.path();
}

TEST(RunDirectory, NamesTheProgramThatGoesOnWithARun) {
  const TemporaryFolder root;
  Manifest manifest = kManifest;
  const std::string usual = RunDirectory::create(root.path(), "usual", manifest).path();
  manifest.program = "/opt/mine/my_trainer";
  const std::string own = RunDirectory::create(root.path(), "own", manifest).path();
  EXPECT_EQ(resume_command(usual, 2), "trireme train --resume " + usual + " -n 2");
  EXPECT_EQ(resume_command(own, 2), "/opt/mine/my_trainer --resume " + own + " -n 2");
  EXPECT_EQ(again_command(own, 0), "/opt/mine/my_trainer " + own + "/config.yaml");
}

TEST(RunDirectory, ManifestSaysWhatRunsWhere) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  const auto json = read_json(run.file("manifest.json"));
  EXPECT_EQ(json["schema"], "trireme.manifest/1");
  EXPECT_EQ(json["version"], kVersion);
  EXPECT_EQ(json["command"], kManifest.command);
  EXPECT_EQ(json["device"], "cpu");
  EXPECT_EQ(json["mesh"], "dp_shard=2");
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_GE(json["cores"], 1);
  EXPECT_GT(json["memory_bytes"], int64_t{1} << 20);
  EXPECT_TRUE(json["kernel"].get<std::string>().starts_with("Linux "));
  EXPECT_FALSE(json["hostname"].get<std::string>().empty());
  EXPECT_TRUE(json["cpu"].is_string());
  EXPECT_TRUE(json["ended"].is_null());
  EXPECT_TRUE(json["exit_code"].is_null());
}

TEST(RunDirectory, FinishRecordsTheEndAndKeepsTheRest) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  auto before = read_json(run.file("manifest.json"));
  run.finish(5);
  auto after = read_json(run.file("manifest.json"));
  EXPECT_EQ(after["exit_code"], 5);
  const std::regex rfc3339(R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z)");
  EXPECT_TRUE(std::regex_match(after["started"].get<std::string>(), rfc3339));
  EXPECT_TRUE(std::regex_match(after["ended"].get<std::string>(), rfc3339));
  EXPECT_LE(after["started"].get<std::string>(), after["ended"].get<std::string>());
  for (auto* json : {&before, &after}) {
    json->erase("ended");
    json->erase("exit_code");
    json->erase("attempts");
  }
  EXPECT_EQ(before, after);
}

TEST(RunDirectory, TwoRunsInOneSecondGetDifferentFolders) {
  const TemporaryFolder root;
  std::set<std::string> paths;
  for (int i = 0; i < 20; ++i) paths.insert(RunDirectory::create(root.path(), "same", kManifest).path());
  EXPECT_EQ(paths.size(), 20u);
}

TEST(RunDirectory, LatestPointsAtTheNewestRun) {
  const TemporaryFolder root;
  RunDirectory::create(root.path(), "first", kManifest);
  const auto second = RunDirectory::create(root.path(), "second", kManifest);
  EXPECT_TRUE(fs::equivalent(root.file("latest"), second.path()));
  EXPECT_TRUE(fs::read_symlink(root.file("latest")).is_relative())
      << "a moved folder of runs must stay whole";
}

// A reader that follows the link while runs are created always finds one: replacing it leaves no gap.
TEST(RunDirectory, LatestIsNeverMissingWhileItMoves) {
  const TemporaryFolder root;
  RunDirectory::create(root.path(), "run", kManifest);
  std::atomic<bool> done = false;
  std::atomic<int> gaps = 0;
  std::thread reader([&] {
    while (!done) {
      std::error_code error;
      [[maybe_unused]] const fs::path target = fs::read_symlink(root.file("latest"), error);
      if (error) ++gaps;
    }
  });
  for (int i = 0; i < 30; ++i) RunDirectory::create(root.path(), "run", kManifest);
  done = true;
  reader.join();
  EXPECT_EQ(gaps, 0);
}

TEST(RunDirectory, NameCannotLeaveTheRoot) {
  const TemporaryFolder root;
  for (const char* name : {"../../evil", "a b/c", "", ".hidden", "-n"}) {
    const auto run = RunDirectory::create(root.path(), name, kManifest);
    EXPECT_EQ(fs::path(run.path()).parent_path(), fs::path(root.path())) << name;
    const std::string folder = fs::path(run.path()).filename().string();
    EXPECT_TRUE(folder.front() != '.' && folder.front() != '-') << folder;
  }
}

TEST(RunDirectory, OpenFollowsLatestAndStaysWithThatRun) {
  const TemporaryFolder root;
  const auto first = RunDirectory::create(root.path(), "first", kManifest);
  const auto opened = RunDirectory::open(root.file("latest"));
  RunDirectory::create(root.path(), "second", kManifest);
  EXPECT_TRUE(fs::equivalent(opened.path(), first.path()));
}

TEST(RunDirectory, OpenRefusesWhatIsNoRun) {
  const TemporaryFolder root;
  EXPECT_NE(test::failure_of<ConfigError>([&] {
              RunDirectory::open(root.file("absent"));
            }).find(root.file("absent")),
            std::string::npos);
  EXPECT_NE(test::failure_of<ConfigError>([&] { RunDirectory::open(root.path()); }).find("manifest.json"),
            std::string::npos);
  for (const char* damaged : {"", "{", "[]", "{}", R"({"schema": "other/1"})", R"({"schema": 7})"}) {
    write_file_atomic(root.file("manifest.json"), damaged);
    EXPECT_THROW(RunDirectory::open(root.path()), DataError) << damaged;
  }
}

TEST(ListRuns, GivesTheNewestFirstAndThoseOfANameAlone) {
  const TemporaryFolder root;
  std::vector<std::string> newest_first;
  for (const char* name : {"tiny", "tiny-2", "tiny", "a b"}) {
    newest_first.insert(newest_first.begin(), RunDirectory::create(root.path(), name, kManifest).path());
  }
  make_directories(root.file("no-run"));
  EXPECT_EQ(list_runs(root.path()), newest_first);
  EXPECT_EQ(list_runs(root.path(), "tiny"), (std::vector<std::string>{newest_first[1], newest_first[3]}));
  EXPECT_EQ(list_runs(root.path(), "tiny-2"), std::vector<std::string>{newest_first[2]});
  EXPECT_EQ(list_runs(root.path(), "a b"), std::vector<std::string>{newest_first[0]});
  EXPECT_TRUE(list_runs(root.path(), "tin").empty());
  EXPECT_TRUE(list_runs(root.file("absent")).empty());
}

TEST(ListRuns, TellsNamesApartThatMakeOneFolderName) {
  const TemporaryFolder root;
  const std::vector<std::string> names = {"a b", "a-b", "a/b", "m\u00fcnchen", "m\u00f6nchen"};
  std::vector<std::string> paths;
  for (const std::string& name : names)
    paths.push_back(RunDirectory::create(root.path(), name, kManifest).path());
  for (size_t i = 0; i < names.size(); ++i)
    EXPECT_EQ(list_runs(root.path(), names[i]), std::vector<std::string>{paths[i]}) << names[i];
}

TEST(ListRuns, TakesTheNameOfTheFolderWhereAManifestHasNone) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "a b", kManifest);
  auto json = read_json(run.file("manifest.json"));
  json.erase("name");
  write_file_atomic(run.file("manifest.json"), json.dump());
  EXPECT_EQ(list_runs(root.path(), "a b"), std::vector<std::string>{run.path()});
}

/// Makes the manifest say that the run has begun and gone on at `when`.
void set_clock(const RunDirectory& run, const std::string& when) {
  auto json = read_json(run.file("manifest.json"));
  json["started"] = when;
  for (auto& attempt : json["attempts"]) attempt["started"] = when;
  write_file_atomic(run.file("manifest.json"), json.dump());
}

TEST(ListRuns, NoClockHasASayInTheirOrder) {
  const TemporaryFolder root;
  const auto first = RunDirectory::create(root.path(), "tiny", kManifest);
  set_clock(first, "2999-01-01T00:00:00.000000Z");
  const auto second = RunDirectory::create(root.path(), "tiny", kManifest);
  using Paths = std::vector<std::string>;
  EXPECT_EQ(list_runs(root.path()), (Paths{second.path(), first.path()}));
  go_on(first);
  set_clock(first, "1999-01-01T00:00:00.000000Z");
  EXPECT_EQ(list_runs(root.path()), (Paths{first.path(), second.path()}));
  EXPECT_EQ(RunDirectory::open(root.file("latest")).path(), first.path());
}

TEST(ListRuns, ALinkToARunElsewhereIsThatRun) {
  const TemporaryFolder root, disk;
  const auto moved = RunDirectory::create(root.path(), "tiny", kManifest);
  const auto other = RunDirectory::create(root.path(), "tiny", kManifest);
  const std::string name = fs::path(moved.path()).filename();
  fs::copy(moved.path(), disk.file(name), fs::copy_options::recursive);
  fs::remove_all(moved.path());
  fs::create_symlink(disk.file(name), moved.path());
  using Paths = std::vector<std::string>;
  EXPECT_EQ(list_runs(root.path()), (Paths{other.path(), moved.path()}));
  const auto opened = RunDirectory::open(moved.path());
  EXPECT_EQ(opened.path(), moved.path());
  go_on(opened);
  EXPECT_EQ(list_runs(root.path()), (Paths{moved.path(), other.path()}));
  EXPECT_EQ(RunDirectory::open(root.file("latest")).path(), moved.path());
  EXPECT_EQ(RunDirectory::open(disk.file(name)).attempts().size(), 2u);
}

TEST(ListRuns, ABadNeighbourIsNamedAndKeepsNobodyFromTheOthers) {
  const TemporaryFolder root;
  const auto good = RunDirectory::create(root.path(), "tiny", kManifest);
  fs::create_directories(root.file("a-folder/manifest.json"));
  make_directories(root.file("a-pipe"));
  ASSERT_EQ(::mkfifo(root.file("a-pipe/manifest.json").c_str(), 0644), 0);
  make_directories(root.file("foreign"));
  write_file_atomic(root.file("foreign/manifest.json"), "{\"name\": \"web app\"}");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(list_runs(root.path()), std::vector<std::string>{good.path()});
  const std::string told = ::testing::internal::GetCapturedStderr();
  for (const char* name : {"a-folder", "a-pipe", "foreign"})
    EXPECT_NE(told.find("skipped " + root.file(name)), std::string::npos) << told;
  EXPECT_THROW(RunDirectory::open(root.file("a-pipe")), DataError);
  ASSERT_EQ(::mkfifo(good.file("LOCK").c_str(), 0644), 0);
  EXPECT_FALSE(good.holder()) << "and does not wait for a writer";
}

TEST(RunDirectory, AManifestThatHasGoneIsMadeAgain) {
  for (const char* damage : {"gone", "", "{", "{}"}) {
    const TemporaryFolder root;
    const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
    const auto before = read_json(run.file("manifest.json"));
    fs::remove(run.file("manifest.json"));
    if (damage != std::string("gone")) write_file_atomic(run.file("manifest.json"), damage);
    ::testing::internal::CaptureStderr();
    go_on(run);
    run.finish({.exit_code = 6, .cause = "rank 1 exited", .error = "[train] NaN", .rank = 1});
    EXPECT_NE(::testing::internal::GetCapturedStderr().find("made again"), std::string::npos);
    const auto after = read_json(run.file("manifest.json"));
    EXPECT_EQ(after["started"], before["started"]) << damage;
    ASSERT_EQ(after["attempts"].size(), 2u) << damage;
    EXPECT_EQ(after["attempts"][1]["exit_code"], 6) << damage;
    EXPECT_EQ(run.attempts()[1].error, "[train] NaN") << damage;
  }
}

TEST(RunDirectory, AFolderThatWasMovedOrRemovedIsTheMachinesFault) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  fs::rename(run.path(), root.file("elsewhere"));
  EXPECT_THROW(run.finish(0), EnvironmentError);
  make_directories(run.path());  // by whoever writes weights there
  EXPECT_THROW(run.finish(0), EnvironmentError);
  EXPECT_FALSE(fs::exists(run.file("manifest.json")));
}

TEST(RunDirectory, AnAttemptSweepsWhatAKilledProcessLeft) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  write_file_atomic(run.file("manifest.json.4711-0.tmp"), "{");
  write_file_atomic(run.file("mine.tmp"), "a note of the user's");
  go_on(run);
  EXPECT_FALSE(fs::exists(run.file("manifest.json.4711-0.tmp")));
  EXPECT_TRUE(fs::exists(run.file("mine.tmp")));
}

TEST(RunDirectory, ANameThatNoFolderCanHaveIsRefused) {
  const TemporaryFolder root;
  EXPECT_THROW(RunDirectory::create(root.path(), std::string(300, 'x'), kManifest), ConfigError);
  const auto longest = RunDirectory::create(root.path(), std::string(225, 'x'), kManifest);
  EXPECT_EQ(fs::path(longest.path()).filename().string().size(), 247u);
}

TEST(RunDirectory, KnowsHowItsRunEnded) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  EXPECT_FALSE(run.exit_code());
  run.finish(130);
  EXPECT_EQ(run.exit_code(), 130);
  go_on(run);
  EXPECT_FALSE(run.exit_code());
  EXPECT_EQ(read_json(run.file("manifest.json"))["attempts"][0]["exit_code"], 130);
  run.finish(0);
  EXPECT_EQ(run.exit_code(), 0);
}

TEST(RunDirectory, ItsAttemptsSayHowTheyEndedAndWhatWasLost) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  ASSERT_EQ(run.attempts().size(), 1u);
  EXPECT_EQ(run.attempts()[0].ended, "");
  EXPECT_FALSE(run.attempts()[0].resumed_from);
  write_file_atomic(run.file("metrics.jsonl"), "{\"step\": 6}\n{\"step\": 7}\n{\"step\": 8, \"lo");
  run.finish({.exit_code = 137, .cause = "rank 1 was killed", .rank = 1});
  go_on(run);
  run.note_resumed(4);
  const std::vector<Attempt> attempts = run.attempts();
  ASSERT_EQ(attempts.size(), 2u);
  EXPECT_EQ(attempts[0].exit_code, 137);
  EXPECT_EQ(attempts[0].cause, "rank 1 was killed");
  EXPECT_EQ(attempts[0].rank, 1);
  EXPECT_EQ(attempts[0].last_step, 7);
  EXPECT_LE(attempts[0].started, attempts[0].ended);
  EXPECT_LE(attempts[0].ended, attempts[1].started);
  EXPECT_EQ(attempts[1].resumed_from, 4);
  EXPECT_EQ(attempts[1].steps_lost, 3);
  EXPECT_FALSE(attempts[1].exit_code);
}

TEST(RunDirectory, AManifestWithoutAttemptsHasTheOneOfTheRun) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  run.finish(75);
  auto json = read_json(run.file("manifest.json"));
  json.erase("attempts");
  write_file_atomic(run.file("manifest.json"), json.dump());
  go_on(run);
  ASSERT_EQ(run.attempts().size(), 2u);
  EXPECT_EQ(run.attempts()[0].started, json["started"].get<std::string>());
  EXPECT_EQ(run.attempts()[0].exit_code, 75);
}

TEST(RunDirectory, AnotherAttemptMovesLatestAndTheSummaryOfTheOneBefore) {
  const TemporaryFolder root;
  const auto first = RunDirectory::create(root.path(), "first", kManifest);
  const auto second = RunDirectory::create(root.path(), "second", kManifest);
  write_file_atomic(first.file("summary.json"), "{}");
  first.finish(130);
  go_on(first);
  EXPECT_TRUE(fs::equivalent(root.file("latest"), first.path()));
  EXPECT_EQ(list_runs(root.path()), (std::vector<std::string>{first.path(), second.path()}));
  EXPECT_FALSE(fs::exists(first.file("summary.json")));
  EXPECT_EQ(read_file(first.file("summary.attempt-1.json")), "{}");
  first.finish(75);
  go_on(first);  // the attempt before has left none
  EXPECT_FALSE(fs::exists(first.file("summary.attempt-2.json")));
}

TEST(RunDirectory, AnotherAttemptMakesNoLatestWhereThereIsNone) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "moved", kManifest);
  fs::remove(root.file("latest"));
  go_on(run);
  EXPECT_FALSE(fs::exists(fs::symlink_status(root.file("latest"))));
}

TEST(RunDirectory, KeepsTheConfigsThatItsAttemptsHadBefore) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  go_on(run);
  run.replace_config(kManifest.config_yaml);
  EXPECT_FALSE(fs::exists(run.file("config.attempt-1.yaml"))) << "nothing has changed";
  go_on(run);
  run.replace_config("train:\n  steps: 9\n");
  EXPECT_EQ(read_file(run.file("config.yaml")), "train:\n  steps: 9\n");
  EXPECT_EQ(read_file(run.file("config.attempt-2.yaml")), kManifest.config_yaml);
  run.replace_config("train:\n  steps: 9  # config.yaml:2:3\n");
  EXPECT_EQ(read_file(run.file("config.yaml")), "train:\n  steps: 9\n") << "its values are the same";
}

TEST(RunDirectory, KeepsTheSchedulesThatItsAttemptsHadBefore) {
  const TemporaryFolder root;
  Manifest manifest = kManifest;
  EXPECT_FALSE(fs::exists(RunDirectory::create(root.path(), "tiny", manifest).file("schedule.csv")));
  manifest.files["schedule.csv"] = "0F0,0B0\n";
  const auto run = RunDirectory::create(root.path(), "tiny", manifest);
  EXPECT_EQ(read_file(run.file("schedule.csv")), manifest.files["schedule.csv"]);
  go_on(run);
  run.replace_config(manifest.config_yaml, manifest.files);
  run.replace_config(manifest.config_yaml);
  EXPECT_FALSE(fs::exists(run.file("schedule.attempt-1.csv"))) << "nothing has changed";
  run.replace_config(manifest.config_yaml, {{"schedule.csv", "0F0,0I0,0W0\n"}});
  EXPECT_EQ(read_file(run.file("schedule.csv")), "0F0,0I0,0W0\n");
  EXPECT_EQ(read_file(run.file("schedule.attempt-1.csv")), manifest.files["schedule.csv"]);
}

TEST(RunDirectory, IsRunningWhileSomeoneHoldsALockOfIts) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  EXPECT_FALSE(run.holder());
  const int lock = ::open(run.file("checkpoints/LOCK").c_str(), O_RDWR | O_CREAT, 0644);
  EXPECT_FALSE(run.holder());
  ASSERT_EQ(::flock(lock, LOCK_EX | LOCK_NB), 0);
  EXPECT_TRUE(run.writer());
  EXPECT_TRUE(run.holder());
  ::close(lock);
  EXPECT_FALSE(run.holder());
  {
    const auto held = run.hold();
    ASSERT_TRUE(held);
    EXPECT_FALSE(run.hold()) << "one process writes to a run";
    EXPECT_EQ(run.holder(), std::to_string(::getpid()));
    EXPECT_FALSE(run.writer());
  }
  EXPECT_FALSE(run.holder());
  EXPECT_TRUE(run.hold());
}

TEST(RunDirectory, AnAttemptBeginsOnce) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  write_file_atomic(run.file("summary.json"), "{}");
  run.finish(0);
  const std::string before = read_file(run.file("manifest.json"));
  run.begin_attempt(1, kManifest);
  EXPECT_EQ(read_file(run.file("manifest.json")), before);
  EXPECT_TRUE(fs::exists(run.file("summary.json")));
  run.begin_attempt(2, kManifest);
  const std::string second = read_file(run.file("manifest.json"));
  EXPECT_EQ(run.attempts().size(), 2u);
  EXPECT_FALSE(fs::exists(run.file("summary.json")));
  run.begin_attempt(2, kManifest);
  EXPECT_EQ(read_file(run.file("manifest.json")), second);
}

TEST(RunDirectory, EachAttemptHasItsLayoutAndTheRunThatOfTheLast) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  Manifest wider = kManifest;
  wider.command = "trireme train --resume tiny -n 4";
  wider.mesh = "dp_shard=4";
  wider.ranks = 4;
  go_on(run, wider);
  const std::vector<Attempt> attempts = run.attempts();
  EXPECT_EQ(attempts[0].ranks, 2);
  EXPECT_EQ(attempts[0].mesh, "dp_shard=2");
  EXPECT_EQ(attempts[0].command, kManifest.command);
  EXPECT_EQ(attempts[1].ranks, 4);
  EXPECT_EQ(attempts[1].mesh, "dp_shard=4");
  EXPECT_EQ(attempts[1].device, "cpu");
  EXPECT_EQ(attempts[1].command, wider.command);
  const auto json = read_json(run.file("manifest.json"));
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["mesh"], "dp_shard=4");
  EXPECT_EQ(json["command"], kManifest.command) << "what began it";
}

TEST(RunDirectory, HasFinishedUntilALaterAttemptHasMovedItsEnd) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "tiny", kManifest);
  const auto records_end_with = [&](int64_t step) {
    write_file_atomic(run.file("metrics.jsonl"), fmt::format("{{\"step\": {}}}\n", step));
  };
  records_end_with(20);
  run.finish(75);
  EXPECT_FALSE(run.has_finished());
  go_on(run);
  run.finish(0);
  EXPECT_TRUE(run.has_finished());
  go_on(run);
  EXPECT_TRUE(run.has_finished()) << "nothing has been trained since";
  run.finish(2);
  EXPECT_TRUE(run.has_finished());
  for (const int64_t step : {30, 10}) {
    records_end_with(step);
    EXPECT_FALSE(run.has_finished()) << step;
  }
}

TEST(RunDirectory, RefusesARootThatIsAFile) {
  const TemporaryFolder root;
  write_file_atomic(root.file("taken"), "x");
  const std::string message =
      test::failure_of<EnvironmentError>([&] { RunDirectory::create(root.file("taken"), "run", kManifest); });
  EXPECT_NE(message.find(root.file("taken")), std::string::npos) << message;
}

TEST(RunDirectory, RefusesWhenLatestIsARealFolder) {
  const TemporaryFolder root;
  make_directories(root.file("latest"));
  write_file_atomic(root.file("latest/precious"), "x");
  EXPECT_THROW(RunDirectory::create(root.path(), "run", kManifest), EnvironmentError);
  EXPECT_EQ(read_file(root.file("latest/precious")), "x");
}

}  // namespace
}  // namespace trireme::report
