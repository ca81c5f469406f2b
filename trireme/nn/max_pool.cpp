#include "trireme/nn/max_pool.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;
constexpr int64_t kLargestWindow = 16;

class MaxPoolFunction : public Function<MaxPoolFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t kernel, int64_t stride,
                            int64_t padding) {
    const auto outputs = [&](int64_t inputs) { return (inputs + 2 * padding - kernel) / stride + 1; };
    const std::vector<int64_t> shape = {x.size(0), x.size(1), outputs(x.size(2)), outputs(x.size(3))};
    at::Tensor y = at::empty(shape, x.options(), kChannelsLast);
    at::Tensor taken = at::empty(shape, x.options().dtype(at::kByte), kChannelsLast);
    const InUse in_use{x};
    kernels::max_pool_forward(y, taken, x, {kernel, stride, padding});
    context->save_for_backward({taken});
    context->saved_data["x"] = x.sizes().vec();
    context->saved_data["window"] = std::vector<int64_t>{kernel, stride, padding};
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_create_graph("nn.max_pool");
    const at::Tensor taken = context->get_saved_variables().front();
    const auto window = context->saved_data["window"].toIntVector();
    const at::Tensor dy = grads[0].contiguous(kChannelsLast);
    at::Tensor dx = at::empty(context->saved_data["x"].toIntVector(), dy.options(), kChannelsLast);
    kernels::max_pool_backward(dx, dy, taken, {window[0], window[1], window[2]});
    return {dx, {}, {}, {}};
  }
};

}  // namespace

at::Tensor max_pool(const at::Tensor& x, int64_t kernel, int64_t stride, int64_t padding) {
  if (kernel <= kLargestWindow && 2 * padding <= kernel && kernels::can_max_pool(x))
    return MaxPoolFunction::apply(x, kernel, stride, padding);
  return at::max_pool2d(x, {kernel, kernel}, {stride, stride}, {padding, padding});
}

}  // namespace trireme::nn
