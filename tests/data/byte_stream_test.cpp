// Packed files as streams: members and frames follow each other, and what is cut off or stands behind them is
// not taken for text.
#include "trireme/data/byte_stream.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"

namespace trireme::data {
namespace {

using testing::Scratch;

/// The text of a stream, read by `step` bytes.
[[maybe_unused]] std::string text_of(std::unique_ptr<ByteStream> stream, size_t step = 1000) {
  std::string text, part(step, '\0');
  while (const size_t count = stream->read(part)) text.append(part, 0, count);
  return text;
}

#ifdef TRIREME_HAS_ZLIB

/// 'gzip -n' of "oars\n".
const std::string kMember(
    "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xcb\x4f\x2c\x2a\xe6\x02\x00\xf2\xf8\x68\xed\x05"
    "\x00\x00\x00",
    25);

std::string gzip_text(const Scratch& scratch, const std::string& bytes, size_t step = 1000) {
  return text_of(open_gzip(scratch.write("a.gz", bytes)), step);
}

TEST(GzipStream, ReadsMembersAndIgnoresZerosBehindThem) {
  const Scratch scratch;
  for (const size_t step : {1, 4, 1000}) {
    EXPECT_EQ(gzip_text(scratch, kMember, step), "oars\n");
    EXPECT_EQ(gzip_text(scratch, kMember + kMember + kMember, step), "oars\noars\noars\n");
    EXPECT_EQ(gzip_text(scratch, kMember + kMember + std::string(1 << 20, '\0'), step), "oars\noars\n");
  }
}

TEST(GzipStream, RefusesWhatStandsBehindItsMembers) {
  const Scratch scratch;
  for (const std::string& garbage : {std::string("x"), std::string(700, '\0') + "x", "\n" + kMember,
                                     std::string(3, '\0') + kMember, std::string(1 << 20, 'x')}) {
    const std::string message =
        testing::message_of<DataError>([&] { gzip_text(scratch, kMember + kMember + garbage); });
    EXPECT_NE(message.find("a.gz has bytes behind the end of its gzip data at byte 50"), std::string::npos)
        << message;
  }
  EXPECT_NE(testing::message_of<DataError>([&] { gzip_text(scratch, kMember + "\x1fx"); }).find("is damaged"),
            std::string::npos);
}

TEST(GzipStream, RefusesEachPlaceWhereItIsCutOff) {
  const Scratch scratch;
  for (size_t size = 1; size < kMember.size(); ++size) {
    for (const std::string& before : {std::string(), kMember}) {
      const std::string message =
          testing::message_of<DataError>([&] { gzip_text(scratch, before + kMember.substr(0, size)); });
      EXPECT_NE(message.find("a.gz is truncated"), std::string::npos) << size << message;
    }
  }
}

TEST(GzipStream, RefusesDamageAndOtherFormats) {
  const Scratch scratch;
  std::string damaged = kMember;
  damaged[damaged.size() - 6] ^= 0x55;  // of the checksum
  const auto refused = [&](const std::string& bytes, const char* said) {
    const std::string message = testing::message_of<DataError>([&] { gzip_text(scratch, bytes); });
    EXPECT_NE(message.find(said), std::string::npos) << message;
  };
  refused(damaged, "is damaged near byte");
  refused("plain text", "is not packed by gzip");
  refused("\x1f plain text", "is not packed by gzip");
}

#endif

/// A frame of zstd with a window of 2^`window_log` bytes whose blocks are `texts` as they are (RFC 8878).
std::string frame(const std::vector<std::string>& texts, int window_log = 10) {
  std::string bytes("\x28\xb5\x2f\xfd\x00", 5);
  bytes += static_cast<char>((window_log - 10) << 3);
  for (size_t i = 0; i < texts.size(); ++i) {
    const size_t header = texts[i].size() << 3 | (i + 1 == texts.size() ? 1 : 0);
    for (const int shift : {0, 8, 16}) bytes += static_cast<char>(header >> shift & 0xff);
    bytes += texts[i];
  }
  return bytes;
}

#ifdef TRIREME_HAS_ZSTD

std::string zstd_text(const Scratch& scratch, const std::string& bytes, size_t step = 1000) {
  return text_of(open_zstd(scratch.write("a.zst", bytes)), step);
}

TEST(ZstdStream, ReadsWhatTheCommandWrites) {
  // 'zstd' of {"text":"oars"} and a line break.
  static constexpr unsigned char kFrame[] = {0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x58, 0x81, 0x00, 0x00, 0x7b,
                                             0x22, 0x74, 0x65, 0x78, 0x74, 0x22, 0x3a, 0x22, 0x6f, 0x61,
                                             0x72, 0x73, 0x22, 0x7d, 0x0a, 0xdc, 0xf2, 0x74, 0xa8};
  const std::string bytes(reinterpret_cast<const char*>(kFrame), sizeof kFrame);
  const Scratch scratch;
  for (const size_t step : {1, 5, 1000}) {
    EXPECT_EQ(zstd_text(scratch, bytes, step), "{\"text\":\"oars\"}\n");
    EXPECT_EQ(zstd_text(scratch, bytes + bytes, step), "{\"text\":\"oars\"}\n{\"text\":\"oars\"}\n");
  }
}

TEST(ZstdStream, ReadsFramesOneAfterAnother) {
  const Scratch scratch;
  const std::string skipped(
      "\x50\x2a\x4d\x18\x03\x00\x00\x00"
      "xyz",
      11);
  std::string many;
  for (int i = 0; i < 30'000; ++i) many += frame({"a", "b"});  // more than a buffer
  for (const size_t step : {1, 3, 1000}) {
    EXPECT_EQ(zstd_text(scratch, frame({"one", "two"}) + skipped + frame({"", "three"}) + frame({""}), step),
              "onetwothree");
    EXPECT_EQ(zstd_text(scratch, many, step).size(), 60'000U);
  }
}

TEST(ZstdStream, RefusesWhatIsCutOffOrNoFrame) {
  const Scratch scratch;
  const std::string whole = frame({"one", "two"});
  for (size_t size = 1; size < whole.size(); ++size) {
    const std::string message =
        testing::message_of<DataError>([&] { zstd_text(scratch, whole + whole.substr(0, size)); });
    EXPECT_NE(message.find("a.zst is truncated"), std::string::npos) << size << message;
  }
  for (const std::string& bytes : {whole + "garbage", std::string("plain text")}) {
    const std::string message = testing::message_of<DataError>([&] { zstd_text(scratch, bytes); });
    EXPECT_NE(message.find("a.zst is damaged near byte"), std::string::npos) << message;
  }
}

TEST(ZstdStream, ReadsWindowsOfUpToTwoGibibytes) {
  const Scratch scratch;
  for (const int window_log : {23, 27, 28, 31})
    EXPECT_EQ(zstd_text(scratch, frame({"one", "two"}, window_log)), "onetwo") << window_log;
  const std::string message = testing::message_of<DataError>([&] { zstd_text(scratch, frame({"one"}, 32)); });
  EXPECT_NE(message.find("a window of more than 2.00 GiB of memory"), std::string::npos) << message;
  EXPECT_NE(message.find("zstd --long=31 or less"), std::string::npos) << message;
}

#else

TEST(ZstdStream, IsRefusedWithTheWayOut) {
  const Scratch scratch;
  const std::string path = scratch.write("a.zst", frame({"one"}));
  const std::string message = testing::message_of<EnvironmentError>([&] { open_zstd(path); });
  EXPECT_NE(message.find("unpack it with zstd -d"), std::string::npos) << message;
}

#endif

}  // namespace
}  // namespace trireme::data
