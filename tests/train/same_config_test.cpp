// Hosts that were given different configs or images do not train together.
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "tests/support/refusal.h"
#include "tests/train/image_fixture.h"
#include "trireme/base/clock.h"
#include "trireme/train/same_config.h"

namespace trireme::train {
namespace {

/// What each rank ends with when the last one has `other` config; empty: with success.
std::vector<std::string> said_by_ranks(const TrainOptions& options, const plan::Config& other, int64_t ranks,
                                       ExitCode code) {
  std::vector<std::string> said(static_cast<size_t>(ranks));
  test::run_ranks(ranks, [&](const std::shared_ptr<comm::World>& world) {
    TrainOptions mine = options;
    if (world->rank() == ranks - 1) mine.config = other;
    if (world->rank() > 0) mine.sinks.clear();
    try {
      train(mine, world);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), code);
      said[static_cast<size_t>(world->rank())] = error.what();
    }
  });
  return said;
}

TEST_F(TrainerTest, RanksWithDifferentConfigsAreRefusedAlikeWithBothValues) {
  plan::Config other = config_;
  other.optim.lr = 0.5;
  other.seed = 43;
  other.parallel.pp = 2;
  const double began = monotonic_seconds();
  const auto said = said_by_ranks(options(), other, 4, ExitCode::kUsage);
  EXPECT_LT(monotonic_seconds() - began, 5.0) << "nobody waits for a deadline";
  test::expect_mentions(said[0], {"rank 3", "optim.lr=0.5 instead of 0.01", "seed=43 instead of 42",
                                  "parallel.pp=2 instead of 1", "3 of 4 ranks"});
  for (const std::string& one : said) EXPECT_EQ(one, said[0]);
  EXPECT_TRUE(recorder_.steps.empty());
}

TEST_F(TrainerTest, RanksMayHaveTheirDataElsewhere) {
  config_.train.steps = 1;
  std::filesystem::copy(folder_ / "text", folder_ / "mounted");
  plan::Config other = config_;
  other.name = "elsewhere";
  other.data.path = (folder_ / "mounted").string();
  other.train.log_every = 3;
  for (const std::string& one : said_by_ranks(options(), other, 2, ExitCode::kOk)) EXPECT_EQ(one, "");
}

/// Gives the field another value; false: there is no telling which.
bool change(const plan::Field& field) {
  if (auto* const number = std::get_if<int64_t*>(&field.value)) return ++**number, true;
  if (auto* const number = std::get_if<double*>(&field.value)) return **number += 0.25, true;
  if (auto* const flag = std::get_if<bool*>(&field.value)) return **flag = !**flag, true;
  if (auto* const text = std::get_if<std::string*>(&field.value)) return **text += "x", true;
  const auto before = plan::value_of(field);
  const plan::WordRef& word = std::get<plan::WordRef>(field.value);
  for (const std::string& choice : field.choices)
    if (word.write(word.member, choice) && plan::value_of(field) != before) return true;
  return false;
}

TEST(SameConfig, ComparesEveryKeyThatIsNotAHostsOwn) {
  const std::set<std::string> own = {
      "name",         "device",          "data.path",     "data.tokenizer", "data.chat_template",
      "data.threads", "train.log_every", "comm.timeout_s"};
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    plan::Config same;
    const size_t keys = plan::fields(same).size();
    for (size_t key = 0; key < keys; ++key) {
      plan::Config config;
      const plan::Field field = plan::fields(config)[key];
      if (!change(field)) continue;
      const auto compare = [&] { check_same_config(world->rank() == 0 ? same : config, *world); };
      if (own.contains(field.key)) {
        EXPECT_NO_THROW(compare()) << field.key;
      } else {
        test::expect_refusal(compare, {field.key + "="});
      }
    }
  });
}

TEST_F(ImageRuns, RanksWithOtherPixelsAreRefused) {
  for (const char* split : {"train", "t10k"}) {
    SCOPED_TRACE(split);
    plan::Config other = config_;
    const std::filesystem::path folder = folder_ / (std::string("not-the-same-") + split);
    std::filesystem::copy(config_.data.path, folder);
    std::fstream file(folder / (std::string(split) + "-images-idx3-ubyte"),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(255));
    file.close();
    other.data.path = folder.string();
    const auto said = said_by_ranks(options(), other, 2, ExitCode::kCorruptData);
    test::expect_mentions(said[0], {"rank 1 has 22 + 10 images", "digest"});
    EXPECT_EQ(said[1], said[0]);
  }
}

}  // namespace
}  // namespace trireme::train
