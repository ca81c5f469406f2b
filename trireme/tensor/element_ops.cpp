// Operations that work element by element, sum, or move elements, on a rank's parts.
#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/tensor/local_ops.h"

namespace trireme::tensor::local {
namespace {

using plan::Op;

[[noreturn]] void not_here(const OpCall& call) {
  throw LogicError("[tensor.op_kernels] {} has no kernel among those of its kind", call.op);
}

/// The key of the random numbers of a seed: other ones for each operation.
uint64_t key_of(const OpCall& call, int64_t seed) {
  return xxh3(plan::name(call.op), static_cast<uint64_t>(seed));
}

at::Tensor normal_numbers(const OpCall& call, const plan::Shape& shape) {
  at::Tensor numbers = at::empty(shape, at::TensorOptions(at::kFloat).device(call.device));
  const auto at = places(call.map.results[0].shape, call.strategy.outputs[0], call.ranks, call.rank);
  kernels::fill_normal(numbers, key_of(call, call.attributes.whole[1]), at, 1.0);
  return numbers.to(result_type(call));
}

at::Tensor compare(const OpCall& call, const at::Tensor& a, const at::Tensor& b) {
  switch (call.op) {
    case Op::kEq:
      return at::eq(a, b);
    case Op::kNe:
      return at::ne(a, b);
    case Op::kLt:
      return at::lt(a, b);
    case Op::kLe:
      return at::le(a, b);
    case Op::kGt:
      return at::gt(a, b);
    case Op::kGe:
      return at::ge(a, b);
    default:
      not_here(call);
  }
}

at::Tensor calculate(const OpCall& call, const at::Tensor& a, const at::Tensor& b) {
  switch (call.op) {
    case Op::kAdd:
      return at::add(a, b);
    case Op::kSub:
      return at::sub(a, b);
    case Op::kMul:
      return at::mul(a, b);
    case Op::kDiv:
      return at::div(a, b);
    case Op::kMaximum:
      return at::maximum(a, b);
    case Op::kMinimum:
      return at::minimum(a, b);
    default:
      return compare(call, a, b);
  }
}

at::Tensor activate(const OpCall& call, const at::Tensor& x) {
  switch (call.op) {
    case Op::kTanh:
      return at::tanh(x);
    case Op::kSigmoid:
      return at::sigmoid(x);
    case Op::kRelu:
      return at::relu(x);
    case Op::kGelu:
      return at::gelu(x);
    case Op::kSilu:
      return at::silu(x);
    default:
      not_here(call);
  }
}

at::Tensor calculate(const OpCall& call, const at::Tensor& x) {
  switch (call.op) {
    case Op::kNeg:
      return at::neg(x);
    case Op::kAbs:
      return at::abs(x);
    case Op::kSquare:
      return at::square(x);
    case Op::kScale:
      return at::mul(x, call.attributes.real[0]);
    case Op::kShift:
      return at::add(x, call.attributes.real[0]);
    case Op::kExp:
      return at::exp(x);
    case Op::kLog:
      return at::log(x);
    case Op::kSqrt:
      return at::sqrt(x);
    case Op::kRsqrt:
      return at::rsqrt(x);
    default:
      return activate(call, x);
  }
}

int64_t counted(int64_t dim, int64_t dims) {
  return dim < 0 ? dim + dims : dim;
}

/// The dimensions that are reduced: those that are named, or all.
std::vector<int64_t> reduced_dims(const OpCall& call) {
  const int64_t dims = std::ssize(call.types[0].shape);
  std::vector<int64_t> gone;
  for (const int64_t dim : call.attributes.items()) gone.push_back(counted(dim, dims));
  if (gone.empty()) {
    gone.resize(static_cast<size_t>(dims));
    std::iota(gone.begin(), gone.end(), 0);
  }
  return gone;
}

/// Summed in fp32 and rounded once, like torch's; over the elements of the whole, of which these may be some.
at::Tensor mean(const OpCall& call, const at::Tensor& x, const std::vector<int64_t>& dims, bool keep) {
  double count = 1.0;
  for (const int64_t dim : dims) count *= static_cast<double>(call.types[0].shape[static_cast<size_t>(dim)]);
  return at::sum(x, dims, keep, at::kFloat).div(count).to(x.scalar_type());
}

at::Tensor slice(const OpCall& call, const at::Tensor& x) {
  const auto& [dim, begin, end, unused] = call.attributes.whole;
  const auto place = static_cast<size_t>(counted(dim, x.dim()));
  // All of a dimension is all of each rank's part of it.
  if (call.map.results[0].shape[place] == call.types[0].shape[place]) return x;
  return at::narrow(x, dim, begin, end - begin);
}

}  // namespace

at::ScalarType result_type(const OpCall& call) {
  return scalar_type_of(call.map.results[0].dtype);
}

plan::Shape result_shape(const OpCall& call) {
  return part_shape(call.map.results[0].shape, call.strategy.outputs[0], call.ranks, call.rank);
}

kernels::Counters places(const plan::Shape& whole, const plan::TensorPlacement& placement, int64_t ranks,
                         int64_t rank) {
  if (!placement.is_shard()) return {};
  const auto dim = whole.begin() + placement.dim;
  const int64_t inside = std::accumulate(dim + 1, whole.end(), int64_t{1}, std::multiplies<>());
  const plan::Range range = plan::shard_range(*dim, ranks, rank);
  return {range.begin * inside, std::max<int64_t>(1, range.size() * inside), *dim * inside};
}

Tensors created(const OpCall& call, const Tensors&) {
  const plan::Shape shape = result_shape(call);
  if (call.op == Op::kRandn) return {normal_numbers(call, shape)};
  const auto options = at::TensorOptions(result_type(call)).device(call.device);
  if (call.op == Op::kFull) return {at::full(shape, call.attributes.real[0], options)};
  const int64_t first =
      places(call.map.results[0].shape, call.strategy.outputs[0], call.ranks, call.rank).first;
  return {at::arange(first, first + shape[0], options)};
}

Tensors binary(const OpCall& call, const Tensors& in) {
  return {calculate(call, in[0], in[1])};
}

Tensors unary(const OpCall& call, const Tensors& in) {
  return {calculate(call, in[0])};
}

Tensors cast(const OpCall& call, const Tensors& in) {
  return {in[0].to(result_type(call))};
}

Tensors dropped(const OpCall& call, const Tensors& in) {
  const double p = call.attributes.real[0];
  at::Tensor kept = at::empty(in[0].sizes(), in[0].options().dtype(at::kBool));
  const auto at = places(call.types[0].shape, call.strategy.inputs[0], call.ranks, call.rank);
  kernels::fill_kept(kept, key_of(call, call.attributes.whole[0]), at, p);
  return {in[0].mul(kept).mul(1.0 / (1.0 - p))};
}

Tensors chosen(const OpCall&, const Tensors& in) {
  return {at::where(in[0], in[1], in[2])};
}

Tensors reduced(const OpCall& call, const Tensors& in) {
  const std::vector<int64_t> dims = reduced_dims(call);
  const bool keep = call.attributes.whole[0] != 0;
  if (call.op == Op::kSum) return {at::sum(in[0], dims, keep)};
  if (call.op == Op::kMean) return {mean(call, in[0], dims, keep)};
  return {call.op == Op::kMax ? at::amax(in[0], dims, keep) : at::amin(in[0], dims, keep)};
}

Tensors rearranged(const OpCall& call, const Tensors& in) {
  const auto& [dim, other, unused, none] = call.attributes.whole;
  switch (call.op) {
    case Op::kTranspose:
      return {at::transpose(in[0], dim, other)};
    case Op::kReshape:
      return {at::reshape(in[0], result_shape(call))};
    case Op::kUnsqueeze:
      return {at::unsqueeze(in[0], dim)};
    case Op::kSqueeze:
      return {at::squeeze(in[0], dim)};
    case Op::kSlice:
      return {slice(call, in[0])};
    case Op::kSplit:
      return at::split_with_sizes(
          in[0], at::IntArrayRef(call.attributes.list.data(), call.attributes.items().size()), dim);
    case Op::kCat:
      return {at::cat(in, dim)};
    default:
      not_here(call);
  }
}

}  // namespace trireme::tensor::local
