// Batches that workers read themselves: which rows they are, who reads them, and what goes wrong.
#include "trireme/gt/dataset.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/controller/small_mini_gpt.h"
#include "tests/controller/some_text.h"
#include "tests/support/refusal.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/controller/messages.h"
#include "trireme/controller/worker_ranks.h"
#include "trireme/gt/capture.h"
#include "trireme/gt/schedule.h"
#include "trireme/gt/workers.h"

namespace trireme {
namespace {

std::string signals_text(const std::string& name, const std::string& text) {
  const std::string path = text_folder() + "/" + name + ".yaml";
  std::ofstream(path) << text;
  return path;
}

/// Two workers that have all rows, and two that have some each.
std::string both_ways() {
  return signals_text("both",
                      "whole: {workers: [0, 1], replicated: true}\nrows:\n  shard:\n    axis: 0\n"
                      "    workers: [0, 1]\n");
}

std::shared_ptr<controller::RankProgram> rank_program(const std::shared_ptr<comm::World>& world) {
  return std::make_shared<controller::RankProgram>(world, false, text_environment());
}

void with_ranks(int64_t ranks, const std::string& signals,
                const std::function<void(const comm::World&)>& body) {
  test::run_ranks(ranks, [&](const std::shared_ptr<comm::World>& world) {
    const gt::Workers workers(rank_program(world), {.signals = signals});
    body(*world);
  });
}

/// Over the ends of epochs, and in any order.
TEST(Dataset, IsWhatTrainReadsRowForRow) {
  gt::DatasetOptions options{
      .path = some_text("train.txt", 2000), .seq_len = 16, .batch = 6, .seed = 3, .val_fraction = 0.1};
  const std::vector<Rows> expected = trained_batches(options, 60);
  with_ranks(1, "", [&](const comm::World&) {
    const gt::Dataset text = gt::dataset(options);
    for (const int64_t step : {0, 1, 19, 18, 59, 40, 0}) {
      const auto [inputs, targets] = text.batch(step);
      EXPECT_EQ(inputs.shape(), (gt::Shape{6, 16}));
      EXPECT_EQ(targets.dtype(), gt::Dtype::kInt64);
      const Rows& rows = expected.at(static_cast<size_t>(step));
      EXPECT_EQ(inputs.fetch().integers(), rows.first) << step;
      EXPECT_EQ(targets.fetch().integers(), rows.second) << step;
    }
    options.seed = 4;
    EXPECT_NE(gt::dataset(options).batch(0).inputs.fetch().integers(), expected[0].first);
    const gt::no_grad off;
    EXPECT_EQ(text.batch(2).inputs.fetch().integers(), expected[2].first);
  });
}

/// A micro-batch is a batch of a dataset with fewer rows.
TEST(Dataset, HasMicroBatchesAsBatchesOfFewerRows) {
  gt::DatasetOptions options{.path = some_text("micro.txt", 3000), .seq_len = 8, .batch = 6};
  const std::vector<Rows> expected = trained_batches(options, 3);
  options.batch = 2;
  with_ranks(1, "", [&](const comm::World&) {
    const gt::Dataset text = gt::dataset(options);
    for (size_t step = 0; step < 3; ++step) {
      std::vector<int64_t> rows;
      for (int64_t micro_batch = 0; micro_batch < 3; ++micro_batch) {
        const auto some = text.batch(static_cast<int64_t>(step) * 3 + micro_batch).inputs.fetch().integers();
        rows.insert(rows.end(), some.begin(), some.end());
      }
      EXPECT_EQ(rows, expected[step].first);
    }
  });
}

/// Rows that two workers share out unevenly are the rows that each has.
TEST(Dataset, RowsOfTwoWorkersAreTheWhole) {
  const gt::DatasetOptions options{.path = some_text("rows.txt", 2000), .seq_len = 8, .batch = 5};
  const std::vector<Rows> expected = trained_batches(options, 4);
  const std::string signals = both_ways();
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const auto runner = rank_program(world);
    const gt::Workers workers(runner, {.signals = signals});
    const gt::Dataset text = gt::dataset(options);
    for (size_t step = 0; step < 4; ++step) {
      for (const char* name : {"whole", "rows"}) {
        const gt::signal::context scope(name);
        const auto [inputs, targets] = text.batch(static_cast<int64_t>(step));
        EXPECT_EQ(inputs.fetch().integers(), expected[step].first) << name;
        EXPECT_EQ((targets.fetch().integers()), expected[step].second) << name;
      }
    }
  });
}

/// Notes the rows that are asked for, and gives zeros.
class NotedRows : public tensor::Outside {
 public:
  at::Tensor value(int64_t, const plan::TensorType&) override { return {}; }
  void answer(int64_t, const at::Tensor&) override {}
  at::Tensor batch(const tensor::BatchRows& wanted) override {
    asked.push_back(wanted);
    return at::zeros({wanted.rows.size(), 4}, at::kLong);
  }
  std::vector<tensor::BatchRows> asked;
};

/// Each worker reads the rows that it has, and workers of other signals read nothing.
TEST(Dataset, IsReadByThoseWhoHaveItsRows) {
  const plan::Program program = plan::program_from_text(
      "trireme.program/1\nsignal two workers=0,1\nsignal one workers=2\ndataset path=d seq_len=4 batch=5\n"
      "t0 = batch dataset=1 step=7 place=S(0) @two\nt1 = batch dataset=1 step=8 targets=1 @one\n"
      "t2 = batch dataset=1 step=9 place=S(1) @two\n",
      "p.txt");
  test::run_ranks(3, [&](const std::shared_ptr<comm::World>& world) {
    NotedRows rows;
    tensor::NumberedTensors tensors(*world, rows);
    for (size_t i = 0; i < program.signals.size(); ++i)
      tensors.add_signal(program.signals[i], program.workers[i]);
    tensors.add_dataset(program.datasets[0]);
    for (const plan::Instruction& one : program.instructions) tensors.run(one);
    if (world->rank() == 2) {
      ASSERT_EQ(rows.asked.size(), 1U);
      EXPECT_EQ(rows.asked[0].step, 8);
      EXPECT_TRUE(rows.asked[0].targets);
      EXPECT_EQ(rows.asked[0].rows, (plan::Range{0, 5}));
      return;
    }
    ASSERT_EQ(rows.asked.size(), 2U);
    EXPECT_EQ(rows.asked[0].rows, world->rank() == 0 ? (plan::Range{0, 3}) : (plan::Range{3, 5}));
    EXPECT_EQ(tensors.local(0).size(0), world->rank() == 0 ? 3 : 2);
    EXPECT_EQ(rows.asked[1].rows, (plan::Range{0, 5})) << "columns are cut from whole rows";
    EXPECT_EQ(tensors.local(2).sizes(), (at::IntArrayRef{5, 2}));
  });
}

/// Counts what a client sends, of which nothing may be a batch.
class CountedProgram : public controller::ProgramRunner {
 public:
  explicit CountedProgram(std::shared_ptr<controller::RankProgram> program) : program_(std::move(program)) {}
  int64_t workers() const override { return program_->workers(); }
  void add_signal(const std::string& name, const std::vector<int64_t>& workers) override {
    program_->add_signal(name, workers);
  }
  void add_dataset(const plan::DatasetSpec& dataset) override { program_->add_dataset(dataset); }
  void submit(const plan::Instruction& instruction) override { program_->submit(instruction); }
  void define_step(uint32_t number, const plan::RecordedStep& step) override {
    program_->define_step(number, step);
  }
  void replay(uint32_t number, const std::vector<int64_t>& arguments) override {
    replays.push_back(
        controller::body_of(controller::Replay{.number = number, .arguments = arguments}).size());
    program_->replay(number, arguments);
  }
  void flush() override { program_->flush(); }
  void put(int64_t number, int64_t worker, const std::string& bytes) override {
    put_bytes += bytes.size();
    program_->put(number, worker, bytes);
  }
  Asked ask(int64_t worker, int64_t bytes) override { return program_->ask(worker, bytes); }

  std::vector<size_t> replays;  ///< bytes of the messages
  size_t put_bytes = 0;

 private:
  std::shared_ptr<controller::RankProgram> program_;
};

/// Losses of the small model's training, on batches that workers read or on the same ones that the client
/// puts.
struct Trained {
  std::vector<double> losses;
  Values end;
  std::vector<size_t> replays;
  size_t put_bytes = 0;
};

struct Training {
  int64_t tp = 1, stages = 1;
  std::string schedule = "1f1b";
  bool captured = false, puts = false;
  int64_t rows = 4;
};

Trained train_on_text(const std::string& path, const Training& how) {
  constexpr int64_t kTrained = 8;
  mini_gpt::Config config = with_stages(how.stages);
  config.vocabulary = 256;
  const gt::DatasetOptions options{
      .path = path, .seq_len = config.tokens, .batch = how.rows, .seed = 9, .vocab_size = 256};
  std::vector<Rows> given;
  if (how.puts) given = trained_batches(options, kTrained * kMicroBatches);
  Trained trained;
  test::run_ranks(how.tp * how.stages, [&](const std::shared_ptr<comm::World>& world) {
    const auto runner = std::make_shared<CountedProgram>(rank_program(world));
    const gt::Workers workers(runner, {.signals = signals_file(config, how.tp, world->size())});
    gt::manual_seed(5);
    const mini_gpt::MiniGpt model(config);
    std::vector<gt::Tensor> parameters;
    for (const auto& [name, tensor] : model.parameters()) parameters.push_back(tensor);
    gt::AdamW optimizer(parameters, 1e-2);
    const gt::Dataset text = gt::dataset(options);
    gt::Capture capture;
    std::vector<double> losses;
    for (int64_t step = 0; step < kTrained; ++step) {
      std::vector<gt::Value> values;
      const auto make = [&] {
        for (const gt::Tensor& loss : gt::schedule(how.schedule, kMicroBatches, [&](int64_t micro_batch) {
               const int64_t number = step * kMicroBatches + micro_batch;
               if (how.puts) {
                 const Rows& rows = given.at(static_cast<size_t>(number));
                 return model.loss(rows.first, rows.second, how.rows);
               }
               const auto [inputs, targets] = text.batch(number);
               return model.loss(inputs, targets);
             }))
          values.push_back(loss.fetch());
        optimizer.step();
        optimizer.zero_grad();
      };
      how.captured ? capture(make) : make();
      for (gt::Value& value : values) losses.push_back(static_cast<double>(value.floats()[0]));
    }
    const Values end = values_of(model.parameters());
    if (world->rank() != 0) return;
    trained = {losses, end, runner->replays, runner->put_bytes};
  });
  return trained;
}

/// Eager or captured, on one worker or in a pipeline of split weights: the bits of a program that puts the
/// same rows.
TEST(Dataset, TrainsAsTheSameBatchesThatArePut) {
  const std::string path = some_text("learned.txt", 5000);
  for (const auto& [tp, stages] : {std::pair<int64_t, int64_t>{1, 1}, {2, 2}}) {
    const Trained put = train_on_text(path, {.tp = tp, .stages = stages, .puts = true});
    const Trained eager = train_on_text(path, {.tp = tp, .stages = stages});
    const Trained captured = train_on_text(path, {.tp = tp, .stages = stages, .captured = true});
    EXPECT_EQ(eager.losses, put.losses);
    EXPECT_EQ(captured.losses, put.losses);
    EXPECT_TRUE(eager.end == put.end && captured.end == put.end);
    EXPECT_GT(put.put_bytes, 0U);
    EXPECT_EQ(eager.put_bytes + captured.put_bytes, 0U) << "workers read all";
    EXPECT_GE(captured.replays.size(), 4U);
  }
}

/// A replayed step is a message of few bytes, however large its batch.
TEST(Dataset, IsAFewBytesOfAReplay) {
  const std::string path = some_text("replayed.txt", 5000);
  const Trained few = train_on_text(path, {.stages = 2, .captured = true, .rows = 2});
  const Trained many = train_on_text(path, {.stages = 2, .captured = true, .rows = 64});
  ASSERT_GE(few.replays.size(), 4U);
  EXPECT_EQ(few.replays, many.replays);
  for (const size_t bytes : many.replays) EXPECT_LE(bytes, 256U);
  EXPECT_NE(few.losses, many.losses);
}

/// A worker whose signals have no batch does not even look for the text.
TEST(Dataset, IsNotOpenedByWorkersWithoutAUse) {
  const std::string path = some_text("used.txt", 1000);
  const std::string signals = signals_text("stages", "stage0: {workers: [0]}\nstage1: {workers: [1]}\n");
  with_ranks(2, signals, [&](const comm::World& world) {
    const gt::Dataset text =
        gt::dataset({.path = world.rank() == 0 ? path : "/not/there", .seq_len = 8, .batch = 2});
    gt::Tensor x;
    {
      const gt::signal::context scope("stage0");
      x = text.batch(1).inputs + text.batch(1).inputs;
    }
    {
      const gt::signal::context scope("stage0_to_stage1");
      x = gt::here(x);
    }
    const gt::signal::context scope("stage1");
    EXPECT_EQ((x - x).fetch().integers().at(0), 0);
  });
}

TEST(Dataset, OptionsThatCannotBeAreErrorsOfTheirLines) {
  gt::Dataset old;
  with_ranks(1, "", [&](const comm::World&) {
    test::expect_mentions(test::failure_of([] { gt::dataset({}); }),
                          {"[gt.dataset]", "dataset_test.cpp:", "path is empty"});
    test::expect_mentions(test::failure_of([] { gt::dataset({.path = "x", .batch = 0}); }),
                          {"dataset_test.cpp:", "batch is 0; give 1 to"});
    old = gt::dataset({.path = "x"});
    test::expect_mentions(test::failure_of([&] { old.batch(-1); }),
                          {"dataset_test.cpp:", "there is no batch -1"});
    test::expect_mentions(test::failure_of([] { gt::Dataset().batch(0); }), {"this dataset is empty"});
    // Equal options are one dataset, however often they are named; others are counted.
    for (int64_t again = 0; again < 2000; ++again) gt::dataset({.path = "x"});
    test::expect_mentions(test::failure_of([] {
                            for (int64_t seed = 0; seed < 2000; ++seed)
                              gt::dataset({.path = "x", .seed = seed});
                          }),
                          {"dataset_test.cpp:", "has 1024 datasets", "use one of them again"});
  });
  with_ranks(1, "", [&](const comm::World&) {
    test::expect_mentions(test::failure_of([&] { old.batch(0); }), {"workers that this thread had before"});
  });
}

/// The message of a worker about the first rows that it reads.
std::string failure_of_reading(const gt::DatasetOptions& options) {
  std::string message;
  with_ranks(1, "", [&](const comm::World&) {
    message = test::failure_of([&] { gt::dataset(options).batch(0).inputs.fetch(); });
  });
  return message;
}

TEST(Dataset, ErrorsOfOpeningNameWorkerPathLineAndFix) {
  test::expect_mentions(
      failure_of_reading({.path = "/not/there.txt"}),
      {"worker 0", "dataset '/not/there.txt' of dataset_test.cpp:", "No such file", "set data.path to"});
  test::expect_mentions(failure_of_reading({.path = some_text("short.txt", 50), .seq_len = 64}),
                        {"worker 0", "short.txt", "one sequence needs 65", "use a longer text"});
  test::expect_mentions(
      failure_of_reading({.path = some_text("wide.txt", 900), .seq_len = 8, .vocab_size = 100}),
      {"worker 0", "wide.txt", "go up to 255", "the model has 100", "256 or more"});
}

/// The one that opened it first is named, too, wherever each of them uses it.
TEST(Dataset, OtherTextsOnWorkersAreNamed) {
  const std::string one = some_text("one.txt", 1000, 1), other = some_text("other.txt", 1000, 2);
  std::vector<std::string> said(2);
  const std::string signals = signals_text("apart", "stage0: {workers: [0]}\nstage1: {workers: [1]}\n");
  with_ranks(2, signals, [&](const comm::World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    const gt::Dataset text = gt::dataset({.path = rank == 0 ? one : other, .seq_len = 8, .batch = 2});
    said[rank] = test::failure_of([&] {
      for (const char* name : {"stage0", "stage1"}) {
        const gt::signal::context scope(name);
        text.batch(0).inputs.reshape({16});
      }
    });
  });
  EXPECT_NE(said[0].empty(), said[1].empty());
  const std::string& message = said[0].empty() ? said[1] : said[0];
  test::expect_mentions(message, {"on worker 0", "on worker 1", "the digest", "the same files"});
}

}  // namespace
}  // namespace trireme
