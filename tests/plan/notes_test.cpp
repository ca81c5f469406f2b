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
  config.train.rank_batch = 0;
  EXPECT_TRUE(notes(config, Device::kCpu).empty()) << "it overrules nothing";
}

TEST(Notes, NameEachKeyThatHasNoEffect) {
  Config config;
  config.train.epochs = 1;
  EXPECT_TRUE(notes(config, Device::kCpu).empty());
  config.train.steps = 1000;
  EXPECT_EQ(
      notes(config, Device::kCpu),
      std::vector<std::string>{"train.steps=1000 has no effect with train.epochs=1; set train.epochs to 0"});
  config.train.epochs = 0;
  config.pipeline.schedule = ScheduleName::kZbV;
  config.pipeline.spread_head = true;
  EXPECT_EQ(notes(config, Device::kCpu).size(), 2u);
  config.parallel.pp = 2;
  EXPECT_TRUE(notes(config, Device::kCpu).empty());
}

TEST(Notes, CountNoUnusedRowsOfAModelOfImagesOrOneThatComesWithWeights) {
  Config images;
  images.model.family = ModelFamily::kResNet;
  images.model.vocab_size = 1000;
  EXPECT_TRUE(notes(images, Device::kCpu).empty()) << "a vocabulary of classes";
  Config imported;
  imported.model.weights = "llama";
  imported.model.vocab_size = 128256;
  ASSERT_EQ(notes(imported, Device::kCpu).size(), 1u);
  const std::string note = notes(imported, Device::kCpu)[0];
  EXPECT_EQ(note.find("saves"), std::string::npos) << note;
  for (const char* word : {"read as bytes", "128,256", "model.weights=llama"})
    EXPECT_NE(note.find(word), std::string::npos) << note;
  imported.model.vocab_size = 256;
  EXPECT_TRUE(notes(imported, Device::kCpu).empty()) << "trained on bytes";
}

TEST(Notes, NameADecayThatKeepsSgdFromLearning) {
  Config config;
  config.optim.weight_decay = 0.1;
  EXPECT_TRUE(notes(config, Device::kCpu).empty()) << "as usual with adamw";
  config.optim.name = OptimizerName::kSgd;
  const auto found = notes(config, Device::kCpu);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_NE(found[0].find("optim.weight_decay=0.1"), std::string::npos) << found[0];
  config.optim.weight_decay = 5e-4;
  EXPECT_TRUE(notes(config, Device::kCpu).empty());
}

TEST(Notes, NameAProfileWithoutAGpu) {
  Config config;
  config.train.profile_steps = 2;
  EXPECT_EQ(notes(config, Device::kCpu).size(), 1u);
  EXPECT_TRUE(notes(config, Device::kCuda).empty());
}

}  // namespace
}  // namespace trireme::plan
