#pragma once
// Operations on whole tensors in other words than the library's: by torch functions that compute something
// simpler, or by the formula of a paper.
#include <ATen/ATen.h>

#include <cmath>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "trireme/base/hash.h"
#include "trireme/kernels/normal.h"
#include "trireme/plan/op_rules.h"

namespace trireme::test {

struct OpCase {
  plan::Op op;
  std::vector<plan::TensorType> types;
  plan::OpAttributes attributes = {};
};

inline at::Tensor dense_binary(plan::Op op, const at::Tensor& a, const at::Tensor& b) {
  using plan::Op;
  switch (op) {
    case Op::kAdd:
      return a + b;
    case Op::kSub:
      return a - b;
    case Op::kMul:
      return a * b;
    case Op::kDiv:
      return a / b;
    case Op::kMaximum:
      return at::where(a > b, a, b);
    case Op::kMinimum:
      return at::where(a < b, a, b);
    case Op::kEq:
      return a == b;
    case Op::kNe:
      return a != b;
    case Op::kLt:
      return a < b;
    case Op::kLe:
      return a <= b;
    case Op::kGt:
      return a > b;
    case Op::kGe:
      return a >= b;
    default:
      throw std::logic_error("no binary operation");
  }
}

inline at::Tensor dense_unary(plan::Op op, const at::Tensor& x, double by) {
  using plan::Op;
  switch (op) {
    case Op::kNeg:
      return -x;
    case Op::kAbs:
      return at::where(x > 0, x, -x);
    case Op::kSquare:
      return x * x;
    case Op::kScale:
      return x * by;
    case Op::kShift:
      return x + by;
    case Op::kExp:
      return x.exp();
    case Op::kLog:
      return x.log();
    case Op::kSqrt:
      return x.pow(0.5);
    case Op::kRsqrt:
      return x.pow(-0.5);
    case Op::kTanh:
      return 2 / (1 + (-2 * x).exp()) - 1;
    case Op::kSigmoid:
      return 1 / (1 + (-x).exp());
    case Op::kRelu:
      return x.clamp_min(0);
    case Op::kGelu:
      return x * 0.5 * (1 + (x / std::sqrt(2.0)).erf());
    case Op::kSilu:
      return x / (1 + (-x).exp());
    default:
      throw std::logic_error("no unary operation");
  }
}

inline at::Tensor dense_reduced(const OpCase& one, const at::Tensor& x) {
  std::vector<int64_t> dims(one.attributes.items().begin(), one.attributes.items().end());
  for (int64_t dim = 0; dim < x.dim() && one.attributes.listed == 0; ++dim) dims.push_back(dim);
  const bool keep = one.attributes.whole[0] != 0;
  switch (one.op) {
    case plan::Op::kSum:
      return x.sum(dims, keep);
    case plan::Op::kMean:
      return x.mean(dims, keep);
    case plan::Op::kMax:
      return x.amax(dims, keep);
    default:
      return -(-x).amax(dims, keep);
  }
}

inline at::Tensor dense_attention(const OpCase& one, const std::vector<at::Tensor>& in) {
  const int64_t share = in[0].size(1) / in[1].size(1);
  const at::Tensor k = in[1].repeat_interleave(share, 1), v = in[2].repeat_interleave(share, 1);
  at::Tensor scores = at::matmul(in[0], k.transpose(2, 3)) * one.attributes.real[0];
  if (one.attributes.whole[0] != 0) {
    const at::Tensor later = at::ones({scores.size(2), scores.size(3)}, at::kBool).triu(1);
    scores = scores.masked_fill(later, -1e30);
  }
  return at::matmul(at::softmax(scores, 3), v);
}

inline at::Tensor dense_norm(const OpCase& one, const std::vector<at::Tensor>& in) {
  const at::Tensor x = one.op == plan::Op::kLayerNorm ? in[0] - in[0].mean(-1, true) : in[0];
  at::Tensor y = x / (x.square().mean(-1, true) + one.attributes.real[0]).sqrt();
  if (in.size() > 1) y = y * in[1];
  return in.size() > 2 ? y + in[2] : y;
}

/// The operands that are written, afterwards, as torch.optim has it.
inline std::vector<at::Tensor> dense_update(const OpCase& one, const std::vector<at::Tensor>& in) {
  const auto& real = one.attributes.real;
  if (one.op == plan::Op::kAddInto) return {in[0] + in[1]};
  if (one.op == plan::Op::kCopyInto) return {in[1].clone()};
  if (one.op == plan::Op::kSgd) {
    const at::Tensor along = in[1] + real[2] * in[0];
    if (in.size() == 2) return {in[0] - real[0] * along};
    const at::Tensor buffer = real[1] * in[2] + along;
    return {in[0] - real[0] * buffer, buffer};
  }
  const at::Tensor m = real[1] * in[2] + (1 - real[1]) * in[1],
                   v = real[2] * in[3] + (1 - real[2]) * in[1] * in[1];
  const auto step = static_cast<double>(one.attributes.whole[0]);
  const at::Tensor root = (v / (1 - std::pow(real[2], step))).sqrt() + real[3];
  return {in[0] * (1 - real[0] * real[4]) - real[0] * m / (1 - std::pow(real[1], step)) / root, m, v};
}

/// Ones where dropout keeps an element, and zeros, in the order of elements.
inline at::Tensor dense_kept(const plan::Shape& shape, int64_t seed, double p) {
  at::Tensor kept = at::empty(shape);
  const uint64_t key = xxh3(std::string_view("dropout"), static_cast<uint64_t>(seed));
  for (int64_t i = 0; i < kept.numel(); ++i) {
    const double drawn = static_cast<double>(mix64(key, static_cast<uint64_t>(i)) >> 11) * 0x1p-53;
    kept.mutable_data_ptr<float>()[i] = drawn >= p ? 1.0f : 0.0f;
  }
  return kept;
}

inline at::Tensor dense_created(const OpCase& one) {
  const plan::Shape shape(one.attributes.items().begin(), one.attributes.items().end());
  if (one.op == plan::Op::kArange) return at::arange(one.attributes.whole[0]);
  if (one.op == plan::Op::kFull) return at::full(shape, one.attributes.real[0]);
  at::Tensor numbers = at::empty(shape);
  const uint64_t key = xxh3(std::string_view("randn"), static_cast<uint64_t>(one.attributes.whole[1]));
  for (int64_t i = 0; i < numbers.numel(); ++i)
    numbers.mutable_data_ptr<float>()[i] =
        static_cast<float>(kernels::standard_normal(mix64(key, static_cast<uint64_t>(i))));
  return numbers;
}

inline at::Tensor dense_moved(const OpCase& one, const std::vector<at::Tensor>& in) {
  const auto& whole = one.attributes.whole;
  using plan::Op;
  switch (one.op) {
    case Op::kTranspose:
      return in[0].transpose(whole[0], whole[1]);
    case Op::kReshape:
      return in[0].reshape({one.attributes.list.data(), one.attributes.items().size()});
    case Op::kUnsqueeze:
      return in[0].unsqueeze(whole[0]);
    case Op::kSqueeze:
      return in[0].squeeze(whole[0]);
    case Op::kSlice:
      return in[0].slice(whole[0], whole[1], whole[2]);
    case Op::kCat:
      return at::cat(in, whole[0]);
    default:
      throw std::logic_error("no move of elements");
  }
}

inline std::vector<at::Tensor> dense_split(const OpCase& one, const at::Tensor& x) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const int64_t size : one.attributes.items()) {
    parts.push_back(x.slice(one.attributes.whole[0], begin, begin + size));
    begin += size;
  }
  return parts;
}

/// The results of an operation, or for one that writes its operands what these are afterwards.
inline std::vector<at::Tensor> dense(const OpCase& one, const std::vector<at::Tensor>& in) {
  using plan::Op;
  const auto& [op, types, attributes] = one;
  if (op <= Op::kArange) return {dense_created(one)};
  if (op <= Op::kGe) return {dense_binary(op, in[0], in[1])};
  if (op <= Op::kSilu) return {dense_unary(op, in[0], attributes.real[0])};
  if (op == Op::kCast) return {in[0]};
  if (op == Op::kDropout) {
    const double p = attributes.real[0];
    return {in[0] * dense_kept(types[0].shape, attributes.whole[0], p) / (1 - p)};
  }
  if (op == Op::kWhere) return {at::where(in[0], in[1], in[2])};
  if (op <= Op::kMin) return {dense_reduced(one, in[0])};
  if (op == Op::kSplit) return dense_split(one, in[0]);
  if (op <= Op::kCat) return {dense_moved(one, in)};
  if (op == Op::kMatmul) return {at::matmul(in[0], in[1])};
  if (op == Op::kLinear) {
    const at::Tensor product = at::matmul(in[0], in[1].t());
    return {in.size() > 2 ? product + in[2] : product};
  }
  if (op == Op::kEmbedding) return {in[1].index({in[0]})};
  if (op == Op::kAttention) return {dense_attention(one, in)};
  if (op == Op::kSoftmax) {
    const at::Tensor powers = in[0].exp();
    return {powers / powers.sum(attributes.whole[0], true)};
  }
  if (op == Op::kLogSoftmax) return {in[0] - in[0].exp().sum(attributes.whole[0], true).log()};
  if (op <= Op::kRmsNorm) return {dense_norm(one, in)};
  if (op == Op::kCrossEntropy) return {at::cross_entropy_loss(in[0], in[1])};
  if (op == Op::kMseLoss) return {(in[0] - in[1]).square().mean()};
  return dense_update(one, in);
}

}  // namespace trireme::test
