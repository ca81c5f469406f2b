// The demo's model as a program: on every mesh it is the model that libtorch computes on whole tensors.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>
#include <tuple>

#include "tests/controller/trained_mini_gpt.h"
#include "tests/support/refusal.h"
#include "tests/support/relative_error.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

/// Model and optimizer by libtorch, on whole tensors.
class DenseGpt {
 public:
  explicit DenseGpt(const Values& values, at::ScalarType products = at::kFloat) : products_(products) {
    for (const auto& [name, numbers] : values)
      weights_[name] = at::tensor(numbers).reshape(shape_of(name)).requires_grad_();
  }

  at::Tensor loss(const std::vector<int64_t>& words, const std::vector<int64_t>& next) const {
    const int64_t tokens = kConfig.tokens;
    at::Tensor x =
        weights_.at("wte.weight").index_select(0, at::tensor(words)).reshape({kBatch, tokens, -1}) +
        weights_.at("wpe.weight").narrow(0, 0, tokens);
    for (int64_t layer = 0; layer < kConfig.layers; ++layer) x = block("h." + std::to_string(layer), x);
    const at::Tensor logits = multiplied(normed("ln_f", x), weights_.at("lm_head.weight"));
    return at::cross_entropy_loss(logits.flatten(0, 1), at::tensor(next));
  }

  std::map<std::string, at::Tensor>& weights() { return weights_; }

 private:
  static std::vector<int64_t> shape_of(const std::string& name) {
    const auto& c = kConfig;
    const std::pair<const char*, std::vector<int64_t>> shapes[] = {
        {"wte.weight", {c.vocabulary, c.width}},    {"wpe.weight", {c.tokens, c.width}},
        {"c_attn.weight", {c.width, 3 * c.width}},  {"attn.c_proj.weight", {c.width, c.width}},
        {"c_fc.weight", {c.width, c.hidden}},       {"mlp.c_proj.weight", {c.hidden, c.width}},
        {"lm_head.weight", {c.width, c.vocabulary}}};
    for (const auto& [end, shape] : shapes) {
      if (name.ends_with(end)) return shape;
    }
    return {-1};
  }

  at::Tensor normed(const std::string& name, const at::Tensor& x) const {
    return at::layer_norm(x, {x.size(-1)}, weights_.at(name + ".weight"), weights_.at(name + ".bias"));
  }
  at::Tensor product(const std::string& name, const at::Tensor& x) const {
    return multiplied(x, weights_.at(name + ".weight")) + weights_.at(name + ".bias");
  }
  at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b) const {
    return at::matmul(a.to(products_), b.to(products_)).to(at::kFloat);
  }

  at::Tensor block(const std::string& name, at::Tensor x) const {
    const int64_t heads = kConfig.heads, width = kConfig.width / heads;
    const auto qkv = product(name + ".attn.c_attn", normed(name + ".ln_1", x))
                         .reshape({kBatch, kConfig.tokens, heads, 3 * width})
                         .split(width, 3);
    const at::Tensor q = qkv[0].transpose(1, 2), k = qkv[1].transpose(1, 2), v = qkv[2].transpose(1, 2);
    const at::Tensor ahead = at::ones({kConfig.tokens, kConfig.tokens}).triu(1).to(at::kBool);
    const at::Tensor scores = (multiplied(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(width)))
                                  .masked_fill(ahead, -INFINITY);
    const at::Tensor mixed = multiplied(scores.softmax(-1), v).transpose(1, 2).reshape(x.sizes());
    x = x + product(name + ".attn.c_proj", mixed);
    return x +
           product(name + ".mlp.c_proj", at::gelu(product(name + ".mlp.c_fc", normed(name + ".ln_2", x))));
  }

  at::ScalarType products_;
  std::map<std::string, at::Tensor> weights_;
};

/// torch.optim.AdamW and clip_grad_norm_, as their documentation has them.
struct DenseOutcome {
  std::vector<double> losses, norms;
  Values end;
};
DenseOutcome train_dense(const Values& begin, at::ScalarType products = at::kFloat) {
  DenseGpt model(begin, products);
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> moments;
  DenseOutcome outcome;
  for (int64_t step = 0; step < kSteps; ++step) {
    double mean = 0;
    for (int64_t i = 0; i < kMicroBatches; ++i) {
      const at::Tensor loss = model.loss(words_of(step, i, 0), words_of(step, i, 1));
      (loss / kMicroBatches).backward();
      mean += loss.item<double>() / kMicroBatches;
    }
    at::Tensor squares = at::zeros({});
    for (auto& [name, weight] : model.weights()) squares += weight.grad().square().sum();
    const double norm = squares.sqrt().item<double>(), scale = std::min(1.0, 0.5 / (norm + 1e-6));
    const at::NoGradGuard no_grad;
    for (auto& [name, weight] : model.weights()) {
      auto& [mean_of, square_of] = moments[name];
      const at::Tensor gradient = weight.grad() * scale;
      mean_of = mean_of.defined() ? mean_of * 0.9 + gradient * 0.1 : gradient * 0.1;
      square_of =
          square_of.defined() ? square_of * 0.999 + gradient.square() * 0.001 : gradient.square() * 0.001;
      const double count = static_cast<double>(step + 1);
      weight *= 1 - 1e-2 * 0.01;
      weight -= 1e-2 * (mean_of / (1 - std::pow(0.9, count))) /
                ((square_of / (1 - std::pow(0.999, count))).sqrt() + 1e-8);
      weight.mutable_grad() = at::Tensor();
    }
    outcome.losses.push_back(mean);
    outcome.norms.push_back(norm);
  }
  for (auto& [name, weight] : model.weights()) {
    const at::Tensor flat = weight.detach().contiguous();
    outcome.end[name].assign(flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel());
  }
  return outcome;
}

void expect_like_dense(const Outcome& outcome, const std::string& what) {
  const DenseOutcome dense = train_dense(outcome.begin);
  for (size_t step = 0; step < dense.losses.size(); ++step) {
    EXPECT_NEAR(outcome.losses[step], dense.losses[step], 1e-5 * dense.losses[step])
        << what << ", step " << step;
    EXPECT_NEAR(outcome.norms[step], dense.norms[step], 1e-4 * dense.norms[step])
        << what << ", step " << step;
  }
  ASSERT_EQ(outcome.end.size(), dense.end.size());
  for (const auto& [name, values] : outcome.end) {
    const at::Tensor got = at::tensor(values), wanted = at::tensor(dense.end.at(name));
    EXPECT_LT((got - wanted).norm().item<double>(), 1e-3 * wanted.norm().item<double>() + 1e-6)
        << what << ": " << name;
    EXPECT_NE(values, outcome.begin.at(name)) << what << ": nothing has changed " << name;
  }
}

TEST(MiniGpt, IsTheDenseModelOnEveryMesh) {
  const std::pair<int64_t, int64_t> meshes[] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {2, 2}, {1, 4}};
  Values begin;
  for (const auto& [tp, stages] : meshes) {
    const std::string what = "tp=" + std::to_string(tp) + " pp=" + std::to_string(stages);
    const Outcome outcome = run_mesh(with_stages(stages), tp, {""});
    expect_like_dense(outcome, what);
    if (begin.empty()) begin = outcome.begin;
    EXPECT_EQ(outcome.begin, begin) << what << ": initial values depend on the mesh";
  }
}

/// bf16 has 8 bits: products that are rounded at other places differ by one of them.
TEST(MiniGpt, InAnAutocastItIsTheDenseModelWithProductsInBf16) {
  const std::pair<int64_t, int64_t> meshes[] = {{1, 1}, {2, 1}, {2, 2}};
  for (const auto& [tp, stages] : meshes) {
    const Way way{.schedule = stages > 1 ? "1f1b" : "", .products = gt::Dtype::kBf16};
    const Outcome outcome = run_mesh(with_stages(stages), tp, way);
    const DenseOutcome dense = train_dense(outcome.begin, at::kBFloat16), fp32 = train_dense(outcome.begin);
    for (size_t step = 0; step < dense.losses.size(); ++step) {
      const double loss = dense.losses[step];
      EXPECT_NEAR(outcome.losses[step], loss, 1e-3 * loss) << tp << " x " << stages << ", step " << step;
    }
    // AdamW then takes a gradient that is rounding alone, as that of keys' biases, for one of full size.
    EXPECT_NEAR(outcome.norms[0], dense.norms[0], 1e-2 * dense.norms[0]) << tp << " x " << stages;
    EXPECT_GT(std::abs(outcome.losses[0] - fp32.losses[0]), 1e-6) << "products were not in bf16";
    EXPECT_LT(outcome.losses.back(), outcome.losses.front());
  }
}

TEST(MiniGpt, AnAutocastEndsWithItsScopeAndTakesBf16Alone) {
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const gt::Workers workers(std::make_shared<controller::RankProgram>(world), {});
    gt::Tensor weight = gt::randn({4, 4});
    weight.requires_grad_();
    const gt::Tensor x = gt::randn({2, 4});
    {
      const gt::autocast products;
      EXPECT_EQ(gt::matmul(x, weight).dtype(), gt::Dtype::kBf16);
      EXPECT_EQ((gt::matmul(x, weight) + x).dtype(), gt::Dtype::kFp32);
      EXPECT_EQ(gt::nn::functional::softmax(gt::matmul(x, weight), 1).dtype(), gt::Dtype::kFp32);
      const gt::autocast off(gt::Dtype::kFp32);
      EXPECT_EQ(gt::matmul(x, weight).dtype(), gt::Dtype::kFp32);
    }
    EXPECT_EQ(gt::matmul(x, weight).dtype(), gt::Dtype::kFp32);
    {
      const gt::autocast products;
      gt::matmul(x, weight).sum().backward();
    }
    EXPECT_EQ(weight.grad().dtype(), gt::Dtype::kFp32);
    EXPECT_THROW(const gt::autocast products(gt::Dtype::kFp16), ConfigError);
  });
}

/// Rates change in step 4 and 8, whose numbers are then found out anew.
TEST(MiniGpt, CapturedStepsAreTheStepsBitForBit) {
  const std::tuple<int64_t, int64_t, const char*> ways[] = {
      {1, 1, ""}, {2, 1, ""}, {2, 2, "1f1b"}, {1, 4, "zb_h1"}, {1, 4, ""}};
  for (const auto& [tp, stages, schedule] : ways) {
    const std::string what = fmt::format("tp={} pp={} {}", tp, stages, schedule);
    const Outcome plain = run_mesh(with_stages(stages), tp, {.schedule = schedule, .steps = 11});
    const Outcome captured =
        run_mesh(with_stages(stages), tp, {.schedule = schedule, .steps = 11, .captured = true});
    EXPECT_EQ(captured.losses, plain.losses) << what;
    EXPECT_EQ(captured.norms, plain.norms) << what;
    EXPECT_EQ(captured.end, plain.end) << what;
    EXPECT_EQ(captured.hash, plain.hash) << what << ": another program was placed";
    EXPECT_GE(captured.replays, 5) << what;
    EXPECT_LT(captured.arguments, 28) << what << ": a replay has more than 256 bytes";
  }
}

TEST(MiniGpt, SchedulesChangeTheOrderAndNoBit) {
  for (const auto& [tp, stages] : {std::pair<int64_t, int64_t>{1, 4}, {2, 2}}) {
    const Outcome one_by_one = run_mesh(with_stages(stages), tp, {""});
    for (const char* schedule : {"gpipe", "1f1b"}) {
      const Outcome outcome = run_mesh(with_stages(stages), tp, {schedule});
      EXPECT_EQ(outcome.end, one_by_one.end) << schedule;
      EXPECT_EQ(outcome.losses, one_by_one.losses) << schedule;
    }
  }
}

/// Backward passes in halves, and stages that return to their workers. Gradients of weights come in another
/// order of micro-batches than stages have them one by one, so that sums may round otherwise.
TEST(MiniGpt, SchedulesInHalvesAreTheDenseModel) {
  for (const char* schedule : {"zb_h1", "zb_h2"})
    expect_like_dense(run_mesh(with_stages(2), 2, {schedule}), schedule);
  for (const int64_t tp : {1, 2}) expect_like_dense(run_mesh(with_stages(4), tp, {"zb_v"}, true), "zb_v");
}

/// Two stages whose head is the embedding, or one that returns to the first stage.
gt::Tensor tied_loss(const gt::Tensor& table, const gt::Tensor& weight, int64_t micro_batch, bool returns) {
  gt::Tensor x;
  {
    const gt::signal::context scope("stage0");
    x = gt::nn::functional::embedding(gt::tensor(std::vector<int64_t>{1, micro_batch % 5, 2}, {3}), table);
  }
  gt::Tensor head = table;
  {
    const gt::signal::context scope("stage0_to_stage1");
    x = gt::here(x);
    if (!returns) head = gt::here(table);
  }
  {
    const gt::signal::context scope("stage1");
    x = gt::tanh(gt::matmul(x, weight));
  }
  const std::string last = returns ? "stage0" : "stage1";
  if (returns) {
    const gt::signal::context scope("stage0");
    x = gt::here(x);
  }
  const gt::signal::context scope(last);
  return gt::nn::functional::cross_entropy(gt::nn::functional::linear(x, head),
                                           gt::tensor(std::vector<int64_t>{0, 3, 4}, {3}));
}

/// Gradients of the table and the weight after a schedule; "": one micro-batch after the other.
std::vector<std::vector<float>> tied_gradients(const std::string& schedule, bool returns = false) {
  std::vector<std::vector<float>> gradients;
  std::mutex mutex;
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    const std::string path = ::testing::TempDir() + "tied-" + std::to_string(world->rank()) + ".yaml";
    std::ofstream(path)
        << "stage0: {workers: [0], replicated: true}\nstage1: {workers: [1], replicated: true}\n";
    const gt::Workers workers(std::make_shared<controller::RankProgram>(world), {.signals = path});
    gt::Tensor table = gt::randn({5, 4}), weight = gt::randn({4, 4});
    table.requires_grad_();
    weight.requires_grad_();
    const auto loss_of = [&](int64_t i) { return tied_loss(table, weight, i, returns); };
    for (int64_t i = 0; i < 4 && schedule.empty(); ++i) (loss_of(i) * 0.25).backward();
    if (!schedule.empty()) gt::schedule(schedule, 4, loss_of);
    auto values = {table.grad().fetch().floats(), weight.grad().fetch().floats()};
    const std::lock_guard lock(mutex);
    gradients = values;
  });
  return gradients;
}

/// A table that crossed collects its gradient at once: only gradients of a stage's own weights wait.
TEST(MiniGpt, TiedWeightsHaveTheirGradientsUnderEverySchedule) {
  const auto wanted = tied_gradients("");
  for (const char* schedule : {"gpipe", "1f1b", "zb_h1", "zb_h2"}) {
    const auto found = tied_gradients(schedule);
    for (size_t i = 0; i < wanted.size(); ++i) {
      const at::Tensor got = at::tensor(found.at(i)), expected = at::tensor(wanted[i]);
      EXPECT_LT((got - expected).norm().item<double>(), 1e-6 * expected.norm().item<double>())
          << schedule << ' ' << i;
    }
  }
}

TEST(MiniGpt, ProgramsThatReturnToAStageNeedOneMore) {
  try {
    tied_gradients("1f1b", true);
    ADD_FAILURE() << "it ran";
  } catch (const ConfigError& error) {
    EXPECT_TRUE(std::string(error.what()).find("give it a stage of its own") != std::string::npos)
        << error.what();
  }
}

TEST(MiniGpt, SchedulesThatDoNotFitTheFileAreRefused) {
  EXPECT_THROW(run_mesh(with_stages(2), 1, {"zb_v"}), ConfigError);
  EXPECT_THROW(run_mesh(with_stages(2), 1, {"1f2b"}), ConfigError);
}

}  // namespace
}  // namespace trireme
