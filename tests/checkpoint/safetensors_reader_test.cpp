#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme::checkpoint {
namespace {

using testing::Scratch;

/// A file by the letter of the format: length, JSON, data.
std::string file_of(std::string_view json, std::string_view data) {
  const uint64_t length = json.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(json).append(data);
}

constexpr std::string_view kJson =
    R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
    R"("n":{"dtype":"I16","shape":[],"data_offsets":[8,10]},)"
    R"("flags":{"dtype":"BOOL","shape":[2],"data_offsets":[10,12]}} )";
const std::string kData("\x00\x00\x80\x3f\x00\x00\x00\xc0\xfe\xff\x01\x00",
                        12);  // 1.0, -2.0; -2; true, false

TEST(SafetensorsReader, ReadsAFileBuiltByHand) {
  const Scratch scratch;
  const SafetensorsReader reader(scratch.write("m.safetensors", file_of(kJson, kData)));
  EXPECT_EQ(reader.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  ASSERT_EQ(reader.tensors().size(), 3u);
  EXPECT_EQ(reader.tensors().at("w").dtype, at::kFloat);
  EXPECT_EQ(reader.tensors().at("w").shape, (std::vector<int64_t>{2, 1}));
  EXPECT_TRUE(at::equal(reader.read("w"), at::tensor({1.0f, -2.0f}).reshape({2, 1})));
  EXPECT_EQ(reader.read("n").item<int16_t>(), -2);
  EXPECT_EQ(reader.read("n").dim(), 0);
  EXPECT_TRUE(at::equal(reader.read("flags"), at::tensor({1, 0}).to(at::kBool)));
}

/// Every dtype of torch that the format has, by its bytes.
TEST(SafetensorsReader, ReadsBackEveryDtypeThatTheWriterTakes) {
  const Scratch scratch;
  const std::pair<at::ScalarType, const char*> dtypes[] = {
      {at::kComplexFloat, "C64"},
      {at::ScalarType::UInt16, "U16"},
      {at::ScalarType::UInt32, "U32"},
      {at::ScalarType::UInt64, "U64"},
      {at::ScalarType::Float8_e4m3fn, "F8_E4M3"},
      {at::ScalarType::Float8_e5m2, "F8_E5M2"},
      {at::ScalarType::Float8_e8m0fnu, "F8_E8M0"},
      {at::ScalarType::Float8_e4m3fnuz, "F8_E4M3FNUZ"},
      {at::ScalarType::Float8_e5m2fnuz, "F8_E5M2FNUZ"},
      {at::ScalarType::Float4_e2m1fn_x2, "F4"},
  };
  for (const auto& [dtype, name] : dtypes) {
    EXPECT_EQ(safetensors_dtype(dtype, "t"), name);
    const at::Tensor bytes = at::arange(48, at::kByte);
    const at::Tensor values = bytes.view(dtype).view({3, -1});
    const std::string path = scratch.path(std::string(name) + ".safetensors");
    SafetensorsWriter writer(path, {{"t", {dtype, values.sizes().vec()}}}, {});
    writer.write("t", values);
    writer.commit();
    const SafetensorsReader reader(path);
    EXPECT_EQ(reader.tensors().at("t").dtype, dtype);
    const at::Tensor back = reader.read("t");
    EXPECT_EQ(back.scalar_type(), dtype) << name;
    EXPECT_EQ(back.sizes(), values.sizes()) << name;
    EXPECT_TRUE(at::equal(back.view(at::kByte).flatten(), bytes)) << name;
  }
  const std::string message =
      testing::message_of<LogicError>([] { safetensors_dtype(at::kComplexDouble, "freqs"); });
  EXPECT_NE(message.find("'freqs' has dtype ComplexDouble"), std::string::npos) << message;
}

TEST(SafetensorsReader, ListsADtypeThatTorchLacksAndSaysSoWhenItIsRead) {
  const Scratch scratch;
  const std::string path =
      scratch.write("m.safetensors", file_of(R"({"a":{"dtype":"F6_E3M2","shape":[4],"data_offsets":[0,3]},)"
                                             R"("b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
                                             "abcd"));
  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.tensors().at("a").dtype, at::ScalarType::Undefined);
  EXPECT_EQ(reader.read("b").item<uint8_t>(), 'd');
  const std::string message = testing::message_of<DataError>([&] { reader.read("a"); });
  EXPECT_NE(message.find("'a' is of F6_E3M2, whose numbers of 6 bits"), std::string::npos) << message;
}

TEST(SafetensorsReader, GivesCopiesThatOutliveItAndTheFile) {
  const Scratch scratch;
  const std::string path = scratch.write("m.safetensors", file_of(kJson, kData));
  at::Tensor tensor;
  {
    const SafetensorsReader reader(path);
    tensor = reader.read("w");
    tensor.mul_(2);
    EXPECT_EQ(reader.read("w")[0].item<float>(), 1.0f);
  }
  std::filesystem::remove(path);
  EXPECT_EQ(tensor[1].item<float>(), -4.0f);
}

TEST(SafetensorsReader, NamesATensorThatIsNotThere) {
  const Scratch scratch;
  const SafetensorsReader reader(scratch.write("m.safetensors", file_of(kJson, kData)));
  const std::string message = testing::message_of<DataError>([&] { reader.read("bias"); });
  EXPECT_NE(message.find("'bias'"), std::string::npos) << message;
  EXPECT_NE(message.find(scratch.path("m.safetensors")), std::string::npos) << message;
}

TEST(SafetensorsReader, FailsCleanlyAtEveryTruncation) {
  const Scratch scratch;
  const std::string whole = file_of(kJson, kData);
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string path = scratch.write("m.safetensors", whole.substr(0, size));
    const std::string message = testing::message_of<DataError>([&] { SafetensorsReader reader(path); });
    EXPECT_NE(message.find(path), std::string::npos) << size;
  }
  EXPECT_THROW(SafetensorsReader(scratch.write("m.safetensors", whole + "x")), DataError);
}

TEST(SafetensorsReader, RefusesHeaderLengthsThatCannotBe) {
  const Scratch scratch;
  for (const uint64_t length : {~uint64_t{0}, uint64_t{1} << 63, uint64_t{kJson.size() + kData.size() + 1}}) {
    std::string file = file_of(kJson, kData);
    std::memcpy(file.data(), &length, sizeof length);
    const std::string path = scratch.write("m.safetensors", file);
    const std::string message = testing::message_of<DataError>([&] { SafetensorsReader reader(path); });
    EXPECT_NE(message.find(std::to_string(length)), std::string::npos) << message;
  }
}

TEST(SafetensorsReader, RefusesAHeaderBeyond100MegabytesWithoutReadingIt) {
  const Scratch scratch;
  std::string file = file_of(kJson, kData);
  const uint64_t length = 100'000'001;
  std::memcpy(file.data(), &length, sizeof length);
  const std::string path = scratch.write("m.safetensors", file);
  std::filesystem::resize_file(path, 200'000'000);  // sparse
  const std::string message = testing::message_of<DataError>([&] { SafetensorsReader reader(path); });
  EXPECT_NE(message.find("100000001"), std::string::npos) << message;
}

TEST(SafetensorsReader, RefusesBooleansThatAreNeitherTrueNorFalse) {
  const Scratch scratch;
  std::string data = kData;
  data[11] = 2;
  const SafetensorsReader reader(scratch.write("m.safetensors", file_of(kJson, data)));
  EXPECT_NO_THROW(reader.read("w"));
  EXPECT_THROW(reader.read("flags"), DataError);
}

/// A map of the file would end the process by SIGBUS.
TEST(SafetensorsReader, NoticesAFileThatIsCutWhileItIsOpen) {
  const Scratch scratch;
  const SafetensorsReader reader(scratch.write("m.safetensors", file_of(kJson, kData)));
  std::filesystem::resize_file(reader.path(), 8 + kJson.size() + 2);
  EXPECT_THROW(reader.read("w"), DataError);
}

TEST(SafetensorsReader, RefusesWhatIsNoFile) {
  const Scratch scratch;
  ASSERT_EQ(::mkfifo(scratch.path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(SafetensorsReader(scratch.path("pipe")), DataError);  // and does not wait for a writer
  EXPECT_THROW(SafetensorsReader(scratch.path("")), DataError);
  EXPECT_THROW(SafetensorsReader("/dev/zero"), DataError);
}

TEST(SafetensorsReader, NamesAFileThatCannotBeOpened) {
  const Scratch scratch;
  const std::string message =
      testing::message_of<EnvironmentError>([&] { SafetensorsReader reader(scratch.path("missing")); });
  EXPECT_NE(message.find(scratch.path("missing")), std::string::npos) << message;
}

}  // namespace
}  // namespace trireme::checkpoint
