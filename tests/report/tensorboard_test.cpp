// Event files are read back here by a reader of its own, which knows only TFRecord framing and the protobuf
// wire format: wire types 0 (varint), 1 (64 bits), 2 (length-delimited) and 5 (32 bits).
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "tests/report/temporary_folder.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

/// Bit by bit, without tables: an implementation that shares nothing with the one under test.
uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool carry = ((crc ^ (static_cast<unsigned char>(byte) >> bit)) & 1) != 0;
      crc = (crc >> 1) ^ (carry ? 0x82f63b78u : 0);
    }
  }
  return ~crc;
}

uint32_t masked(std::string_view bytes) {
  return std::rotr(slow_crc32c(bytes), 15) + 0xa282ead8u;
}

template <typename Number>
Number take(std::string_view& bytes) {
  Number number;
  if (bytes.size() < sizeof number) throw std::runtime_error("truncated");
  std::memcpy(&number, bytes.data(), sizeof number);
  bytes.remove_prefix(sizeof number);
  return number;
}

std::string_view take_bytes(std::string_view& bytes, uint64_t count) {
  if (bytes.size() < count) throw std::runtime_error("truncated");
  const std::string_view taken = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return taken;
}

/// The records of a file; throws when a length, a checksum or the end does not fit.
std::vector<std::string> read_records(const std::string& file) {
  std::vector<std::string> records;
  std::string_view rest = file;
  while (!rest.empty()) {
    const std::string_view header = rest.substr(0, 8);
    const auto length = take<uint64_t>(rest);
    if (take<uint32_t>(rest) != masked(header)) throw std::runtime_error("wrong checksum of a length");
    const std::string_view data = take_bytes(rest, length);
    if (take<uint32_t>(rest) != masked(data)) throw std::runtime_error("wrong checksum of data");
    records.emplace_back(data);
  }
  return records;
}

uint64_t take_varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = take<uint8_t>(bytes);
    value |= uint64_t{byte & 0x7fu} << shift;
    if ((byte & 0x80) == 0) return value;
  }
}

/// Field number -> its values: numbers as their bits, messages and strings as bytes.
struct Message {
  std::multimap<uint64_t, uint64_t> numbers;
  std::multimap<uint64_t, std::string> bytes;
};

Message parse(std::string_view data) {
  Message message;
  while (!data.empty()) {
    const uint64_t tag = take_varint(data);
    switch (tag & 7) {
      case 0:
        message.numbers.emplace(tag >> 3, take_varint(data));
        break;
      case 1:
        message.numbers.emplace(tag >> 3, take<uint64_t>(data));
        break;
      case 2:
        message.bytes.emplace(tag >> 3, take_bytes(data, take_varint(data)));
        break;
      case 5:
        message.numbers.emplace(tag >> 3, take<uint32_t>(data));
        break;
      default:
        throw std::runtime_error("unknown wire type");
    }
  }
  return message;
}

struct Event {
  double wall_time = 0.0;
  int64_t step = 0;
  std::string file_version;
  std::map<std::string, float> scalars;
};

// Numbers from event.proto and summary.proto: Event{1 wall_time, 2 step, 3 file_version, 5 summary},
// Summary{1 value}, Value{1 tag, 2 simple_value}.
Event read_event(const std::string& record) {
  const Message message = parse(record);
  Event event;
  event.wall_time = std::bit_cast<double>(message.numbers.find(1)->second);
  if (const auto step = message.numbers.find(2); step != message.numbers.end()) {
    event.step = static_cast<int64_t>(step->second);
  }
  if (const auto version = message.bytes.find(3); version != message.bytes.end())
    event.file_version = version->second;
  const auto summary = message.bytes.find(5);
  if (summary == message.bytes.end()) return event;
  const Message values = parse(summary->second);
  for (auto [value, end] = values.bytes.equal_range(1); value != end; ++value) {
    const Message fields = parse(value->second);
    event.scalars[fields.bytes.find(1)->second] =
        std::bit_cast<float>(static_cast<uint32_t>(fields.numbers.find(2)->second));
  }
  return event;
}

std::string only_event_file(const RunDirectory& run) {
  std::string path;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(run.file("tensorboard"))) {
    path = entry.path().string();
    ++files;
  }
  EXPECT_EQ(files, 1);
  EXPECT_NE(path.find("/events.out.tfevents."), std::string::npos) << path;
  return path;
}

std::vector<Event> read_events(const RunDirectory& run) {
  std::vector<Event> events;
  for (const std::string& record : read_records(read_file(only_event_file(run))))
    events.push_back(read_event(record));
  return events;
}

StepRecord scalars_of_step(int64_t number) {
  return {.step = number,
          .loss = 5.5 / static_cast<double>(number),
          .grad_norm = 1.25,
          .lr = 3e-4,
          .tokens = 100,
          .tokens_per_s = 12500.0,
          .step_ms = 48.5,
          .peak_bytes = int64_t{3} << 30,
          .reserved_bytes = 0,
          .val_loss = {}};
}

TEST(Tensorboard, FirstRecordIsTheFileVersion) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  std::filesystem::remove(run.file("tensorboard"));
  const auto sink = make_tensorboard_sink(run);
  EXPECT_FALSE(std::filesystem::exists(run.file("tensorboard"))) << "the run may be refused yet";
  sink->begin(1);
  const auto events = read_events(run);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_NEAR(events[0].wall_time, static_cast<double>(std::time(nullptr)), 60.0);
}

TEST(Tensorboard, EveryStepIsThereBeforeTheSinkIsClosed) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto sink = make_tensorboard_sink(run);
  for (int64_t i = 1; i <= 300; ++i) {  // steps beyond 127 take a varint of two bytes
    sink->record(scalars_of_step(i));
    if (i % 100 != 1) continue;
    ASSERT_EQ(read_events(run).size(), static_cast<size_t>(i) + 1);
  }
  const auto events = read_events(run);
  for (int64_t i = 1; i <= 300; ++i) {
    const Event& event = events[static_cast<size_t>(i)];
    EXPECT_EQ(event.step, i);
    EXPECT_EQ(event.scalars.at("loss"), static_cast<float>(5.5 / static_cast<double>(i)));
    EXPECT_LE(events[static_cast<size_t>(i - 1)].wall_time, event.wall_time);
  }
}

TEST(Tensorboard, HoldsTheScalarsOfTheFormat) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto sink = make_tensorboard_sink(run);
  StepRecord validated = scalars_of_step(2);
  validated.val_loss = 2.75;
  validated.tflops_per_rank = 0.25;
  validated.communication_ms = 10.0;
  validated.exposed_ms = 4.85;
  sink->record(scalars_of_step(1));
  sink->record(validated);

  std::map<std::string, float> expected = {{"loss", 5.5f},
                                           {"grad_norm", 1.25f},
                                           {"lr", 3e-4f},
                                           {"tokens_per_s", 12500.0f},
                                           {"step_ms", 48.5f},
                                           {"steps_per_s", 1000.0f / 48.5f},
                                           {"peak_bytes", 3221225472.0f}};
  const auto events = read_events(run);
  EXPECT_EQ(events.at(1).scalars, expected);
  expected["loss"] = 2.75f;
  expected["val_loss"] = 2.75f;
  expected["tflops_per_rank"] = 0.25f;
  expected["communication_ms"] = 10.0f;
  expected["exposed_ms"] = 4.85f;
  expected["communication_share"] = static_cast<float>(4.85 / 48.5);
  EXPECT_EQ(events.at(2).scalars, expected);
}

TEST(Tensorboard, KeepsNonFiniteNumbers) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto sink = make_tensorboard_sink(run);
  StepRecord record = scalars_of_step(1);
  record.loss = std::numeric_limits<double>::quiet_NaN();
  record.grad_norm = std::numeric_limits<double>::infinity();
  sink->record(record);
  const Event event = read_events(run).at(1);
  EXPECT_TRUE(std::isnan(event.scalars.at("loss")));
  EXPECT_EQ(event.scalars.at("grad_norm"), std::numeric_limits<float>::infinity());
}

// The reader must be able to fail, else the tests above show nothing.
TEST(Tensorboard, ReaderOfThisTestNoticesDamage) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  make_tensorboard_sink(run)->record(scalars_of_step(1));
  const std::string file = read_file(only_event_file(run));
  for (const size_t position : {size_t{0}, size_t{9}, size_t{15}, file.size() - 1}) {
    std::string damaged = file;
    damaged[position] = static_cast<char>(damaged[position] ^ 4);
    EXPECT_THROW(read_records(damaged), std::runtime_error) << position;
  }
  EXPECT_THROW(read_records(file.substr(0, file.size() - 1)), std::runtime_error);
}

}  // namespace
}  // namespace trireme::report
