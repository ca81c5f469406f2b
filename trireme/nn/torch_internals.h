#pragma once
// All that leans on how libtorch works inside instead of on what it promises: memory lent for gradients,
// points of the backward pass that modules have no hooks for, and operators noticed before they use a
// parameter. check_torch_internals() says which assumption no longer holds.
#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "trireme/kernels/fp8.h"

namespace torch::autograd {
struct Node;
}

namespace trireme::nn {

/// Tries everything below on small CPU tensors, once a process. Throws EnvironmentError that names the
/// assumption which this libtorch breaks.
void check_torch_internals();

// The engine keeps gradients in flat buffers. Before backward it lends each parameter its part of the buffer;
// the autograd function that computes the parameter's first gradient of a step claims that memory and
// overwrites it. So nobody fills it with zeros first. Functions that do not claim let autograd allocate a
// gradient.

/// Lends `memory`, of the shape and device of `param` and of its dtype or fp32. An undefined `memory` takes
/// back what was lent.
void lend_gradient(const at::Tensor& param, const at::Tensor& memory);
/// Whether lend_gradient() was called for `param` since its data was set.
bool has_lender(const at::Tensor& param);

/// Whether the backward pass under way goes on to `param`, or would outside of one: it requires a gradient,
/// and the pass is not one for other tensors only (torch::autograd::grad, or backward with inputs).
bool is_reached(const at::Tensor& param);
/// Whether a function's backward may write the gradient of `param` past autograd. It may where autograd would
/// only add what it gets to param.grad(): not where the gradient is returned to whoever asked for it, and not
/// where a hook is to see or replace it. Callbacks of call_when_complete() look at nothing. Outside of a
/// backward pass there is nobody to ask, and it may.
bool may_write_gradient(const at::Tensor& param);

/// Makes the lent memory the gradient of `param` and returns it, for the caller to overwrite on the current
/// stream. Returns an undefined tensor when there is a gradient already, nothing was lent, or
/// may_write_gradient() forbids it.
at::Tensor claim_gradient(const at::Tensor& param);
/// Whether claim_gradient() would return memory.
bool can_claim_gradient(const at::Tensor& param);
/// The dtype of the gradient that gradient_to_add_to() or claim_gradient() would return; else of `param`.
at::ScalarType gradient_dtype(const at::Tensor& param);
/// The gradient that `param` has, for the caller to add to on the current stream; undefined: none, or
/// may_write_gradient() forbids it.
at::Tensor gradient_to_add_to(const at::Tensor& param);

/// Lends a linear layer the FP8 matrix of its weights, for it to multiply with: `first` is its first weight,
/// and the matrix stands for that and the weights that follow in memory and are multiplied as one with it,
/// (out, in) or (in, out) as they are stored. While the matrix has memory the layer uses it, and the weights
/// themselves need none. A matrix that is not defined() takes back what was lent.
void lend_fp8(const at::Tensor& first, const kernels::Fp8Matrix& matrix);
kernels::Fp8Matrix lent_fp8(const at::Tensor& first);

/// Lends a linear layer the blocks of one of its weights in NF4, as kernels::nf4_encode() makes them: the
/// layer multiplies with what they decode to, and the weight itself needs no memory. Undefined blocks take
/// back what was lent.
void lend_nf4(const at::Tensor& weight, const at::Tensor& blocks);
at::Tensor lent_nf4(const at::Tensor& weight);

/// The current stream waits for the streams on which the gradient of `param` was overwritten or added to.
/// Autograd does not: it knows nothing of what its functions wrote past it.
void follow_gradient_writers(const at::Tensor& param);

/// Returns x with an identity node behind it: in backward, `callback` runs once the gradient of x is
/// complete, that is after everything that was computed from the returned tensor. Without a gradient on x the
/// callback never runs.
at::Tensor call_after_backward(const at::Tensor& x, std::function<void()> callback);

/// In backward, `callback` runs when the gradient of y has arrived and before it flows further.
void call_before_backward(const at::Tensor& y, std::function<void()> callback);

/// In every backward pass that reaches `leaf`, `callback` runs once, when its gradient is complete: whatever
/// was computed from the leaf has been differentiated. It may have gone to leaf.grad(), or past it by an
/// in-place kernel. On a GPU it runs on the stream that was current at this call. Lasts as long as what is
/// returned, and no longer than the leaf's dtype and device.
std::shared_ptr<torch::autograd::Node> call_when_complete(const at::Tensor& leaf,
                                                          std::function<void()> callback);
/// Whether backward passes over what is computed from `leaf` from now on would still call the callback of
/// `watch`: set_data() may have ended that.
bool is_watched(const at::Tensor& leaf, const std::shared_ptr<torch::autograd::Node>& watch);

/// Whether an operator is one that a module calls, or runs inside of another: then memory that the other one
/// uses must stay.
enum class Nesting { kOuter, kInner };

/// Called before an operator runs, on its thread, with the tokens of the storages among its arguments that
/// its own watch has marked, each once. May give the storages memory; must not use marked tensors itself.
using Touched = std::function<void(const std::vector<size_t>& tokens, Nesting nesting)>;

/// From now on whoever asks for the memory of `tensor` or of a tensor that shares it, by data_ptr() or by
/// torch::save, gets a c10::Error with `reason`. The storage holds no memory then.
void refuse_access(const at::Tensor& tensor, std::string reason);
/// Ends that, before the storage gets memory again.
void allow_access(const at::Tensor& tensor);

/// Called before an operator writes to a marked tensor in place, after Touched, with the token of its storage
/// and its first element, counted from the start of the storage.
using Written = std::function<void(size_t token, int64_t offset)>;

/// Notices when an operator is about to use a marked tensor, in forward and in backward, so that parameters
/// of any module can be gathered without a line in the module. It works by a dispatch key on the marked
/// tensors and their views (torch's DeferredInit, made for libraries outside torch). What reads memory past
/// the dispatcher, such as a kernel on data_ptr(), is seen where it says so (InUse). Marks last as long as
/// this lives.
class TouchWatch {
 public:
  explicit TouchWatch(Touched touched, Written written = {});
  ~TouchWatch();
  TouchWatch(const TouchWatch&) = delete;
  TouchWatch& operator=(const TouchWatch&) = delete;

  /// From now on operators on `tensor`, or on views made of it from now on, report `token`. A tensor whose
  /// data was set is marked anew.
  void mark(const at::Tensor& tensor, size_t token);

 private:
  struct Mark {
    at::Tensor tensor;
    c10::Storage storage;  ///< that it had when it was marked
  };
  Touched touched_;
  Written written_;
  std::vector<Mark> marks_;
};

/// For functions that read memory past the dispatcher: tells the watches of the tensors what one operator on
/// all of them would, and operators of this thread run inside of that one while this lives.
/// Tensors may be undefined. Where nothing is marked, it costs a look at the keys of each tensor.
class InUse {
 public:
  InUse(std::initializer_list<at::TensorList> lists);
  ~InUse();
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
};

}  // namespace trireme::nn
