#include "trireme/nn/joint.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/nn/autograd.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/linear_parts.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class LeaveFunction : public Function<LeaveFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const JointPtr& joint) {
    keep_joints(*context, {.before = {}, .after = joint});
    return shaped(joint->reduce_scatter(as_rows(x).contiguous()).to(x.scalar_type()), x);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.leave");
    const JointPtr joint = kept_joints(*context).after;
    return {shaped(joint->gather(as_rows(grads[0]).contiguous()), grads[0]), at::Tensor()};
  }
};

}  // namespace

at::Tensor leave(const at::Tensor& x, const JointPtr& joint) {
  return joint ? LeaveFunction::apply(x, joint) : x;
}

/// Each rank looks up some row of its own for tokens that it does not have, and drops it: any will do, and
/// different ones keep the gradient of one row from having many terms.
at::Tensor embedding(const at::Tensor& indices, const at::Tensor& weight, const JointPtr& joint) {
  if (!joint) return nn::embedding(indices, weight);
  const at::Tensor local = indices - joint->first_word();
  const at::Tensor elsewhere = local.lt(0).logical_or_(local.ge(weight.size(0)));
  const at::Tensor found = nn::embedding(local.remainder(weight.size(0)), weight);
  return leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), joint);
}

at::Tensor positions(const at::Tensor& tokens, const Joint& joint) {
  const int64_t mine = tokens.numel() / joint.size(), length = tokens.size(1);
  return (at::arange(mine, tokens.options()) + joint.rank() * mine)
      .remainder(length)
      .view({tokens.size(0), length / joint.size()});
}

/// Parts of the vocabulary may differ in size, and ranks gather as many rows as the largest has.
at::Tensor joined_logits(const at::Tensor& x, const at::Tensor& weight, const Joint& joint) {
  if (at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad())) {
    throw LogicError(
        "[nn.joined_logits] logits of a vocabulary that is cut over {} ranks have no gradient; call the "
        "model "
        "under NoGradGuard, or train with its loss",
        joint.size());
  }
  const at::Tensor rows = joint.gather(as_rows(x).contiguous());
  const at::Tensor mine = at::matmul(weight, rows.t());  // (V', B T)
  const std::vector<int64_t>& first = joint.vocabulary();
  int64_t most = 0;
  for (size_t rank = 0; rank + 1 < first.size(); ++rank) most = std::max(most, first[rank + 1] - first[rank]);
  at::Tensor padded = at::zeros({most, rows.size(0)}, mine.options());
  padded.narrow(0, 0, mine.size(0)).copy_(mine);
  const at::Tensor all = joint.gather(padded);
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank + 1 < first.size(); ++rank)
    parts.push_back(all.narrow(0, static_cast<int64_t>(rank) * most, first[rank + 1] - first[rank]));
  return at::cat(parts).t().reshape({x.size(0), x.size(1) * joint.size(), first.back()});
}

}  // namespace trireme::nn
