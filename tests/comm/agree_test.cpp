// Ranks that agree: what one of them says or fails at, all hear in the same words.
#include "trireme/comm/agree.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <new>
#include <numeric>
#include <stdexcept>

#include "tests/support/spawn.h"
#include "trireme/comm/world.h"

namespace trireme::comm {
namespace {

std::shared_ptr<Group> everyone(World& world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return world.make_group("everyone", ranks);
}

TEST(Agree, AFailureElsewhereIsCaughtByItsType) {
  test::run_ranks(2, [](const std::shared_ptr<World>& world) {
    const auto group = everyone(*world);
    const auto error = world->rank() == 0 ? std::make_exception_ptr(EnvironmentError("full")) : nullptr;
    EXPECT_THROW(throw_together(*group, error, "test.op"), EnvironmentError);
  });
}

/// The error that a rank has thrown.
struct Thrown {
  bool elsewhere = false;
  ExitCode code = ExitCode::kOk;
  std::string text;
};

/// The errors that ranks throw where rank r fails with errors[r].
std::vector<Thrown> thrown_by(const std::vector<std::exception_ptr>& errors) {
  std::vector<Thrown> thrown(errors.size());
  test::run_ranks(std::ssize(errors), [&](const std::shared_ptr<World>& world) {
    const auto group = everyone(*world);
    const auto rank = static_cast<size_t>(world->rank());
    try {
      throw_together(*group, errors[rank], "test.op");
    } catch (const FailedElsewhere& error) {
      thrown[rank] = {true, error.exit_code(), error.what()};
    } catch (...) {
      const auto [code, text] = code_and_text(std::current_exception());
      thrown[rank] = {false, code, text};
    }
    EXPECT_FALSE(any_rank(*group, false)) << "the group is of further use";
  });
  return thrown;
}

template <typename E>
std::exception_ptr made(const char* text) {
  return std::make_exception_ptr(E("{}", text));
}

TEST(Agree, AnyRankIsTrueOnAllWhereItIsOnOne) {
  test::run_ranks(3, [](const std::shared_ptr<World>& world) {
    const auto group = everyone(*world);
    for (int64_t one = 0; one < 3; ++one) EXPECT_TRUE(any_rank(*group, world->rank() == one));
    EXPECT_FALSE(any_rank(*group, false));
  });
}

TEST(Agree, TheTextOfEachRankArrivesWhole) {
  const std::vector<std::string> texts = {"", std::string("\0\xff and more", 10), std::string(70'000, 'x')};
  test::run_ranks(3, [&](const std::shared_ptr<World>& world) {
    const auto group = everyone(*world);
    for (int64_t root = 0; root < 3; ++root)
      EXPECT_EQ(text_of(*group, root, texts[static_cast<size_t>(world->rank())]),
                texts[static_cast<size_t>(root)]);
  });
}

TEST(Agree, ValuesOfAllRanksArriveWhereNoneHasFailed) {
  for (const int64_t ranks : {1, 3}) {
    test::run_ranks(ranks, [&](const std::shared_ptr<World>& world) {
      const auto group = everyone(*world);
      const auto mine = static_cast<double>(world->rank());
      const auto rows = gather_or_throw(*group, {mine, 7.0}, {}, "test.op");
      ASSERT_EQ(std::ssize(rows), ranks);
      for (size_t rank = 0; rank < rows.size(); ++rank)
        EXPECT_EQ(rows[rank], (std::vector<double>{static_cast<double>(rank), 7.0}));
      throw_together(*group, {}, "test.op");
    });
  }
}

TEST(Agree, AFailureOfOneRankReachesAllInItsWords) {
  for (size_t failing = 0; failing < 3; ++failing) {
    std::vector<std::exception_ptr> errors(3);
    errors[failing] = made<DataError>("[data.x] block 7 is damaged");
    const std::vector<Thrown> thrown = thrown_by(errors);
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(thrown[rank].code, ExitCode::kCorruptData);
      EXPECT_EQ(thrown[rank].elsewhere, rank != failing);
      const std::string own = "[data.x] block 7 is damaged";
      EXPECT_EQ(thrown[rank].text,
                rank == failing ? own : fmt::format("[test.op] rank {} failed: {}", failing, own));
    }
  }
}

TEST(Agree, OfSeveralFailuresTheLowestCodeCountsOnAllRanks) {
  const std::vector<Thrown> thrown = thrown_by(
      {made<DataError>("damaged"), made<EnvironmentError>("no disk"), made<EnvironmentError>("full")});
  for (const Thrown& rank : thrown) EXPECT_EQ(rank.code, ExitCode::kEnvironment);
  EXPECT_EQ(thrown[0].text, "[test.op] rank 1 failed: no disk");
  EXPECT_EQ(thrown[1].text, "no disk");
  EXPECT_EQ(thrown[2].text, "full") << "what it failed at itself";
}

TEST(Agree, ARankAloneThrowsItsOwn) {
  const std::vector<Thrown> thrown = thrown_by({made<ConfigError>("wrong")});
  EXPECT_FALSE(thrown[0].elsewhere);
  EXPECT_EQ(thrown[0].text, "wrong");
}

TEST(Agree, ErrorsThatAreNotOursHaveACode) {
  EXPECT_EQ(code_and_text({}).first, ExitCode::kOk);
  EXPECT_EQ(code_and_text(std::make_exception_ptr(std::bad_alloc())).first, ExitCode::kOutOfMemory);
  EXPECT_EQ(code_and_text(std::make_exception_ptr(std::runtime_error("x"))),
            std::pair(ExitCode::kFailed, std::string("x")));
  EXPECT_EQ(code_and_text(std::make_exception_ptr(7)).first, ExitCode::kFailed);
}

}  // namespace
}  // namespace trireme::comm
