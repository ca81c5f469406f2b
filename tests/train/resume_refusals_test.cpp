// With what a run does not go on, because it would no longer be the same run.
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/refusal.h"
#include "tests/train/resume_fixture.h"
#include "trireme/base/error.h"

namespace trireme::train {
namespace {

TEST_F(Resume, RefusesAnotherModelAndNamesTheKeys) {
  run(2, false, 2);
  config_.model.d_ff = 64;
  config_.seed = 43;
  config_.optim.lr = 2e-2;  // may change
  try {
    run(2, true);
    FAIL() << "it was not refused";
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("seed, model.d_ff;"), std::string::npos) << message;
  }
}

TEST_F(Resume, RefusesAveragesThatWouldBeginOrEnd) {
  for (const double ema : {0.8, 0.0}) {
    std::filesystem::remove_all(checkpoints());
    config_.optim.ema = ema;
    run(2, false, 4);
    config_.optim.ema = 0.8 - ema;
    EXPECT_THROW(run(2, true), ConfigError) << "it is no damage, which would take an older checkpoint";
    test::expect_refusal([&] { run(2, true); }, {"optim.ema"});
  }
  std::filesystem::remove_all(checkpoints());
  config_.optim.ema = 0.8;
  run(2, false, 4);
  config_.optim.ema = 0.9;
  EXPECT_NO_THROW(run(2, true));
}

TEST_F(Resume, RefusesToEndBeforeItsCheckpoint) {
  run(2, false);
  config_.train.steps = 10;
  EXPECT_THROW(run(2, true), ConfigError);
  test::expect_refusal([&] { run(2, true); }, {"step 12", "step 10", "train.steps"});
}

TEST_F(Resume, RefusesOtherTextOfTheSameSize) {
  run(2, false, 2);
  const std::filesystem::path file = folder_ / "text" / "3.txt";
  const auto size = std::filesystem::file_size(file);
  std::fstream(file, std::ios::in | std::ios::out) << "THE";
  ASSERT_EQ(std::filesystem::file_size(file), size);
  test::expect_refusal([&] { run(2, true); }, {"digest", "the same data"});
  std::fstream(file, std::ios::in | std::ios::out) << "the";
  EXPECT_GT(run(2, true).summary.resumed_at, 0) << "what was written is what counts, not when";
}

TEST_F(Resume, RefusesAnotherTokenizerAndNamesBoth) {
  const std::filesystem::path fixture = TRIREME_TEXT_FIXTURES "/llama2.json";
  const std::filesystem::path mine = folder_ / "mine.json", other = folder_ / "other.json",
                              renamed = folder_ / "renamed.json";
  for (const auto& copy : {mine, other, renamed}) std::filesystem::copy_file(fixture, copy);
  std::ofstream(other, std::ios::app) << "\n";
  config_.model.vocab_size = 640;
  config_.data.tokenizer = mine.string();
  run(2, false, 2);
  config_.data.tokenizer = other.string();
  test::expect_refusal([&] { run(2, true); }, {"mine.json (", "other.json ("});
  config_.data.tokenizer = "byte";
  test::expect_refusal([&] { run(2, true); }, {"mine.json (", "is byte"});
  config_.data.tokenizer = renamed.string();
  EXPECT_GT(run(2, true).summary.resumed_at, 0) << "what the file holds is what counts, not its name";
}

}  // namespace
}  // namespace trireme::train
