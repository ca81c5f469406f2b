// Training on the answers of conversations: the loss is the mean over all targets that count in a step,
// however they lie in micro-batches and ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "tests/train/resume_fixture.h"

namespace trireme::train {
namespace {

class ConversationRun : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    std::ofstream(folder_ / "chat.jinja")
        << "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
           "{% if add_generation_prompt %}<assistant>{% endif %}";
    std::ofstream lines(folder_ / "chats.jsonl");
    for (int i = 0; i < 120; ++i) {
      const std::string prompt(static_cast<size_t>(1 + i * 11 % 23), static_cast<char>('a' + i % 20));
      lines << R"({"prompt": ")" << prompt << R"(", "answer": ")"
            << std::string(static_cast<size_t>(1 + i * 5 % 17), prompt[0]) << "\"}\n";
    }
    config_.data.path = (folder_ / "chats.jsonl").string();
    config_.data.format = plan::DataFormat::kChat;
    config_.data.chat_template = (folder_ / "chat.jinja").string();
    config_.data.seq_len = 64;
    config_.model.max_seq_len = 64;
    config_.model.n_heads = config_.model.n_kv_heads = 4;
    config_.model.d_ff = 56;
    config_.train = {
        .steps = 6, .global_batch = 8, .micro_batch = 8, .grad_clip = 0.5, .val_every = 3, .val_batches = 2};
    config_.checkpoint.every = 0;
  }

  void expect_like_one_rank(const plan::ParallelConfig& parallel, int64_t ranks, int64_t micro_batch) {
    config_.parallel = {};
    config_.train.micro_batch = 8;
    const TrainResult whole = Resume::run(1, false);
    const std::vector<StepRecord> wanted = recorder_.steps;
    config_.parallel = parallel;
    config_.train.micro_batch = micro_batch;
    const TrainResult split = Resume::run(ranks, false);
    ASSERT_EQ(recorder_.steps.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_NEAR(recorder_.steps[i].loss, wanted[i].loss, 1e-5 * wanted[i].loss) << "step " << i;
      EXPECT_NEAR(recorder_.steps[i].grad_norm, wanted[i].grad_norm, 1e-4 * wanted[i].grad_norm)
          << "step " << i;
    }
    ASSERT_TRUE(whole.summary.final_val_loss && split.summary.final_val_loss);
    EXPECT_NEAR(*split.summary.final_val_loss, *whole.summary.final_val_loss,
                1e-5 * *whole.summary.final_val_loss);
  }
};

TEST_F(ConversationRun, OfTwoRanksHasTheLossesOfOne) {
  expect_like_one_rank({}, 2, 2);
}

TEST_F(ConversationRun, InMicroBatchesHasTheLossesOfWholeBatches) {
  expect_like_one_rank({}, 1, 1);
}

TEST_F(ConversationRun, WithSplitSequencesHasTheLossesOfOneRank) {
  plan::ParallelConfig parallel;
  parallel.cp = 2;
  expect_like_one_rank(parallel, 2, 2);
}

TEST_F(ConversationRun, OfTensorParallelRanksHasTheLossesOfOne) {
  plan::ParallelConfig parallel;
  parallel.tp = 2;
  expect_like_one_rank(parallel, 2, 4);
}

TEST_F(ConversationRun, InStagesHasTheLossesOfOneRank) {
  plan::ParallelConfig parallel;
  parallel.pp = 2;
  expect_like_one_rank(parallel, 2, 2);
}

/// Ranks along cp have different numbers of targets that count.
TEST_F(ConversationRun, InStagesOfSplitSequencesHasTheLossesOfOneRank) {
  plan::ParallelConfig parallel;
  parallel.pp = parallel.cp = 2;
  for (const plan::CpKind kind : {plan::CpKind::kUlysses, plan::CpKind::kRing}) {
    parallel.cp_kind = kind;
    expect_like_one_rank(parallel, 4, 2);
  }
}

TEST_F(ConversationRun, GoesOnExactlyWhereItWasStopped) {
  config_.train.steps = 12;
  config_.train.micro_batch = 2;
  config_.train.val_every = 5;
  config_.checkpoint.every = 4;
  expect_exact(2, "conversations");
}

TEST_F(ConversationRun, LearnsAnswersOnly) {
  const TrainResult answers = Resume::run(1, false);
  const double learnt = recorder_.steps[0].loss;
  config_.data.loss_on = plan::LossOn::kAll;
  Resume::run(1, false);
  EXPECT_GT(std::abs(recorder_.steps[0].loss - learnt), 1e-3);
}

}  // namespace
}  // namespace trireme::train
