// Sources of tensors against each other.
#include "trireme/checkpoint/source.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/saved.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/model_folder.h"

namespace trireme::checkpoint::testing {
namespace {

TEST(Source, ConvertedTensorsAreTheSameBitForBit) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  const std::string name = save(store, {.replicas = 1, .shards = 3, .stages = 2, .tensor = 1}, 7);
  const auto saved = open_source(store.folder().path_of(name));
  ASSERT_EQ(saved->tensors().size(), model().size());
  convert_to_file(*saved, scratch.path("whole.safetensors"), {});
  const auto file = open_source(scratch.path("whole.safetensors"));
  EXPECT_EQ(file->tensors(), saved->tensors());
  EXPECT_TRUE(compare(*saved, *file).empty());
  const std::string converted =
      convert_to_checkpoint(*file, scratch.path("converted"), {.files = 3, .step = 9});
  const auto again = open_source(scratch.path("converted/" + converted));
  EXPECT_EQ(again->tensors(), saved->tensors());
  EXPECT_TRUE(compare(*saved, *again).empty());
}

TEST(Source, NumbersAreNarrowedAndOtherTensorsStayAsTheyAre) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  const std::string name = save(store, {.replicas = 1, .shards = 1, .stages = 1, .tensor = 1}, 7);
  const auto saved = open_source(store.folder().path_of(name));
  std::filesystem::create_directory(scratch.path("out"));
  write_model_files(Folder(scratch.path("out")), *saved, {"embedding", "odd.scalar", "odd.flags"},
                    {.dtype = "BF16"});
  const auto narrow = open_source(scratch.path("out"));
  EXPECT_EQ(narrow->tensors().at("embedding").dtype, "BF16");
  EXPECT_EQ(narrow->tensors().at("odd.scalar").dtype, "I64");
  EXPECT_EQ(narrow->tensors().at("odd.flags").dtype, "BOOL");
}

TEST(Source, NumbersOfSixBitsAreListedAndNotRead) {
  const Scratch scratch;
  const std::string json = R"({"six":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})";
  std::string file(8, '\0');
  file[0] = static_cast<char>(json.size());
  const auto source = open_source(scratch.write("six.safetensors", file + json + "abc"));
  EXPECT_EQ(source->tensors().at("six").numel(), 4);
  char bytes[4];
  EXPECT_THROW(source->read("six", plan::Region::whole({4}), bytes), DataError);
}

TEST(Source, TensorsThatOneOfTwoLacksDiffer) {
  const Scratch scratch;
  Store store(scratch.path("checkpoints"));
  const std::string name = save(store, {.replicas = 1, .shards = 1, .stages = 1, .tensor = 1}, 7);
  const auto saved = open_source(store.folder().path_of(name));
  convert_to_file(*saved, scratch.path("head.safetensors"),
                  {.select = [](const std::string& tensor) { return tensor == "head"; }});
  const std::vector<Difference> differences = compare(*open_source(scratch.path("head.safetensors")), *saved);
  ASSERT_EQ(differences.size(), model().size() - 1);
  for (const Difference& difference : differences) {
    EXPECT_NE(difference.tensor, "head");
    EXPECT_EQ(difference.what, "only in the second");
  }
}

}  // namespace
}  // namespace trireme::checkpoint::testing
