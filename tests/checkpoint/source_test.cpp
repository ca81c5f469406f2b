// Sources of tensors against each other.
#include "trireme/checkpoint/source.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/saved.h"

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
