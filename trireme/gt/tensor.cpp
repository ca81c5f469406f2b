#include "trireme/gt/tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/gt/nn.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::ConfigError;
using trireme::plan::Op;
using trireme::plan::OpAttributes;
using trireme::plan::TensorType;

namespace {

const NodePtr& node_of(const Tensor& tensor) {
  if (!tensor.defined()) throw ConfigError("[gt] this tensor is empty; make it before its use");
  return tensor.node();
}

Tensor apply(Op op, const std::vector<Tensor>& inputs, const OpAttributes& attributes,
             const source_location& where) {
  std::vector<NodePtr> nodes;
  for (const Tensor& input : inputs) nodes.push_back(node_of(input));
  const std::vector<NodePtr> results = Program::current()->op(op, nodes, attributes, where);
  return results.empty() ? inputs[0] : Tensor(results[0]);
}

Tensor binary(Op op, const Operand& a, const Tensor& b) {
  return apply(op, {a.tensor, b}, {}, a.where);
}

template <typename Number>
std::string bytes_of_values(const std::vector<Number>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Number)};
}

/// fp16 has 5 bits of exponent and 10 of fraction.
float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = half >> 10 & 31u,
                 fraction = half & 1023u;
  if (exponent == 0)
    return std::bit_cast<float>(sign) + (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

}  // namespace

/// Recorded instructions go to workers when all micro-batches have been called for.
std::string Value::take() {
  if (!bytes_.valid())
    throw ConfigError(
        "[gt] this value was read before, or is of no tensor; keep what it gave, or fetch again");
  if (kept_for_ != 0 && Program::exists() && Program::current()->kept_for() == kept_for_)
    throw ConfigError(
        "[gt] a value that is fetched inside of a gt::schedule() or gt::Capture arrives when that has ended; "
        "keep what fetch() returns, and read it after the call");
  return bytes_.get();
}

std::vector<float> Value::floats() {
  if (!is_floating(type_.dtype))
    throw ConfigError("[gt] a tensor {} has whole numbers; call integers()", to_text(type_));
  const std::string bytes = take();
  const auto width = static_cast<size_t>(bytes_of(type_.dtype));
  std::vector<float> values(bytes.size() / width);
  if (type_.dtype == Dtype::kFp32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half = 0;
    std::memcpy(&half, bytes.data() + 2 * i, 2);
    values[i] = type_.dtype == Dtype::kFp16 ? from_half(half)
                                            : std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
  }
  return values;
}

std::vector<int64_t> Value::integers() {
  if (is_floating(type_.dtype))
    throw ConfigError("[gt] a tensor {} has no whole numbers; call floats()", to_text(type_));
  const std::string bytes = take();
  if (type_.dtype == Dtype::kBool) return {bytes.begin(), bytes.end()};
  std::vector<int64_t> values(bytes.size() / sizeof(int64_t));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

const Shape& Tensor::shape() const {
  return node_of(*this)->type.shape;
}

int64_t Tensor::size(int64_t dim) const {
  const auto dims = std::ssize(shape());
  if (dim < -dims || dim >= dims) throw ConfigError("[gt] dimension {} is outside {} dimensions", dim, dims);
  return shape()[static_cast<size_t>(dim < 0 ? dim + dims : dim)];
}

Dtype Tensor::dtype() const {
  return node_of(*this)->type.dtype;
}

Tensor& Tensor::requires_grad_(source_location) {
  Program::current()->require_grad(node_of(*this));
  return *this;
}

bool Tensor::requires_grad() const {
  return node_of(*this)->requires_grad || node_->piece != nullptr;
}

Tensor Tensor::grad(source_location where) const {
  return Tensor(Program::current()->gradient(node_of(*this), where));
}

void Tensor::zero_grad(source_location where) const {
  Program::current()->forget_gradient(node_of(*this), where);
}

void Tensor::backward(source_location where) const {
  Program::current()->backward(node_of(*this), where);
}

Value Tensor::fetch(source_location where) const {
  const std::shared_ptr<Program> program = Program::current();
  return {program->fetch(node_of(*this), where), node_->type, program->kept_for()};
}

double Tensor::item(source_location where) const {
  const TensorType& type = node_of(*this)->type;
  if (type.bytes() != bytes_of(type.dtype))
    throw ConfigError("[gt] item() is of one element, not of {}; call fetch()", to_text(type));
  Value value = fetch(where);
  return is_floating(type.dtype) ? static_cast<double>(value.floats()[0])
                                 : static_cast<double>(value.integers()[0]);
}

Tensor Tensor::reshape(Shape shape, source_location where) const {
  return apply(Op::kReshape, {*this}, OpAttributes::of({}, {}, std::move(shape)), where);
}
Tensor Tensor::transpose(int64_t dim0, int64_t dim1, source_location where) const {
  return apply(Op::kTranspose, {*this}, OpAttributes::of({dim0, dim1}), where);
}
Tensor Tensor::unsqueeze(int64_t dim, source_location where) const {
  return apply(Op::kUnsqueeze, {*this}, OpAttributes::of({dim}), where);
}
Tensor Tensor::squeeze(int64_t dim, source_location where) const {
  return apply(Op::kSqueeze, {*this}, OpAttributes::of({dim}), where);
}
Tensor Tensor::slice(int64_t dim, int64_t begin, int64_t end, source_location where) const {
  return apply(Op::kSlice, {*this}, OpAttributes::of({dim, begin, end}), where);
}

std::vector<Tensor> Tensor::split(std::vector<int64_t> sizes, int64_t dim, source_location where) const {
  std::vector<Tensor> parts;
  for (const NodePtr& part : Program::current()->op(Op::kSplit, {node_of(*this)},
                                                    OpAttributes::of({dim}, {}, std::move(sizes)), where))
    parts.emplace_back(part);
  return parts;
}

Tensor Tensor::sum(std::vector<int64_t> dims, bool keep, source_location where) const {
  return apply(Op::kSum, {*this}, OpAttributes::of({keep}, {}, std::move(dims)), where);
}
Tensor Tensor::mean(std::vector<int64_t> dims, bool keep, source_location where) const {
  return apply(Op::kMean, {*this}, OpAttributes::of({keep}, {}, std::move(dims)), where);
}
Tensor Tensor::max(std::vector<int64_t> dims, bool keep, source_location where) const {
  return apply(Op::kMax, {*this}, OpAttributes::of({keep}, {}, std::move(dims)), where);
}
Tensor Tensor::min(std::vector<int64_t> dims, bool keep, source_location where) const {
  return apply(Op::kMin, {*this}, OpAttributes::of({keep}, {}, std::move(dims)), where);
}
Tensor Tensor::to(Dtype dtype, source_location where) const {
  return dtype == this->dtype()
             ? *this
             : apply(Op::kCast, {*this}, OpAttributes::of({static_cast<int64_t>(dtype)}), where);
}

Tensor& Tensor::add_(const Tensor& other, source_location where) {
  apply(Op::kAddInto, {*this, other}, {}, where);
  return *this;
}
Tensor& Tensor::copy_(const Tensor& other, source_location where) {
  apply(Op::kCopyInto, {*this, other}, {}, where);
  return *this;
}

Tensor operator+(Operand a, const Tensor& b) {
  return binary(Op::kAdd, a, b);
}
Tensor operator-(Operand a, const Tensor& b) {
  return binary(Op::kSub, a, b);
}
Tensor operator*(Operand a, const Tensor& b) {
  return binary(Op::kMul, a, b);
}
Tensor operator/(Operand a, const Tensor& b) {
  return binary(Op::kDiv, a, b);
}
Tensor operator==(Operand a, const Tensor& b) {
  return binary(Op::kEq, a, b);
}
Tensor operator<(Operand a, const Tensor& b) {
  return binary(Op::kLt, a, b);
}
Tensor operator>(Operand a, const Tensor& b) {
  return binary(Op::kGt, a, b);
}
Tensor operator+(Operand a, double by) {
  return apply(Op::kShift, {a.tensor}, OpAttributes::of({}, {by}), a.where);
}
Tensor operator-(Operand a, double by) {
  return apply(Op::kShift, {a.tensor}, OpAttributes::of({}, {-by}), a.where);
}
Tensor operator*(Operand a, double by) {
  return apply(Op::kScale, {a.tensor}, OpAttributes::of({}, {by}), a.where);
}
Tensor operator*(double by, Operand a) {
  return apply(Op::kScale, {a.tensor}, OpAttributes::of({}, {by}), a.where);
}
Tensor operator/(Operand a, double by) {
  if (by == 0) throw ConfigError("[gt] a tensor is divided by 0");
  return apply(Op::kScale, {a.tensor}, OpAttributes::of({}, {1 / by}), a.where);
}
Tensor operator-(Operand a) {
  return apply(Op::kNeg, {a.tensor}, {}, a.where);
}

Tensor full(Shape shape, double value, Dtype dtype, source_location where) {
  return apply(Op::kFull, {}, OpAttributes::of({static_cast<int64_t>(dtype)}, {value}, std::move(shape)),
               where);
}
Tensor zeros(Shape shape, Dtype dtype, source_location where) {
  return full(std::move(shape), 0, dtype, where);
}
Tensor ones(Shape shape, Dtype dtype, source_location where) {
  return full(std::move(shape), 1, dtype, where);
}
Tensor randn(Shape shape, Dtype dtype, source_location where) {
  return apply(
      Op::kRandn, {},
      OpAttributes::of({static_cast<int64_t>(dtype), Program::current()->next_seed++}, {}, std::move(shape)),
      where);
}
Tensor arange(int64_t size, source_location where) {
  return apply(Op::kArange, {}, OpAttributes::of({size}), where);
}

void manual_seed(int64_t seed) {
  Program::current()->next_seed = seed;
}

Tensor tensor(const std::vector<float>& values, Shape shape, source_location where) {
  return Tensor(Program::current()->input({std::move(shape), Dtype::kFp32}, bytes_of_values(values), where));
}
Tensor tensor(const std::vector<int64_t>& values, Shape shape, source_location where) {
  return Tensor(Program::current()->input({std::move(shape), Dtype::kInt64}, bytes_of_values(values), where));
}
Tensor zeros_like(const Tensor& one, source_location where) {
  return Tensor(Program::current()->alike(node_of(one), 0, where));
}

Tensor matmul(const Tensor& a, const Tensor& b, source_location at) {
  return apply(Op::kMatmul, {a, b}, {}, at);
}
Tensor maximum(const Tensor& a, const Tensor& b, source_location at) {
  return apply(Op::kMaximum, {a, b}, {}, at);
}
Tensor minimum(const Tensor& a, const Tensor& b, source_location at) {
  return apply(Op::kMinimum, {a, b}, {}, at);
}
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b, source_location at) {
  return apply(Op::kWhere, {condition, a, b}, {}, at);
}
Tensor cat(const std::vector<Tensor>& tensors, int64_t dim, source_location at) {
  return apply(Op::kCat, tensors, OpAttributes::of({dim}), at);
}
Tensor exp(const Tensor& x, source_location at) {
  return apply(Op::kExp, {x}, {}, at);
}
Tensor log(const Tensor& x, source_location at) {
  return apply(Op::kLog, {x}, {}, at);
}
Tensor sqrt(const Tensor& x, source_location at) {
  return apply(Op::kSqrt, {x}, {}, at);
}
Tensor rsqrt(const Tensor& x, source_location at) {
  return apply(Op::kRsqrt, {x}, {}, at);
}
Tensor abs(const Tensor& x, source_location at) {
  return apply(Op::kAbs, {x}, {}, at);
}
Tensor square(const Tensor& x, source_location at) {
  return apply(Op::kSquare, {x}, {}, at);
}
Tensor tanh(const Tensor& x, source_location at) {
  return apply(Op::kTanh, {x}, {}, at);
}
Tensor sigmoid(const Tensor& x, source_location at) {
  return apply(Op::kSigmoid, {x}, {}, at);
}
Tensor relu(const Tensor& x, source_location at) {
  return apply(Op::kRelu, {x}, {}, at);
}
Tensor gelu(const Tensor& x, source_location at) {
  return apply(Op::kGelu, {x}, {}, at);
}
Tensor silu(const Tensor& x, source_location at) {
  return apply(Op::kSilu, {x}, {}, at);
}
Tensor dropout(const Tensor& x, double p, int64_t seed, source_location at) {
  return apply(Op::kDropout, {x}, OpAttributes::of({seed}, {p}), at);
}

autocast::autocast(Dtype dtype) : before_(Program::current()->autocast) {
  if (dtype != Dtype::kBf16 && dtype != Dtype::kFp32)
    throw ConfigError("[gt.autocast] products in {}: use bf16, or fp32 for a scope without it", dtype);
  Program::current()->autocast = dtype == Dtype::kBf16 ? std::optional(dtype) : std::nullopt;
}
autocast::~autocast() {
  if (Program::exists()) Program::current()->autocast = before_;
}

no_grad::no_grad() : before_(std::exchange(Program::current()->grad_enabled, false)) {}
no_grad::~no_grad() {
  if (Program::exists()) Program::current()->grad_enabled = before_;
}

namespace nn::functional {

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, source_location at) {
  return bias.defined() ? apply(Op::kLinear, {x, weight, bias}, {}, at)
                        : apply(Op::kLinear, {x, weight}, {}, at);
}
Tensor embedding(const Tensor& words, const Tensor& table, source_location at) {
  return apply(Op::kEmbedding, {words, table}, {}, at);
}
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
                 source_location at) {
  return apply(Op::kAttention, {q, k, v}, OpAttributes::of({causal}, {scale}), at);
}
Tensor softmax(const Tensor& x, int64_t dim, source_location at) {
  return apply(Op::kSoftmax, {x}, OpAttributes::of({dim}), at);
}
Tensor log_softmax(const Tensor& x, int64_t dim, source_location at) {
  return apply(Op::kLogSoftmax, {x}, OpAttributes::of({dim}), at);
}
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, source_location at) {
  return apply(Op::kLayerNorm, {x, weight, bias}, OpAttributes::of({}, {eps}), at);
}
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, source_location at) {
  return apply(Op::kRmsNorm, {x, weight}, OpAttributes::of({}, {eps}), at);
}
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, source_location at) {
  return apply(Op::kCrossEntropy, {logits, targets}, {}, at);
}
Tensor mse_loss(const Tensor& x, const Tensor& target, source_location at) {
  return apply(Op::kMseLoss, {x, target}, {}, at);
}

}  // namespace nn::functional
}  // namespace gt
