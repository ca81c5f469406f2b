// The products that linear layers which are cut over ranks compute while rows are under way. One process
// stands for the first of two ranks, with a joint that writes down what happens.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/nn/functional.h"
#include "trireme/nn/joint.h"

namespace trireme::nn {
namespace {

using Events = std::vector<std::string>;

std::mutex mutex;
Events events;

void note(std::string event) {
  const std::scoped_lock lock(mutex);
  events.push_back(std::move(event));
}

/// Notes each product as well, on all threads.
class NotedEvents {
 public:
  NotedEvents() : handle_(at::addGlobalCallback(at::RecordFunctionCallback(begin))) { events.clear(); }
  ~NotedEvents() { at::removeCallback(handle_); }
  NotedEvents(const NotedEvents&) = delete;
  NotedEvents& operator=(const NotedEvents&) = delete;

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    const std::string_view name = function.name();
    if (name == "trireme::matmul") note("product");
    return nullptr;
  }
  at::CallbackHandle handle_;
};

/// The other rank's rows are twice, and its terms three times, those of this one.
class FirstOfTwo final : public Joint {
 public:
  explicit FirstOfTwo(bool overlaps) : Joint(0, {0, 4, 8}), overlaps_(overlaps) {}

  Arriving begin_gather(const at::Tensor& rows) const override {
    note("gather");
    return Arriving(at::cat({rows, 2 * rows}), [] { note("gathered"); });
  }
  Arriving begin_reduce_scatter(const at::Tensor& partial, const at::Tensor& sum) const override {
    note("sum");
    const at::Tensor mine = (4 * partial.narrow(0, 0, partial.size(0) / 2)).to(at::kFloat);
    return Arriving(sum.defined() ? sum.copy_(mine) : mine, [] { note("summed"); });
  }
  bool overlaps_products() const override { return overlaps_; }
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) const override {
    return at::empty(sizes, options);
  }

 private:
  bool overlaps_;
};

struct Result {
  at::Tensor y, d_x, d_weight, d_bias;
  Events forward, backward;
};

Result run(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& bias_in, bool enters,
           bool overlaps) {
  const JointPtr joint = std::make_shared<FirstOfTwo>(overlaps);
  const at::Tensor x = x_in.clone().requires_grad_(), weight = weight_in.clone().requires_grad_(),
                   bias = bias_in.clone().requires_grad_();
  const Joints joints = enters ? Joints{.before = joint, .after = {}} : Joints{.before = {}, .after = joint};
  Result result;
  const NotedEvents noting;
  result.y = linear(x, weight, bias, WeightLayout::kOutIn, {}, {}, Output::kRead, joints);
  result.forward = std::exchange(events, {});
  const at::Tensor weights = at::linspace(-1.0, 1.0, result.y.numel()).view(result.y.sizes());
  const auto grads = torch::autograd::grad({result.y}, {x, weight, bias}, {weights});
  result.backward = std::exchange(events, {});
  result.d_x = grads[0], result.d_weight = grads[1], result.d_bias = grads[2];
  return result;
}

class JointOverlap : public ::testing::Test {
 protected:
  const at::Tensor x_ = at::linspace(-2.0, 2.0, 2 * 6 * 5).view({2, 6, 5}),
                   weight_ = at::linspace(1.0, -1.0, 3 * 5).view({3, 5}), bias_ = at::linspace(0.5, 1.5, 3);
};

TEST_F(JointOverlap, LayersThatEnterGatherAndSumBesideTheProductsOfBackward) {
  const Result whole = run(x_, weight_, bias_, /*enters=*/true, /*overlaps=*/false);
  EXPECT_EQ(whole.forward, Events({"gather", "gathered", "product"}));
  EXPECT_EQ(whole.backward, Events({"gather", "product", "sum", "gathered", "product", "summed"}));
  // This rank's rows come first: (B, T / n, D) of all are rows one rank after another.
  const at::Tensor rows = at::cat({x_.view({-1, 5}), 2 * x_.view({-1, 5})});
  EXPECT_TRUE(at::allclose(whole.y.view({-1, 3}), at::addmm(bias_, rows, weight_.t())));
  const at::Tensor dy = at::linspace(-1.0, 1.0, whole.y.numel()).view({-1, 3});
  EXPECT_TRUE(at::allclose(whole.d_x.view({-1, 5}), 4 * dy.narrow(0, 0, 12).mm(weight_)));
  EXPECT_TRUE(at::allclose(whole.d_weight, dy.t().mm(rows)));
}

TEST_F(JointOverlap, ProductsInPiecesComeBeforeWhatTheyDoNotNeed) {
  const Result whole = run(x_, weight_, bias_, true, false), pieces = run(x_, weight_, bias_, true, true);
  EXPECT_EQ(pieces.forward, Events({"gather", "product", "gathered", "product"}));
  EXPECT_EQ(pieces.backward, whole.backward);
  for (const auto& [one, other] : {std::pair(whole.y, pieces.y),
                                   {whole.d_x, pieces.d_x},
                                   {whole.d_weight, pieces.d_weight},
                                   {whole.d_bias, pieces.d_bias}})
    EXPECT_TRUE(at::allclose(one, other));
}

TEST_F(JointOverlap, LayersThatLeaveSumPiecesBesideProducts) {
  const Result whole = run(x_, weight_, bias_, /*enters=*/false, false),
               pieces = run(x_, weight_, bias_, false, true);
  EXPECT_EQ(whole.forward, Events({"product", "sum", "summed"}));
  EXPECT_EQ(whole.backward, Events({"gather", "gathered", "product", "product"}));
  // Two pieces of the rows of two ranks.
  EXPECT_EQ(pieces.forward,
            Events({"product", "product", "sum", "product", "product", "sum", "summed", "summed"}));
  EXPECT_EQ(pieces.backward, Events({"gather", "product", "gathered", "product", "product"}));
  for (const auto& [one, other] : {std::pair(whole.y, pieces.y),
                                   {whole.d_x, pieces.d_x},
                                   {whole.d_weight, pieces.d_weight},
                                   {whole.d_bias, pieces.d_bias}})
    EXPECT_TRUE(at::allclose(one, other));
  EXPECT_EQ(whole.y.sizes(), at::IntArrayRef({2, 3, 3}));
}

/// Rows that two pieces do not divide are one.
TEST_F(JointOverlap, OddRowsAreOnePiece) {
  const at::Tensor x = x_.narrow(1, 0, 2).narrow(0, 0, 1).contiguous();
  const Result whole = run(x, weight_, bias_, false, false), pieces = run(x, weight_, bias_, false, true);
  EXPECT_EQ(pieces.forward, Events({"product", "product", "sum", "summed"}));
  EXPECT_TRUE(at::allclose(whole.y, pieces.y));
  EXPECT_TRUE(at::allclose(whole.d_x, pieces.d_x));
}

}  // namespace
}  // namespace trireme::nn
