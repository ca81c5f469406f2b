#include "trireme/checkpoint/safetensors_header.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/kernels/device.h"

namespace trireme::checkpoint {
namespace {

constexpr const char* kPath = "model.safetensors";

SafetensorsHeader parse(std::string_view json, int64_t data_bytes) {
  return parse_safetensors_header(json, data_bytes, kPath);
}

TEST(SafetensorsHeader, ReadsWhatTheReferenceWrites) {
  const SafetensorsHeader header =
      parse(R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
            R"("b":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
            R"("none":{"data_offsets":[16,16],"shape":[0,7],"dtype":"I64"}}   )",
            16);
  EXPECT_EQ(header.metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  ASSERT_EQ(header.tensors.size(), 3u);
  const HeaderEntry& w = header.tensors.at("w");
  EXPECT_EQ(w.dtype, "BF16");
  EXPECT_EQ(w.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(w.begin, 4);
  EXPECT_EQ(w.end, 16);
  EXPECT_TRUE(header.tensors.at("b").shape.empty());
}

TEST(SafetensorsHeader, AcceptsNoTensorsAndEveryDtype) {
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  const std::pair<const char*, int64_t> sizes[] = {
      {"F64", 8},     {"F32", 4},     {"F16", 2},         {"BF16", 2},       {"I64", 8},
      {"I32", 4},     {"I16", 2},     {"I8", 1},          {"U64", 8},        {"U32", 4},
      {"U16", 2},     {"U8", 1},      {"BOOL", 1},        {"C64", 8},        {"F8_E4M3", 1},
      {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}};
  for (const auto& [dtype, size] : sizes) {
    EXPECT_EQ(safetensors_itemsize(dtype), size);
    const std::string json =
        fmt::format(R"({{"t":{{"dtype":"{}","shape":[3],"data_offsets":[0,{}]}}}})", dtype, 3 * size);
    EXPECT_NO_THROW(parse(json, 3 * size)) << dtype;
    EXPECT_THROW(parse(json, 3 * size + 1), DataError) << dtype;
  }
}

/// As the reference implementation does.
TEST(SafetensorsHeader, PassesOverWhatTheFormatDoesNotKnow) {
  const SafetensorsHeader header = parse(
      " \n\t"
      R"({"__metadata__":null,"a":{"more":{"x":[1,null,{"y":-1.5}],"dtype":"F32"},"dtype":"U8",)"
      R"("note":"n","shape":[2],"also":[[],true],"data_offsets":[0,2],"note":2},)"
      R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
      3);
  EXPECT_TRUE(header.metadata.empty());
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors.at("a").dtype, "U8");
  EXPECT_EQ(header.tensors.at("a").shape, std::vector<int64_t>{2});
  EXPECT_EQ(header.tensors.at("b").begin, 2);
}

/// Two numbers of F4 make a byte, four of F6 three.
TEST(SafetensorsHeader, TakesDtypesThatAreNotMadeUpOfBytes) {
  const std::string json = R"({"f4":{"dtype":"F4","shape":[3,4],"data_offsets":[0,6]},)"
                           R"("f6":{"dtype":"F6_E2M3","shape":[2,4],"data_offsets":[6,12]}})";
  const SafetensorsHeader header = parse(json, 12);
  EXPECT_EQ(header.tensors.at("f4").shape, (std::vector<int64_t>{3, 2})) << "pairs, as torch has them";
  EXPECT_EQ(safetensors_itemsize("F4"), 1);
  EXPECT_EQ(header.tensors.at("f6").shape, (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(safetensors_itemsize("F6_E2M3"), 0);
  EXPECT_EQ(safetensors_bits("F6_E3M2"), 6);
  EXPECT_EQ(format_safetensors_header(header), json);
}

/// A header of one tensor 't' with the given fields.
std::string one(std::string_view fields) {
  return fmt::format(R"({{"t":{{{}}}}})", fields);
}

TEST(SafetensorsHeader, RefusesHostileHeadersAndSaysWhy) {
  constexpr int64_t kData = 8;  // of a valid header: {"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}
  const std::string valid = one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])");
  ASSERT_NO_THROW(parse(valid, kData));
  const std::string deep(100000, '[');
  const struct {
    std::string json;
    const char* reason;
  } cases[] = {
      {"", "does not start"},
      {"[]", "does not start"},
      {" ", "does not start"},
      {"x" + valid, "does not start"},
      {"{", "parse error"},
      {valid + "x", "parse error"},
      {valid + valid, "parse error"},
      {valid + std::string(1, '\0'), "zero byte"},
      {valid + std::string("\0 hidden", 8), "zero byte"},
      {"{\"\xff\":{}}", "parse error"},
      {"{}", "the tensors take 0 bytes, but the file has 8"},
      {R"({"t":1})", "unexpected number"},
      {R"({"t":"F32"})", "unexpected string"},
      {R"({"t":null})", "null"},
      {R"({"t":true})", "boolean"},
      {R"({"t":[]})", "unexpected array"},
      {R"({"t":{}})", "needs dtype, shape and data_offsets"},
      {R"({"t":)" + deep, "unexpected array"},
      {one(R"("dtype":"F32","shape":)" + deep), "unexpected array"},
      {one(R"("dtype":{"a":{}},"shape":[2],"data_offsets":[0,8])"), "nested deeper"},
      {one(R"("dtype":"F32","shape":[{}],"data_offsets":[0,8])"), "nested deeper"},
      {one(R"("dtype":"F32","shape":[2])"), "needs dtype"},
      {one(R"("dtype":"F32","data_offsets":[0,8])"), "needs dtype"},
      {one(R"("shape":[2],"data_offsets":[0,8])"), "needs dtype"},
      {one(R"("extra":1)"), "needs dtype"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"extra":)" + deep), "nested deeper"},
      {one(R"("dtype":"F4","shape":[16,1],"data_offsets":[0,8])"), "not even"},
      {one(R"("dtype":"F4","shape":[],"data_offsets":[0,8])"), "not even"},
      {one(R"("dtype":"F6_E2M3","shape":[11],"data_offsets":[0,8])"), "ends within a byte"},
      {one(R"("dtype":"C128","shape":[1],"data_offsets":[0,8])"), "'C128'"},
      {one(R"("dtype":null,"shape":[2],"data_offsets":[0,8])"), "null"},
      {R"({"__metadata__":{"a":null}})", "null"},
      {R"({"__metadata__":null,"__metadata__":{}})", "'__metadata__' is listed twice"},
      {one(R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])"), "'dtype' twice"},
      {one(R"("dtype":"F31","shape":[2],"data_offsets":[0,8])"), "'F31'"},
      {one(R"("dtype":"f32","shape":[2],"data_offsets":[0,8])"), "'f32'"},
      {one(R"("dtype":4,"shape":[2],"data_offsets":[0,8])"), "unexpected number"},
      {one(R"("dtype":["F32"],"shape":[2],"data_offsets":[0,8])"), "unexpected array"},
      {one(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"), "unexpected number"},
      {one(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"), "unexpected string"},
      {one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), "negative"},
      {one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), "fractional"},
      {one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])"), "beyond 63 bits"},
      {one(R"("dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8])"), "fractional"},
      {one(R"("dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,8])"),
       "overflows"},
      {one(R"("dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8])"), "overflows"},
      {one(R"("dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0])"), "overflows"},
      {one(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,8])"), "overflows"},
      {one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), "needs 12 bytes"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "[8, 0]"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), "two numbers"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4,8])"), "two numbers"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[])"), "two numbers"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"), "starts at byte 4"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"),
       "the tensors take 4 bytes, but the file has 8"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
       R"("t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "'t' is listed twice"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "starts at byte 4"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "starts at byte 0"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}})",
       "starts at byte 3"},
      {R"({"__metadata__":{"a":1}})", "unexpected number"},
      {R"({"__metadata__":{"a":["b"]}})", "unexpected array"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", "'a' twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", "'__metadata__' is listed twice"},
      {"{\"" + std::string(1025, 'n') + "\":{}}", "longer than 1024"},
  };
  for (const auto& hostile : cases) {
    const std::string message = testing::message_of<DataError>([&] { parse(hostile.json, kData); });
    EXPECT_NE(message.find(hostile.reason), std::string::npos)
        << hostile.json.substr(0, 200) << "\n  -> " << message;
    EXPECT_NE(message.find(kPath), std::string::npos) << message;
    EXPECT_LT(message.size(), 1000u);
  }
}

TEST(SafetensorsHeader, RefusesMoreThan64Dimensions) {
  std::string ones = "1";
  for (int i = 1; i < 64; ++i) ones += ",1";
  const auto with_shape = [](const std::string& dims) {
    return one(fmt::format(R"("dtype":"U8","shape":[{}],"data_offsets":[0,1])", dims));
  };
  EXPECT_NO_THROW(parse(with_shape(ones), 1));
  EXPECT_THROW(parse(with_shape(ones + ",1"), 1), DataError);
}

TEST(SafetensorsHeader, FormatsInOrderOfOffsetsAndReadsItselfBack) {
  SafetensorsHeader header{.tensors = {}, .metadata = {{"a\"b", "\n"}}};
  header.tensors["second"] = {.dtype = "I16", .shape = {2, 1}, .begin = 4, .end = 8};
  header.tensors["z \\ first"] = {.dtype = "F32", .shape = {}, .begin = 0, .end = 4};
  const std::string json = format_safetensors_header(header);
  EXPECT_EQ(json,
            R"({"__metadata__":{"a\"b":"\n"},"z \\ first":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
            R"("second":{"dtype":"I16","shape":[2,1],"data_offsets":[4,8]}})");
  const SafetensorsHeader back = parse(json, 8);
  EXPECT_EQ(back.metadata, header.metadata);
  EXPECT_EQ(format_safetensors_header(back), json);
}

/// Whatever is accepted covers the data exactly, entry after entry.
void expect_sound(const SafetensorsHeader& header, int64_t data_bytes) {
  std::map<std::pair<int64_t, int64_t>, int> ranges;
  for (const auto& [name, entry] : header.tensors) {
    int64_t bytes = safetensors_itemsize(entry.dtype);
    for (const int64_t dim : entry.shape) bytes *= dim;
    ASSERT_EQ(entry.end - entry.begin, bytes);
    ++ranges[{entry.begin, entry.end}];
  }
  int64_t end = 0;
  for (const auto& [range, count] : ranges) {
    ASSERT_EQ(range.first, end);
    ASSERT_TRUE(count == 1 || range.first == range.second);
    end = range.second;
  }
  ASSERT_EQ(end, data_bytes);
}

TEST(SafetensorsHeader, AcceptsOnlySoundOnesAmongMutations) {
  const std::string valid =
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"I8","shape":[8],"data_offsets":[24,32]},)"
      R"("c":{"dtype":"U8","shape":[0],"data_offsets":[32,32]}})";
  constexpr std::string_view kAlphabet = R"({}[]":,0123456789abFIU _-.e\)";
  int accepted = 0;
  for (uint64_t round = 0; round < 20000; ++round) {
    std::string mutated = valid;
    for (uint64_t edit = 0; edit <= round % 3; ++edit) {
      const uint64_t random = mix64(round, edit);
      mutated[random % mutated.size()] = kAlphabet[(random >> 32) % kAlphabet.size()];
    }
    try {
      expect_sound(parse(mutated, 32), 32);
      ++accepted;
    } catch (const DataError&) {
    }
  }
  EXPECT_GT(accepted, 100);    // changed names and metadata
  EXPECT_LT(accepted, 10000);  // changed structure and numbers
}

/// What parsing `json` adds to the largest resident set of a process of its own, in MiB; -1 unless DataError
/// was thrown.
int mib_to_refuse(const std::string& json) {
  int channel[2];
  if (::pipe(channel) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    const int64_t before = kernels::resident_peak();
    int mib = -1;
    try {
      parse(json, 0);
    } catch (const DataError&) {
      mib = static_cast<int>((kernels::resident_peak() - before) >> 20);
    }
    [[maybe_unused]] const ssize_t written = ::write(channel[1], &mib, sizeof mib);
    ::_exit(0);
  }
  int mib = -1;
  ::close(channel[1]);
  [[maybe_unused]] const ssize_t got = ::read(channel[0], &mib, sizeof mib);
  ::close(channel[0]);
  ::waitpid(child, nullptr, 0);
  return mib;
}

/// 82 MB of metadata that is no error but its size.
std::string hostile_metadata(size_t value_bytes) {
  constexpr size_t kBytes = 82'000'000;
  std::string json;
  json.reserve(kBytes + value_bytes + 100);
  json = R"({"__metadata__":{)";
  for (int64_t i = 0; json.size() < kBytes; ++i) {
    json += fmt::format(R"("{:x}":")", i);
    json.append(value_bytes, 'v');
    json += "\",";
  }
  json.back() = '}';
  return json + "}";
}

TEST(SafetensorsHeader, RefusesLargeMetadataWithoutTakingMemoryForIt) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps freed memory";
#endif
  for (const size_t value_bytes : {size_t{0}, size_t{1000}, size_t{81'000'000}}) {
    const int mib = mib_to_refuse(hostile_metadata(value_bytes));
    EXPECT_GE(mib, 0) << value_bytes;
    EXPECT_LE(mib, 300) << "values of " << value_bytes;  // one value of 81 MB is read before it is refused
  }
}

}  // namespace
}  // namespace trireme::checkpoint
