// Preparing data: its own heartbeat, its own deadline, and signals.
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "tests/train/trainer_fixture.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/data/lock.h"

namespace trireme::train {
namespace {

/// Ranks whose corpus is being prepared by somebody else, who holds its lock.
class PrepareTest : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    config_.train.steps = 1;
    run(1);
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache" / "data")) {
      if (entry.is_directory()) prepared_ = entry.path();
    }
    std::filesystem::remove_all(prepared_);
  }

  std::string lock_path() const {
    return std::filesystem::path(prepared_).replace_extension(".lock").string();
  }

  /// Trains on two ranks with a timeout of one second for every wait.
  TrainResult run_impatiently() {
    at::set_num_threads(1);
    TrainResult results[2];
    recorder_ = {};
    const auto body = [&](const std::shared_ptr<comm::World>& world) {
      TrainOptions mine = options();
      mine.stop_signal = world->rank() == stop_rank_ ? &stop_ : nullptr;
      results[world->rank()] = train(mine, world);
    };
    test::run_ranks(2, body, /*timeout_s=*/1.0);
    EXPECT_EQ(results[0].stop_signal, results[1].stop_signal);
    return results[0];
  }

  std::filesystem::path prepared_;
};

TEST_F(PrepareTest, MayTakeLongerThanAnyOtherWait) {
  std::jthread holder([lock = data::FileLock(lock_path(), 0.0)]() mutable {
    for (int i = 0; i < 6; ++i) {
      lock.show_life();
      std::this_thread::sleep_for(std::chrono::milliseconds(510));
    }
  });
  const double began = monotonic_seconds();
  EXPECT_EQ(run_impatiently().summary.steps, 1);
  EXPECT_GT(monotonic_seconds() - began, 2.5) << "the ranks have waited";
}

/// What each of two ranks ends with when rank 1 reads `path`.
std::vector<std::string> said_by_ranks(TrainOptions base, const std::string& path, ExitCode code) {
  std::vector<std::string> said(2);
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    TrainOptions mine = base;
    if (world->rank() == 1) mine.config.data.path = path;
    try {
      train(mine, world);
    } catch (const comm::FailedElsewhere& error) {
      EXPECT_EQ(error.exit_code(), code);
      said[world->rank()] = "elsewhere";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), code);
      said[world->rank()] = error.what();
    }
  });
  return said;
}

TEST_F(PrepareTest, OneRankSaysWhatIsWrongForAll) {
  const auto missing = said_by_ranks(options(), (folder_ / "nowhere").string(), ExitCode::kUsage);
  EXPECT_EQ(missing[0], "elsewhere") << "which has its text";
  EXPECT_NE(missing[1].find("nowhere"), std::string::npos) << missing[1];
  std::filesystem::create_directories(folder_ / "other");
  std::ofstream(folder_ / "other" / "a.txt") << std::string(3000, 'a');
  const auto other = said_by_ranks(options(), (folder_ / "other").string(), ExitCode::kCorruptData);
  EXPECT_NE(other[0].find("rank 1 has 2100 + 900 tokens"), std::string::npos) << other[0];
  EXPECT_EQ(other[1], other[0]) << "they may be on different hosts";
}

TEST_F(PrepareTest, RanksWithTextsOfTheSameSizeAndOtherContentsAreRefused) {
  const std::filesystem::path other = folder_ / "other";
  std::filesystem::copy(folder_ / "text", other);
  std::fstream(other / "3.txt", std::ios::in | std::ios::out) << "THE";
  const auto said = said_by_ranks(options(), other.string(), ExitCode::kCorruptData);
  EXPECT_NE(said[0].find("digests"), std::string::npos) << said[0];
  EXPECT_EQ(said[1], said[0]);
}

TEST_F(PrepareTest, EndsWhenNothingMoves) {
  const data::FileLock lock(lock_path(), 0.0);
  const double began = monotonic_seconds();
  try {
    run_impatiently();
    FAIL() << "nobody waits for ever";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no progress"), std::string::npos) << error.what();
    EXPECT_EQ(error.exit_code(), ExitCode::kEnvironment);
  }
  EXPECT_LT(monotonic_seconds() - began, 5.0);
}

TEST_F(PrepareTest, ASignalOnOneRankEndsTheWaitOfAll) {
  const data::FileLock lock(lock_path(), 0.0);
  stop_rank_ = 1;
  stop_ = SIGTERM;
  const double began = monotonic_seconds();
  const TrainResult result = run_impatiently();
  EXPECT_EQ(result.stop_signal, SIGTERM);
  EXPECT_EQ(result.summary.steps, 0);
  EXPECT_LT(monotonic_seconds() - began, 1.0);
}

TEST_F(PrepareTest, ASignalLeavesNothingHalfDone) {
  std::ofstream(folder_ / "text" / "large.txt") << std::string(size_t{200} << 20, 'x');
  std::jthread later([this] {
    const auto begun = [this] {
      for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache" / "data")) {
        if (entry.path().extension() == ".tmp") return true;
      }
      return false;
    };
    while (!begun()) std::this_thread::yield();
    stop_ = SIGINT;
  });
  const TrainResult result = run_impatiently();
  EXPECT_EQ(result.stop_signal, SIGINT);
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache" / "data")) {
    EXPECT_EQ(entry.path().extension(), ".lock") << entry.path();
  }
}

}  // namespace
}  // namespace trireme::train
