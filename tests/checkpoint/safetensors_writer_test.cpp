#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme::checkpoint {
namespace {

using testing::Scratch;

using Tensors = std::map<std::string, at::Tensor>;

std::map<std::string, TensorInfo> infos(const Tensors& tensors) {
  std::map<std::string, TensorInfo> declared;
  for (const auto& [name, tensor] : tensors) declared[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  return declared;
}

void write_all_of(const std::string& path, const Tensors& tensors,
                  const std::map<std::string, std::string>& metadata = {}) {
  SafetensorsWriter writer(path, infos(tensors), metadata);
  for (auto entry = tensors.rbegin(); entry != tensors.rend(); ++entry)
    writer.write(entry->first, entry->second);
  writer.commit();
}

/// Random bits, so that NaN payloads, denormals and negative zeros are among the values.
at::Tensor random_bits(at::ScalarType dtype, const std::vector<int64_t>& shape) {
  if (dtype == at::kBool) return at::randint(2, shape, at::kByte).to(at::kBool);
  at::Tensor tensor = at::empty(shape, dtype);
  const at::Tensor bits = at::randint(256, {static_cast<int64_t>(tensor.nbytes())}, at::kByte);
  if (bits.numel() > 0) std::memcpy(tensor.mutable_data_ptr(), bits.const_data_ptr(), tensor.nbytes());
  return tensor;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

TEST(SafetensorsWriter, RoundTripsEveryDtypeAndShape) {
  const Scratch scratch;
  at::manual_seed(1);
  Tensors tensors;
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                                     at::kShort, at::kChar, at::kByte, at::kBool}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {0}, {1}, {7}, {2, 3, 5}, {3, 0, 2}}) {
      tensors[fmt::format("{}-{}", c10::toString(dtype), fmt::join(shape, "x"))] = random_bits(dtype, shape);
    }
  }
  const std::map<std::string, std::string> metadata = {{"step", "12"}, {"quote", "\"\\\n\xc3\xa9"}};
  write_all_of(scratch.path("m.safetensors"), tensors, metadata);
  const SafetensorsReader reader(scratch.path("m.safetensors"));
  EXPECT_EQ(reader.metadata(), metadata);
  ASSERT_EQ(reader.tensors().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(same_bits(reader.read(name), tensor)) << name;
}

TEST(SafetensorsWriter, WritesTheBytesThatTheFormatAsksFor) {
  const Scratch scratch;
  write_all_of(scratch.path("m.safetensors"),
               {{"a", at::tensor({1, 0}).to(at::kBool)},
                {"z", at::tensor({1.0f, -2.0f}).reshape({2, 1})},
                {"n", at::scalar_tensor(-2, at::kShort)}},
               {{"format", "pt"}});
  // Wide elements first, then by name; the header is padded with spaces so that 8 + length is a multiple
  // of 64.
  std::string json =
      R"({"__metadata__":{"format":"pt"},"z":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("n":{"dtype":"I16","shape":[],"data_offsets":[8,10]},)"
      R"("a":{"dtype":"BOOL","shape":[2],"data_offsets":[10,12]}})";
  ASSERT_EQ(json.size(), 196u);
  json.append(248 - json.size(), ' ');
  const std::string length("\xf8\x00\x00\x00\x00\x00\x00\x00", 8);
  const std::string data("\x00\x00\x80\x3f\x00\x00\x00\xc0\xfe\xff\x01\x00", 12);
  EXPECT_EQ(testing::slurp(scratch.path("m.safetensors")), length + json + data);
}

TEST(SafetensorsWriter, StartsTheDataAlignedWhateverTheHeader) {
  const Scratch scratch;
  const std::string path = scratch.path("m.safetensors");
  for (size_t size = 1; size < 130; ++size) {
    write_all_of(path, {{std::string(size, 'n'), at::ones({3})}});
    uint64_t length = 0;
    const std::string file = testing::slurp(path);
    std::memcpy(&length, file.data(), sizeof length);
    EXPECT_EQ((8 + length) % 64, 0u) << size;
    EXPECT_EQ(file.size(), 8 + length + 12);
  }
}

TEST(SafetensorsWriter, WritesViewsAndTensorsThatNeedGradients) {
  const Scratch scratch;
  const at::Tensor matrix = at::arange(12, at::kFloat).reshape({3, 4});
  const at::Tensor leaf = at::ones({2}).requires_grad_(true);
  write_all_of(scratch.path("m.safetensors"), {{"t", matrix.t()}, {"s", matrix.slice(1, 1, 3)}, {"g", leaf}});
  const SafetensorsReader reader(scratch.path("m.safetensors"));
  EXPECT_TRUE(at::equal(reader.read("t"), matrix.t()));
  EXPECT_TRUE(at::equal(reader.read("s"), matrix.slice(1, 1, 3)));
  EXPECT_TRUE(at::equal(reader.read("g"), at::ones({2})));
}

TEST(SafetensorsWriter, WritesNoTensors) {
  const Scratch scratch;
  write_all_of(scratch.path("m.safetensors"), {});
  EXPECT_TRUE(SafetensorsReader(scratch.path("m.safetensors")).tensors().empty());
}

size_t files_in(const Scratch& scratch) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(scratch.path(""))) ++count;
  return count;
}

TEST(SafetensorsWriter, KeepsTheOldFileAndRemovesTheTemporaryWithoutCommit) {
  const Scratch scratch;
  const std::string path = scratch.write("m.safetensors", "old");
  {
    SafetensorsWriter writer(path, {{"a", {at::kFloat, {2}}}}, {});
    writer.write("a", at::ones({2}));
    EXPECT_EQ(testing::slurp(path), "old");
    EXPECT_EQ(files_in(scratch), 2u);
  }
  EXPECT_EQ(testing::slurp(path), "old");
  EXPECT_EQ(files_in(scratch), 1u);
  write_all_of(path, {{"a", at::ones({2})}});
  EXPECT_NE(testing::slurp(path), "old");
  EXPECT_EQ(files_in(scratch), 1u);
}

TEST(SafetensorsWriter, TwoOfOnePathDoNotDisturbEachOther) {
  const Scratch scratch;
  const std::string path = scratch.path("m.safetensors");
  const Tensors first = {{"a", at::ones({2})}}, second = {{"b", at::full({3}, 7.0)}};
  SafetensorsWriter late(path, infos(second), {});
  write_all_of(path, first);
  EXPECT_TRUE(same_bits(SafetensorsReader(path).read("a"), first.at("a")));
  late.write("b", second.at("b"));
  EXPECT_TRUE(same_bits(SafetensorsReader(path).read("a"), first.at("a"))) << "the other one is not done";
  { const SafetensorsWriter given_up(path, infos(first), {}); }
  late.commit();
  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.tensors().size(), 1u);
  EXPECT_TRUE(same_bits(reader.read("b"), second.at("b")));
  EXPECT_EQ(files_in(scratch), 1u);
}

TEST(SafetensorsWriter, RemovesWhatKilledWritersOfItsPathLeft) {
  const Scratch scratch;
  const std::string path = scratch.path("m.safetensors");
  for (const char* name : {".m.safetensors.1-0.trireme-tmp", ".m.safetensors.4711-12.trireme-tmp"})
    scratch.write(name, "half of a file");
  scratch.write(".other.safetensors.1-0.trireme-tmp", "half of another file");
  write_all_of(path, {{"a", at::ones({2})}});
  EXPECT_EQ(files_in(scratch), 2u);
  EXPECT_TRUE(std::filesystem::exists(scratch.path(".other.safetensors.1-0.trireme-tmp")));
}

TEST(SafetensorsWriter, RefusesToCommitWithTensorsMissing) {
  const Scratch scratch;
  SafetensorsWriter writer(scratch.path("m"), {{"a", {at::kFloat, {1}}}, {"b", {at::kFloat, {1}}}}, {});
  writer.write("a", at::ones({1}));
  const std::string message = testing::message_of<LogicError>([&] { writer.commit(); });
  EXPECT_NE(message.find("'b'"), std::string::npos) << message;
  writer.write("b", at::ones({1}));
  writer.commit();
  EXPECT_THROW(writer.commit(), LogicError);
  EXPECT_THROW(writer.write("a", at::ones({1})), LogicError);
}

TEST(SafetensorsWriter, RefusesWhatWasNotDeclared) {
  const Scratch scratch;
  SafetensorsWriter writer(scratch.path("m"), {{"a", {at::kFloat, {2, 3}}}}, {});
  EXPECT_THROW(writer.write("b", at::ones({2, 3})), LogicError);
  EXPECT_THROW(writer.write("a", at::ones({3, 2})), LogicError);
  EXPECT_THROW(writer.write("a", at::ones({6})), LogicError);
  EXPECT_THROW(writer.write("a", at::ones({2, 3}, at::kDouble)), LogicError);
  writer.write("a", at::ones({2, 3}));
  EXPECT_THROW(writer.write("a", at::ones({2, 3})), LogicError);
  EXPECT_THROW(SafetensorsWriter(scratch.path("c"), {{"c", {at::kComplexDouble, {1}}}}, {}), LogicError);
  EXPECT_THROW(SafetensorsWriter(scratch.path("c"), {{"__metadata__", {at::kFloat, {1}}}}, {}), LogicError);
}

TEST(SafetensorsWriter, NamesAFolderThatIsNotThere) {
  const Scratch scratch;
  const std::string path = scratch.path("missing/m");
  const std::string message =
      testing::message_of<EnvironmentError>([&] { SafetensorsWriter writer(path, {}, {}); });
  EXPECT_NE(message.find(path), std::string::npos) << message;
}

}  // namespace
}  // namespace trireme::checkpoint
