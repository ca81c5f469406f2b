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
#include "trireme/gt/recompute.h"
#include "trireme/kernels/allocation_watch.h"

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

TEST(Recompute, OfBlocksHasTheBitsOfActivationsThatAreKept) {
  const std::tuple<int64_t, int64_t, const char*, gt::Dtype> ways[] = {
      {1, 1, "", gt::Dtype::kFp32},     {2, 1, "", gt::Dtype::kFp32},      {4, 1, "", gt::Dtype::kBf16},
      {2, 2, "1f1b", gt::Dtype::kBf16}, {1, 4, "zb_h1", gt::Dtype::kFp32}, {1, 4, "gpipe", gt::Dtype::kFp32}};
  for (const auto& [tp, stages, schedule, products] : ways) {
    for (const bool captured : {false, true}) {
      const std::string what = fmt::format("tp={} pp={} {} {} {}", tp, stages, schedule, products, captured);
      const Way way{.schedule = schedule, .products = products, .steps = 6, .captured = captured};
      mini_gpt::Config config = with_stages(stages);
      const Outcome kept = run_mesh(config, tp, way);
      config.recompute = true;
      const Outcome again = run_mesh(config, tp, way);
      EXPECT_EQ(again.losses, kept.losses) << what;
      EXPECT_EQ(again.norms, kept.norms) << what;
      EXPECT_EQ(again.end, kept.end) << what;
      EXPECT_NE(again.hash, kept.hash) << what << ": nothing was done again";
      EXPECT_EQ(again.replays, kept.replays) << what;
    }
  }
}

gt::Tensor some_rows(int64_t rows) {
  return gt::tensor(std::vector<float>(static_cast<size_t>(4 * rows), 0.5F), {rows, 4});
}

/// Calls the body in a program of one rank.
void with_one_worker(const std::function<void()>& body) {
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const gt::Workers workers(std::make_shared<controller::RankProgram>(world), {});
    body();
  });
}

/// Sixteen passes over 4 MiB in four pieces: of each what goes in is kept, and of one at a time the rest.
TEST(Recompute, KeepsWhatGoesInAndComesOut) {
  with_one_worker([] {
    gt::Tensor weight = gt::full({1024, 1024}, 0.5);
    weight.requires_grad_();
    const auto peak_of = [&](bool again) {
      const kernels::AllocationWatch watch;
      gt::Tensor x = weight * 1.0;
      for (int64_t piece = 0; piece < 4; ++piece) {
        const auto body = [&] { return gt::sigmoid(gt::sigmoid(gt::sigmoid(gt::sigmoid(x)))); };
        x = again ? gt::recompute(body) : body();
      }
      x.sum().backward();
      return static_cast<double>(watch.peak()) / (4 << 20);
    };
    peak_of(false);
    const double kept = peak_of(false), again = peak_of(true);
    EXPECT_GE(kept, 16);
    EXPECT_LT(again, 13);
  });
}

TEST(Recompute, HasTheGradientsOfTheFunction) {
  with_one_worker([] {
    const auto gradient_of = [](const std::function<gt::Tensor(const gt::Tensor&, const gt::Tensor&)>& loss) {
      gt::manual_seed(3);
      gt::Tensor a = gt::randn({4, 4}), b = gt::randn({4, 4});
      a.requires_grad_();
      b.requires_grad_();
      loss(a, b).backward();
      return std::pair(a.grad().fetch().floats(), b.grad().fetch().floats());
    };
    const auto inner = [](const gt::Tensor& x, const gt::Tensor& b) {
      return gt::dropout(gt::tanh(gt::matmul(x, b)), 0.5, 11) * b;
    };
    const auto plain = gradient_of(
        [&](const gt::Tensor& a, const gt::Tensor& b) { return (inner(inner(gt::exp(a), b), b) + b).sum(); });
    // One in another, two results in one sum, and a parameter that is used outside, too.
    const auto again = gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
      const gt::Tensor x = gt::exp(a);
      const gt::Tensor y = gt::recompute([&] {
        const gt::Tensor once = gt::recompute([&] { return inner(x, b); });
        return inner(once, b);
      });
      return (y + b).sum();
    });
    EXPECT_EQ(again.first, plain.first);
    for (size_t i = 0; i < plain.second.size(); ++i)  // added up in another order
      EXPECT_NEAR(again.second[i], plain.second[i], 1e-5 * std::abs(plain.second[i]));
    // A seed that is drawn inside is drawn once.
    const auto noise = [](const gt::Tensor& x) { return gt::square(x * gt::randn({4, 4})); };
    EXPECT_EQ(gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
                return gt::recompute([&] { return noise(a + b); }).sum();
              }),
              gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) { return noise(a + b).sum(); }));
    // What has no gradient inside has none.
    EXPECT_EQ(gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
                return gt::recompute([&] {
                         const gt::Tensor scale = [&] {
                           const gt::no_grad none;
                           return gt::exp(b);
                         }();
                         return a * scale * b;
                       })
                    .sum();
              }),
              gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
                const gt::Tensor scale = [&] {
                  const gt::no_grad none;
                  return gt::exp(b);
                }();
                return (a * scale * b).sum();
              }));
  });
}

/// Gradients of weights wait under this schedule, and of nothing else: not of a result that is the second
/// factor.
TEST(Recompute, OfASecondFactorHasItsGradientInTime) {
  std::vector<std::vector<float>> gradients;
  for (const char* name : {"gpipe", "zb_h1"}) {
    for (const bool again : {false, true}) {
      std::mutex mutex;
      test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
        const gt::Workers workers(std::make_shared<controller::RankProgram>(world),
                                  {.signals = signals_file(with_stages(2), 1, 2)});
        gt::manual_seed(3);
        gt::Tensor first = gt::randn({4, 4}), second = gt::randn({4, 4});
        first.requires_grad_();
        second.requires_grad_();
        gt::schedule(name, 2, [&](int64_t) {
          gt::Tensor x;
          {
            const gt::signal::context scope("pp_stage0");
            x = gt::matmul(gt::ones({4, 4}), first);
          }
          {
            const gt::signal::context boundary("stage0_to_stage1");
            x = gt::here(x);
          }
          const gt::signal::context scope("pp_stage1");
          const auto q = [&] { return gt::matmul(x, second); };
          const auto k = [&] { return gt::tanh(gt::matmul(x, second)); };
          return gt::matmul(again ? gt::recompute(q) : q(), again ? gt::recompute(k) : k()).sum();
        });
        std::vector<float> found = first.grad().fetch().floats();
        for (const float one : second.grad().fetch().floats()) found.push_back(one);
        const std::lock_guard lock(mutex);
        gradients.push_back(found);
      });
    }
  }
  for (const std::vector<float>& found : gradients) {
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], gradients[0][i], 1e-5 * std::abs(gradients[0][i])) << i;
  }
}

TEST(Recompute, IsTheCallAloneWhereNothingHasGradients) {
  with_one_worker([] {
    gt::Tensor a = gt::ones({2, 2});
    EXPECT_EQ(gt::recompute([&] { return a + 1.0; }).sum().item(), 8);
    a.requires_grad_();
    EXPECT_EQ(gt::recompute([&] { return a; }).sum().item(), 4);
    {
      const gt::no_grad none;
      EXPECT_EQ(gt::recompute([&] { return a * 3.0; }).sum().item(), 12);
    }
    gt::recompute([&] { return a * 3.0; }).sum().backward();
    EXPECT_EQ(a.grad().sum().item(), 12);
  });
}

TEST(Recompute, RefusesWhatCannotBeDoneAgain) {
  with_one_worker([] {
    gt::Tensor a = gt::ones({2, 2}), other = gt::ones({2, 2});
    a.requires_grad_();
    test::expect_refusal([&] { gt::recompute([&] { return a + gt::Tensor(other).add_(other); }); },
                         {"[gt.recompute]", "writes a tensor", "do it outside"});
    test::expect_refusal(
        [&] {
          gt::recompute([&] {
            a.sum().backward();
            return a;
          });
        },
        {"[gt.recompute]", "differentiates"});
    test::expect_refusal([&] { gt::recompute([] { return gt::Tensor(); }); }, {"[gt.recompute]", "empty"});
    const gt::Tensor x = gt::exp(a), y = gt::recompute([&] { return gt::tanh(x); });
    test::expect_refusal([&] { (x + y).sum().backward(); },
                         {"[gt.backward]", "what went into", "inside of it"});
    const gt::Tensor sum = gt::recompute([&] { return a * other; }).sum();
    {
      const gt::no_grad none;
      other.add_(a);
    }
    test::expect_refusal([&] { sum.backward(); },
                         {"[gt.backward]", "was written before", "behind backward()"});
    test::expect_refusal(
        [&] {
          gt::Tensor inside;
          const gt::Tensor result = gt::recompute([&] { return (inside = gt::exp(a)) * 2.0; });
          (result.sum() + inside.sum()).backward();
        },
        {"[gt.recompute]", "is used outside", "return it"});
    test::expect_refusal(
        [&] {
          gt::recompute([&] {
            gt::Tensor inside = a * 2.0;
            inside.requires_grad_();
            return inside;
          });
        },
        {"[gt.recompute]", "cannot collect a gradient"});
    // The program goes on.
    a.zero_grad();
    gt::recompute([&] { return a * other; }).sum().backward();
    EXPECT_EQ(a.grad().sum().item(), 8);
  });
}

TEST(Capture, FollowsWhatTheFunctionDoesAndSaysWhyItIsNoReplay) {
  with_one_worker([] {
    gt::Tensor weight = gt::ones({4, 4});
    gt::Capture capture;
    const auto value = [&](int64_t rows, double by, bool squared) {
      gt::Value fetched;
      capture([&] {
        gt::Tensor x = gt::matmul(some_rows(rows), weight) * by;
        if (squared) x = gt::square(x);
        fetched = x.sum().fetch();
      });
      return fetched.floats()[0];
    };
    EXPECT_NE(capture.why(), "");
    EXPECT_EQ(value(2, 1, false), 16);
    EXPECT_EQ(capture.replays(), 0);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(value(2, 1, false), 16);
    EXPECT_GE(capture.replays(), 1);
    EXPECT_EQ(capture.why(), "");
    const int64_t before = capture.replays();
    // A factor that has never changed is no argument yet, and one from then on.
    EXPECT_EQ(value(2, 3, false), 48);
    EXPECT_EQ(capture.replays(), before);
    EXPECT_NE(capture.why().find("changed for the first time"), std::string::npos) << capture.why();
    EXPECT_EQ(value(2, 5, false), 80);
    EXPECT_EQ(value(2, 0.5, false), 8);
    EXPECT_EQ(capture.replays(), before + 2);
    // Other shapes, and other instructions.
    EXPECT_EQ(value(3, 2, false), 48);
    EXPECT_EQ(capture.replays(), before + 2);
    EXPECT_NE(capture.why(), "");
    EXPECT_EQ(value(3, 2, true), 192);
    EXPECT_NE(capture.why().find("square"), std::string::npos) << capture.why();
    for (int i = 0; i < 2; ++i) EXPECT_EQ(value(3, 2, true), 192);
    EXPECT_EQ(capture.why(), "");
    // Both that were known are known still, whatever came between.
    EXPECT_EQ(value(2, 5, false), 80);
    EXPECT_EQ(value(3, 2, true), 192);
    EXPECT_EQ(capture.replays(), before + 5);
  });
}

/// A tensor that is made outside has its shape in no instruction of the step.
TEST(Capture, SeesThatATensorFromOutsideLiesOtherwise) {
  with_one_worker([] {
    gt::Tensor weight = gt::ones({4, 4});
    gt::Capture capture;
    for (const int64_t rows : {2, 2, 2, 2, 3, 3, 3, 3, 2}) {
      const gt::Tensor x = some_rows(rows) + some_rows(rows);
      gt::Value fetched;
      capture([&] { fetched = gt::matmul(x, weight).sum().fetch(); });
      EXPECT_EQ(fetched.floats()[0], 16.0F * static_cast<float>(rows));
    }
    // The first call makes the weight, too. Of the others each kind is known after two, and stays known.
    EXPECT_EQ(capture.replays(), 4);
  });
}

/// Tensors that are let go between two calls are freed between them, and do not change the next one.
TEST(Capture, IsTheSameWhateverIsDoneBetween) {
  with_one_worker([] {
    gt::Tensor weight = gt::ones({4, 4});
    gt::Capture capture;
    for (int64_t step = 0; step < 12; ++step) {
      gt::Value fetched;
      capture([&] { fetched = gt::matmul(some_rows(2), weight).sum().fetch(); });
      EXPECT_EQ(fetched.floats()[0], 16);
      if (step % 3 != 0) continue;
      EXPECT_EQ(gt::matmul(some_rows(3), weight).mean().item(), 2);
    }
    EXPECT_EQ(capture.replays(), 9) << capture.why();
  });
}

/// Each takes the number of the one before, which was another step.
TEST(Capture, MayBeAsShortLivedAsOneLikes) {
  with_one_worker([] {
    const gt::Tensor small = gt::ones({4, 4}) * 1.0, large = gt::ones({6, 6}) * 1.0;
    EXPECT_EQ(small.sum().item() + large.sum().item(), 52);
    for (int64_t i = 0; i < 1100; ++i) {
      gt::Capture capture;
      gt::Value fetched;
      const gt::Tensor& weight = i % 2 == 0 ? small : large;
      for (int64_t step = 0; step < 4; ++step)
        capture([&] { fetched = (weight * static_cast<double>(i)).sum({0}).fetch(); });
      const std::vector<float> sums = fetched.floats();
      ASSERT_EQ(sums, std::vector<float>(i % 2 == 0 ? 4 : 6, static_cast<float>(i * (i % 2 == 0 ? 4 : 6))));
      ASSERT_EQ(capture.replays(), 2) << i << ": " << capture.why();
    }
  });
}

TEST(Capture, KnowsAsManyStepsAsThereAreShapes) {
  with_one_worker([] {
    const gt::Tensor weight = gt::ones({4, 4}) * 1.0;
    EXPECT_EQ(weight.sum().item(), 16);
    gt::Capture capture;
    for (int64_t step = 0; step < 40; ++step) {
      gt::Value fetched;
      const int64_t rows = 1 + step % 8;
      capture([&] { fetched = gt::matmul(some_rows(rows), weight).sum().fetch(); });
      ASSERT_EQ(fetched.floats()[0], 8.0F * static_cast<float>(rows));
    }
    EXPECT_EQ(capture.replays(), 24) << capture.why();
  });
}

/// Workers keep 1,024 steps; further ones are made as without a capture.
TEST(Capture, BeyondWhatWorkersKeepIsNoReplay) {
  with_one_worker([] {
    const gt::Tensor weight = gt::ones({4, 4}) * 1.0;
    EXPECT_EQ(weight.sum().item(), 16);
    std::vector<gt::Capture> captures(1030);
    for (gt::Capture& capture : captures) {
      gt::Value fetched;
      for (int64_t step = 0; step < 3; ++step) capture([&] { fetched = weight.sum().fetch(); });
      ASSERT_EQ(fetched.floats()[0], 16);
    }
    EXPECT_EQ(captures[1023].replays(), 1);
    EXPECT_EQ(captures[1024].replays(), 0);
    EXPECT_NE(captures[1024].why().find("as many steps"), std::string::npos) << captures[1024].why();
  });
}

TEST(Capture, EndsInOrderWhereTheFunctionThrows) {
  with_one_worker([] {
    gt::Tensor sum = gt::zeros({2, 4});
    gt::Capture capture;
    const auto add = [&](bool fails) {
      capture([&] {
        const gt::no_grad off;
        sum.add_(some_rows(2));
        if (fails) throw ConfigError("stop");
        sum.add_(some_rows(2));
      });
    };
    for (int i = 0; i < 4; ++i) add(false);
    EXPECT_GT(capture.replays(), 0);
    EXPECT_THROW(add(true), ConfigError);
    EXPECT_EQ(sum.fetch().floats()[0], 4.5F);
    for (int i = 0; i < 3; ++i) add(false);
    EXPECT_EQ(sum.fetch().floats()[0], 7.5F);
    EXPECT_EQ(capture.why(), "");
  });
}

TEST(Capture, RefusesValuesWithinAndOtherCaptures) {
  with_one_worker([] {
    gt::Capture capture, inner;
    const gt::Tensor x = some_rows(2) + some_rows(2);
    test::expect_mentions(test::failure_of([&] { capture([&] { x.sum().item(); }); }), {"gt::Capture"});
    gt::Value before = x.sum().fetch();
    capture([&] { EXPECT_EQ(before.floats()[0], 8.0F); });
    test::expect_mentions(test::failure_of([&] { capture([&] { inner([] {}); }); }), {"[gt.capture]"});
    capture([] {});
    EXPECT_EQ(x.sum().item(), 8.0);
  });
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
