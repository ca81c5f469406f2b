#include <gtest/gtest.h>

#include "tests/checkpoint/saved.h"
#include "tests/cli/front_process.h"
#include "trireme/base/file.h"
#include "trireme/cli/request.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

/// The front command with a worker that notes what it is told, a run with weights, a text and a question.
class Eval : public ::testing::Test {
 protected:
  Eval() {
    front_.set_worker("printf %s \"$TRIREME_REQUEST\" > request; exit 0");
    run_ = make_run("tiny", "data: {seq_len: 64}\ndevice: cpu\n");
    write_file_atomic(front_.file("text.txt"), "some text\n");
    write_file_atomic(front_.file("q.jsonl"), R"({"prompt": "a", "choices": ["b", "c"], "answer": 1})");
  }

  std::string make_run(const std::string& name, const std::string& config) const {
    const auto run = report::RunDirectory::create(front_.file("runs"), name, {});
    run.finish(0);
    make_directories(run.file("checkpoints/final"));
    write_file_atomic(run.file("checkpoints/final/model.safetensors"), "x");
    write_file_atomic(run.file("config.yaml"), config);
    return run.path();
  }

  Request request_of(const Words& words) const {
    const Outcome outcome = front_.run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return request_from_json(read_file(front_.file("request")));
  }

  /// Nothing is started, and the message holds `part`.
  void expect_refused(const Words& words, const std::string& part) const {
    const Outcome outcome = front_.run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, part)) << part << " in: " << outcome.err;
    EXPECT_FALSE(std::filesystem::exists(front_.file("request")));
  }

  FrontProcess front_;
  std::string run_;
};

TEST_F(Eval, HandsWeightsAndTextToRanks) {
  const Request request =
      request_of({"eval", "latest", "--data", "text.txt", "-n", "1", "--per-document", "--json"});
  EXPECT_EQ(request.verb, "eval");
  EXPECT_TRUE(std::filesystem::equivalent(request.eval.run, run_));
  EXPECT_TRUE(request.eval.weights.ends_with("checkpoints/final/model.safetensors"));
  EXPECT_EQ(request.eval.data, front_.file("text.txt"));
  EXPECT_FALSE(request.eval.questions);
  EXPECT_TRUE(request.eval.per_document);
  EXPECT_EQ(request.eval.window, 64) << "data.seq_len of the run";
  EXPECT_EQ(request.eval.device, "cpu");
  EXPECT_TRUE(request.json);
  EXPECT_EQ(request_of({"eval", "tiny", "--data", "text.txt", "-n", "1", "--window=7"}).eval.window, 7);
}

TEST_F(Eval, TakesFieldsOfJsonLinesAndQuestions) {
  write_file_atomic(front_.file("t.jsonl"), R"({"body": "x"})");
  const Request text = request_of({"eval", "latest", "--data=t.jsonl#body", "-n", "1"});
  EXPECT_EQ(text.eval.data, front_.file("t.jsonl#body"));
  const Request questions = request_of({"eval", "latest", "--choices=q.jsonl", "-n", "1"});
  EXPECT_TRUE(questions.eval.questions);
  EXPECT_EQ(questions.eval.data, std::filesystem::canonical(front_.file("q.jsonl")));
}

TEST_F(Eval, TakesACheckpointOfARun) {
  {
    checkpoint::Store store(run_ + "/checkpoints");
    checkpoint::testing::save(store, {.replicas = 1, .shards = 1, .stages = 1, .tensor = 1}, 8);
  }
  const std::string path = run_ + "/checkpoints/step-00000008";
  const Request request = request_of({"eval", path, "--data=text.txt", "-n", "1"});
  EXPECT_TRUE(std::filesystem::equivalent(request.eval.weights, path));
  EXPECT_TRUE(std::filesystem::equivalent(request.eval.run, run_));
  make_directories(front_.file("alone/of"));
  std::filesystem::rename(path, front_.file("alone/of/step-00000008"));
  const Outcome alone = front_.run({"eval", "alone/of/step-00000008", "--data=text.txt"});
  EXPECT_EQ(alone.code, 2) << alone.err;
  EXPECT_TRUE(contains(alone.err, "lies in no run")) << alone.err;
}

TEST_F(Eval, RefusesWhatCannotBeRead) {
  write_file_atomic(front_.file("empty.txt"), "");
  write_file_atomic(front_.file("wrong.jsonl"), R"({"prompt": "a", "choices": ["b"], "answer": 0})");
  expect_refused({"eval", "latest"}, "one of --data and --choices");
  expect_refused({"eval", "latest", "--data=text.txt", "--choices=q.jsonl"}, "one of --data and --choices");
  expect_refused({"eval", "latest", "--data=absent.txt"}, "absent.txt");
  expect_refused({"eval", "latest", "--data=empty.txt"}, "empty.txt");
  expect_refused({"eval", "latest", "--data=text.txt#field"}, "field");
  expect_refused({"eval", "latest", "--choices=absent.jsonl"}, "absent.jsonl");
  expect_refused({"eval", "absent", "--data=text.txt"}, "absent");
  expect_refused({"eval", "latest", "--data=text.txt", "--window=0"}, "--window is 0");
  expect_refused({"eval", "latest", "--data=text.txt", "--window=65"}, "from 1 to 64");
  expect_refused({"eval", "latest", "--data=text.txt", "-n", "0"}, "0");
  const Outcome wrong = front_.run({"eval", "latest", "--choices=wrong.jsonl"});
  EXPECT_EQ(wrong.code, 7) << wrong.err;
  EXPECT_TRUE(contains(wrong.err, "wrong.jsonl, line 1")) << wrong.err;
  EXPECT_FALSE(std::filesystem::exists(front_.file("request")));
}

TEST_F(Eval, RefusesModelsThatReadNoText) {
  const std::string images = make_run("images", "model: {family: resnet}\n");
  expect_refused({"eval", images, "--data=text.txt"}, "reads no text");
}

TEST_F(Eval, RefusesATokenizerThatIsNotTheModels) {
  const std::string tokenizer = front_.file("llama2.json");
  std::filesystem::copy_file(TRIREME_TEXT_FIXTURES "/llama2.json", tokenizer);
  const std::string other = make_run("other", "data: {tokenizer: '" + tokenizer + "'}\n");
  write_file_atomic(other + "/tokenizer.txt", "llama2.json (0000000000000000)\n");
  expect_refused({"eval", other, "--data=text.txt"}, "was trained with the tokenizer llama2.json (0");
  std::filesystem::remove(other + "/tokenizer.txt");
  expect_refused({"eval", other, "--data=text.txt"}, "but the model has 256");
  make_directories(front_.file("model"));
  write_file_atomic(
      front_.file("model/config.json"),
      R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1,
                        "n_head": 2, "activation_function": "gelu_new"})");
  expect_refused({"eval", "model", "--data=text.txt"}, "model has no tokenizer for its model");
}

}  // namespace
}  // namespace trireme::cli
