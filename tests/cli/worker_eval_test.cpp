// `trireme eval` with its real worker. Its figures are compared with PyTorch's in eval_check.py.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <numbers>

#include "tests/cli/stories.h"
#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

class WorkerEval : public Worker {
 protected:
  void train(const Words& more = {}) {
    const Outcome trained = front_.run(kTiny + Words{"--train.steps=3", "-n", "2"} + more);
    ASSERT_EQ(trained.code, 0) << trained.err;
  }

  nlohmann::json evaluate(const Words& words) const {
    const Outcome outcome = front_.run(Words{"eval", "latest", "--json"} + words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? outcome.json() : nlohmann::json();
  }
};

TEST_F(WorkerEval, PrintsTheSameForPeopleAndMachines) {
  train();
  const auto json = evaluate({"--data=text.txt", "-n", "2"});
  const double loss = json["loss"];
  EXPECT_EQ(json["tokens"], std::filesystem::file_size(front_.file("text.txt")));
  EXPECT_EQ(json["bytes"], json["tokens"]);
  EXPECT_EQ(json["documents"], 1);
  EXPECT_FALSE(json.contains("per_document"));
  EXPECT_DOUBLE_EQ(json["perplexity"], std::exp(loss));
  EXPECT_DOUBLE_EQ(json["bits_per_byte"], loss / std::numbers::ln2) << "a token is a byte";
  const Outcome text = front_.run({"eval", "latest", "--data=text.txt", "--per-document"});
  ASSERT_EQ(text.code, 0) << text.err;
  for (const std::string& part : {fmt::format("loss        {:.4f} nats a token\n", loss),
                                  fmt::format("perplexity  {:.4f}\n", std::exp(loss)),
                                  std::string("by byte, in windows of 32"), front_.file("text.txt")})
    EXPECT_TRUE(contains(text.out, part)) << part << " in:\n" << text.out;
}

TEST_F(WorkerEval, CountsBytesOfTextAndTokensOfItsTokenizer) {
  write_file_atomic(front_.file("text.txt"), made_up_stories(200));
  ASSERT_EQ(front_.run({"data", "train-tokenizer", "text.txt", "--vocab=300", "--out=t.json"}).code, 0);
  train({"--data.tokenizer=t.json"});
  const auto inspected =
      front_.run({"data", "inspect", "text.txt", "--data.tokenizer=t.json", "--json"}).json();
  const auto all = evaluate({"--data=text.txt", "--per-document"});
  for (const char* key : {"documents", "tokens", "bytes"}) EXPECT_EQ(all[key], inspected[key]) << key;
  EXPECT_LT(all["tokens"], all["bytes"]);
  const double nats = all["loss"].get<double>() * all["tokens"].get<double>();
  EXPECT_NEAR(all["bits_per_byte"].get<double>(), nats / std::numbers::ln2 / all["bytes"].get<double>(),
              1e-9);
  double sum = 0.0;
  for (const auto& row : all["per_document"]) sum += row["loss"].get<double>() * row["tokens"].get<double>();
  EXPECT_NEAR(sum, nats, 1e-9 * nats);
}

/// Documents apart do not see each other, and an ending is scored as the end of a document is.
TEST_F(WorkerEval, QuestionsAndTextsAgree) {
  train();
  write_file_atomic(front_.file("prompt.txt"), "the rowers");
  write_file_atomic(front_.file("whole.txt"), "the rowers pull 7");
  write_file_atomic(front_.file("q.jsonl"),
                    R"({"prompt": "the rowers", "choices": [" pull 7", " qqqq"], "answer": 0})"
                    "\n");
  const auto nats_of = [&](const char* file) {
    const auto found = evaluate({"--data", file, "-n", "1"});
    return found["loss"].get<double>() * found["tokens"].get<double>();
  };
  const auto found = evaluate({"--choices=q.jsonl", "--per-document", "-n", "2"});
  const double likelihood = found["per_document"][0]["log_likelihoods"][0];
  EXPECT_NEAR(-likelihood, nats_of("whole.txt") - nats_of("prompt.txt"), 1e-4);
  EXPECT_EQ(found["questions"], 1);
  EXPECT_EQ(found["chance"], 0.5);
  const double other = found["per_document"][0]["log_likelihoods"][1];
  EXPECT_EQ(found["accuracy"], likelihood >= other ? 1.0 : 0.0);
  EXPECT_EQ(found["accuracy_by_bytes"], likelihood / 7.0 >= other / 5.0 ? 1.0 : 0.0);
}

TEST_F(WorkerEval, CutsPromptsAndSaysSo) {
  train();
  const std::string rest = R"(", "choices": ["b", "c"], "answer": 0})", longer(200, 'a');
  write_file_atomic(front_.file("q.jsonl"),
                    "{\"prompt\": \"" + longer + rest + "\n{\"prompt\": \"a" + rest + "\n");
  EXPECT_EQ(evaluate({"--choices=q.jsonl"})["truncated"], 1);
  const Outcome text = front_.run({"eval", "latest", "--choices=q.jsonl"});
  EXPECT_TRUE(contains(text.out, "truncated   1 prompt does not fit in the window of 32")) << text.out;
  write_file_atomic(front_.file("q.jsonl"),
                    R"({"prompt": "a", "answer": 0, "choices": ["b", ")" + longer + "\"]}");
  const Outcome refused = front_.run({"eval", "latest", "--choices=q.jsonl"});
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_TRUE(contains(refused.err, "line 1: choice 1 has 200 tokens, but the window has 32")) << refused.err;
}

TEST_F(WorkerEval, RefusesATextWithoutTokens) {
  train();
  write_file_atomic(front_.file("e.jsonl"), "{\"text\": \"\"}\n");
  const Outcome refused = front_.run({"eval", "latest", "--data=e.jsonl"});
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_TRUE(contains(refused.err, "has no token in 0 documents")) << refused.err;
}

TEST_F(WorkerEval, TakesAModelOfHuggingFace) {
  write_file_atomic(front_.file("text.txt"), made_up_stories(200));
  ASSERT_EQ(front_.run({"data", "train-tokenizer", "text.txt", "--vocab=300", "--out=model-tokenizer/"}).code,
            0);
  train({"--data.tokenizer=model-tokenizer", "--model.family=llama"});
  const Outcome exported =
      front_.run({"ckpt", "export-hf", "latest", "model", "--tokenizer=model-tokenizer"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  const Outcome outcome = front_.run({"eval", "model", "--data=text.txt", "--window=32", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(outcome.json()["run"].is_null());
  EXPECT_EQ(outcome.json()["loss"], evaluate({"--data=text.txt"})["loss"]);
}

TEST_F(WorkerEval, NamesWeightsThatAreNotFinite) {
  train();
  const std::string path = run_file("checkpoints/final/model.safetensors");
  std::string weights = read_file(path);
  weights.replace(weights.size() - 4096, 4096, 4096, '\xff');  // NaN in fp32
  write_file_atomic(path, weights);
  const Outcome outcome = front_.run({"eval", "latest", "--data=text.txt"});
  EXPECT_EQ(outcome.code, 6) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "model.safetensors hold NaN or infinity")) << outcome.err;
}

TEST_F(Worker, ARunOnAMixtureIsEvaluatedMeasuredAndTriedLikeAnyOther) {
  std::ofstream(front_.file("other.txt")) << std::string(4000, 'x') + std::string(4000, 'y');
  const Words mixed = {"train",
                       "--device=cpu",
                       "-n",
                       "1",
                       "--data.mixture={a: text.txt, b: {path: other.txt, weight: 2}}",
                       "--data.seq_len=32",
                       "--model.d_model=32",
                       "--train.global_batch=4",
                       "--train.steps=4",
                       "--train.val_every=2",
                       "--train.early_stop=3",
                       "--train.monitor=loss/a"};
  const Outcome trained = front_.run(mixed);
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_TRUE(steps().back().contains("val_loss/a")) << steps().back();
  const Outcome evaluated = front_.run({"eval", "latest", "--data", "other.txt"});
  EXPECT_EQ(evaluated.code, 0) << evaluated.err;
  const Outcome bench = front_.run({"bench", "run", "--config", run_file("config.yaml"), "--arms",
                                    "parallel.policy=ddp,fsdp", "--dry-run"});
  EXPECT_EQ(bench.code, 0) << bench.err;
  const Outcome tried = front_.run(mixed + Words{"--train.fast_dev_run=2"});
  EXPECT_EQ(tried.code, 0) << tried.err;
}

}  // namespace
}  // namespace trireme::cli
