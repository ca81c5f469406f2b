#include "trireme/nn/torch_internals.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace trireme::nn {
namespace {

TEST(TorchInternals, AreAsTheEngineNeedsThem) {
  c10::set_default_dtype(caffe2::TypeMeta::Make<double>());  // a program may have changed it
  EXPECT_NO_THROW(check_torch_internals());
  c10::set_default_dtype(caffe2::TypeMeta::Make<float>());
  EXPECT_NO_THROW(check_torch_internals());
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW(check_torch_internals()) << "wherever it is called first";
}

TEST(BackwardHooks, RunBeforeAndAfterTheBlockInBetween) {
  std::vector<std::string> events;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor weight = at::full({2}, 3.0f).requires_grad_();
  weight.register_hook([&](const at::Tensor&) { events.emplace_back("weight"); });
  const at::Tensor input = call_after_backward(x, [&] { events.emplace_back("after"); });
  const at::Tensor output = input + input * weight;  // two paths meet at the input
  call_before_backward(output, [&] { events.emplace_back("before"); });
  output.sum().backward();
  EXPECT_EQ(events, (std::vector<std::string>{"before", "weight", "after"}));
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 4.0f)));
}

TEST(BackwardHooks, AreAbsentWithoutGradients) {
  bool ran = false;
  const at::Tensor x = at::ones({2});
  EXPECT_TRUE(call_after_backward(x, [&] { ran = true; }).is_same(x));
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(call_after_backward(leaf, [&] { ran = true; }).is_same(leaf));
  }
  call_before_backward(x, [&] { ran = true; });
  EXPECT_FALSE(ran);
}

TEST(BackwardHooks, ExceptionsReachTheCallerOfBackward) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = call_after_backward(x, [] { throw std::runtime_error("lost a peer"); });
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
}

}  // namespace
}  // namespace trireme::nn
