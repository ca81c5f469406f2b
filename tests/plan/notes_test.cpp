#include "trireme/plan/notes.h"

#include <gtest/gtest.h>

namespace trireme::plan {
namespace {

TEST(Notes, NameTheRowsThatBytesNeverUse) {
  Config config;
  config.model.d_model = 10;
  EXPECT_TRUE(notes(config, Device::kCpu).empty()) << "256 rows";
  config.model.vocab_size = 320;
  EXPECT_TRUE(notes(config, Device::kCpu).empty()) << "a vocabulary that is rounded up";
  config.model.vocab_size = 1256;
  config.model.tie_embeddings = true;
  ASSERT_EQ(notes(config, Device::kCpu).size(), 1u);
  EXPECT_NE(notes(config, Device::kCpu)[0].find("saves 10.0k parameters"), std::string::npos);
  config.model.tie_embeddings = false;
  EXPECT_NE(notes(config, Device::kCpu)[0].find("saves 20.0k parameters"), std::string::npos);
}

TEST(Notes, NameABatchThatAnotherKeyOverrules) {
  Config config;
  config.train.rank_batch = 8;
  EXPECT_TRUE(notes(config, Device::kCpu).empty());
  config.train.global_batch = 12;
  ASSERT_EQ(notes(config, Device::kCpu).size(), 1u);
  EXPECT_EQ(notes(config, Device::kCpu)[0], "train.global_batch=12 has no effect with train.rank_batch=8");
}

TEST(Notes, NameAProfileWithoutAGpu) {
  Config config;
  config.train.profile_steps = 2;
  EXPECT_EQ(notes(config, Device::kCpu).size(), 1u);
  EXPECT_TRUE(notes(config, Device::kCuda).empty());
}

}  // namespace
}  // namespace trireme::plan
