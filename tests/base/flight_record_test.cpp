#include "trireme/base/flight_record.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"

namespace trireme {
namespace {

TEST(FlightRecord, HoldsWhatARankNotedThatWasKilled) {
  const FlightRecord record = FlightRecord::make(3);
  const pid_t child = ::fork();
  if (child == 0) {
    FlightRecord mine = FlightRecord::open(record.descriptor(), 1);
    mine.note_joined();
    mine.note_group("dp", {0, 1, 2});
    mine.note('i', "all_gather", 6, "dp", "blocks.0", 1000.0);
    mine.note('d', "all_gather", 6, "dp", "blocks.0", 1001.5);
    mine.note('i', "all_reduce", 7, "dp", "", 1002.0);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(WTERMSIG(status), SIGKILL);
  const std::vector<Flight> flights = record.read();
  ASSERT_EQ(flights.size(), 3u);
  EXPECT_FALSE(flights[0].joined);
  EXPECT_TRUE(flights[0].entries.empty());
  EXPECT_TRUE(flights[1].joined);
  EXPECT_EQ(flights[1].groups.at("dp"), (std::vector<int64_t>{0, 1, 2}));
  ASSERT_EQ(flights[1].entries.size(), 2u);
  const FlightEntry &first = flights[1].entries[0], &last = flights[1].entries[1];
  EXPECT_EQ(first.state, 'd') << "the end of an operation takes the place of its beginning";
  EXPECT_EQ(first.since, 1001.5);
  EXPECT_EQ(first.subject, "blocks.0");
  EXPECT_EQ(last.state, 'i');
  EXPECT_EQ(last.operation, "all_reduce");
  EXPECT_EQ(last.sequence, 7);
  EXPECT_EQ(last.group, "dp");
  EXPECT_EQ(last.subject, "");
}

TEST(FlightRecord, KeepsTheLastOperationsInTheirOrder) {
  const FlightRecord record = FlightRecord::make(1);
  FlightRecord mine = FlightRecord::open(record.descriptor(), 0);
  for (int64_t i = 1; i <= 100; ++i) mine.note('d', "all_reduce", i, "dp", "", 0.0);
  const std::vector<FlightEntry> entries = record.read()[0].entries;
  ASSERT_EQ(entries.size(), FlightRecord::kKept);
  for (size_t i = 0; i < entries.size(); ++i)
    EXPECT_EQ(entries[i].sequence, 100 - static_cast<int64_t>(FlightRecord::kKept - 1 - i));
}

TEST(FlightRecord, CutsTextsAndLeavesOutWhatDoesNotFit) {
  const FlightRecord record = FlightRecord::make(1);
  FlightRecord mine = FlightRecord::open(record.descriptor(), 0);
  const std::string longest(500, 'x');
  for (const char state : {'i', 'd'}) mine.note(state, longest, 1, longest, longest, 0.0);
  mine.note_group("huge", std::vector<int64_t>(1000, 1));
  for (int i = 0; i < 100; ++i) mine.note_group("group " + std::to_string(i), {0});
  const Flight flight = record.read()[0];
  ASSERT_EQ(flight.entries.size(), 1u) << "one operation, though its name was cut";
  EXPECT_TRUE(longest.starts_with(flight.entries[0].operation));
  EXPECT_FALSE(flight.entries[0].operation.empty());
  EXPECT_FALSE(flight.groups.contains("huge"));
  EXPECT_TRUE(flight.groups.contains("group 0"));
  EXPECT_LT(flight.groups.size(), 100u);
}

TEST(FlightRecord, KeepsTheRanksOfLargeGroups) {
  const FlightRecord record = FlightRecord::make(1);
  FlightRecord mine = FlightRecord::open(record.descriptor(), 0);
  std::map<std::string, std::vector<int64_t>> groups = {
      {"one", {7}}, {"two", {3, 5}}, {"mixed", {0, 2, 3, 9}}};
  for (int64_t rank = 0; rank < 4096; ++rank) {
    groups["all"].push_back(rank);
    if (rank % 8 == 3) groups["every eighth"].push_back(rank);
    if (rank % 512 < 64) groups["neighbours of hosts"].push_back(rank);
  }
  for (const auto& [name, ranks] : groups) mine.note_group(name, ranks);
  EXPECT_EQ(record.read()[0].groups, groups);
}

TEST(FlightRecord, RefusesDescriptorsThatAreNone) {
  const FlightRecord record = FlightRecord::make(2);
  EXPECT_THROW(FlightRecord::open(record.descriptor(), 1000), EnvironmentError) << "no such rank";
  EXPECT_THROW(FlightRecord::open(record.descriptor(), -1), EnvironmentError);
  EXPECT_THROW(FlightRecord::open(-1, 0), EnvironmentError);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_THROW(FlightRecord::open(null, 0), EnvironmentError);
  ::close(null);
  const int other = ::memfd_create("other", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(other, 1 << 20), 0);
  EXPECT_THROW(FlightRecord::open(other, 0), EnvironmentError) << "of somebody else";
  ::close(other);
}

TEST(FlightRecord, TheLauncherCountsTheSignsOfLifeOfEachRank) {
  const FlightRecord record = FlightRecord::make(3);
  FlightRecord mine = FlightRecord::open(record.descriptor(), 1);
  EXPECT_EQ(record.all_beats(), (std::vector<uint64_t>{0, 0, 0}));
  mine.note('i', "all_reduce", 1, "dp", "", 0.0);
  static std::atomic<uint64_t> elsewhere{0};
  count_beats_in(mine.beats());
  beat();
  count_beats_in(elsewhere);
  beat();
  EXPECT_EQ(record.all_beats(), (std::vector<uint64_t>{0, 2, 0}));
  EXPECT_EQ(elsewhere, 1u);
}

}  // namespace
}  // namespace trireme
