#pragma once
// Tensors of a program that workers run (GT's frontend in C++). Links no torch. A call gives its instruction
// to the workers and returns at once; shapes are known here, so that a mistake is an error of its own line.
// One thread makes a program.
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "trireme/plan/ops.h"

namespace gt {

using trireme::plan::Shape;
using Dtype = trireme::plan::TensorDtype;
using std::source_location;
struct Node;
class Tensor;

/// A value that is on its way from the workers.
class Value {
 public:
  Value() = default;  ///< of no tensor
  Value(std::future<std::string> bytes, trireme::plan::TensorType type, uint64_t kept_for)
      : bytes_(std::move(bytes)), type_(std::move(type)), kept_for_(kept_for) {}
  /// Waits. Of fp32, bf16 and fp16 tensors, in row-major order. Throws trireme::CommError with the worker and
  /// the cause where it cannot come, trireme::ConfigError for other dtypes, and where it was read before.
  std::vector<float> floats();
  /// The values of int64 and bool tensors; throws alike.
  std::vector<int64_t> integers();

 private:
  std::string take();

  std::future<std::string> bytes_;
  trireme::plan::TensorType type_;
  uint64_t kept_for_ = 0;  ///< as Program::kept_for() when it was asked for
};

/// A handle; copies are the same tensor. Workers free it with its last handle.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<Node> node) : node_(std::move(node)) {}

  bool defined() const { return node_ != nullptr; }
  const Shape& shape() const;
  int64_t size(int64_t dim) const;
  Dtype dtype() const;

  /// Gradients of what is made of it are collected. Throws ConfigError for dtypes that have none.
  Tensor& requires_grad_(source_location where = source_location::current());
  bool requires_grad() const;
  /// The gradient that backward passes have collected since zero_grad(), placed alike; empty: none has
  /// reached it. Throws ConfigError without requires_grad_().
  Tensor grad(source_location where = source_location::current()) const;
  void zero_grad(source_location where = source_location::current()) const;
  /// From a tensor of one element back to all that require gradients, through all stages.
  void backward(source_location where = source_location::current()) const;

  /// Asks for the value, and returns at once.
  Value fetch(source_location where = source_location::current()) const;
  /// Waits for the value of a tensor of one element.
  double item(source_location where = source_location::current()) const;

  Tensor reshape(Shape shape, source_location where = source_location::current()) const;
  Tensor transpose(int64_t dim0, int64_t dim1, source_location where = source_location::current()) const;
  Tensor unsqueeze(int64_t dim, source_location where = source_location::current()) const;
  Tensor squeeze(int64_t dim, source_location where = source_location::current()) const;
  Tensor slice(int64_t dim, int64_t begin, int64_t end,
               source_location where = source_location::current()) const;
  std::vector<Tensor> split(std::vector<int64_t> sizes, int64_t dim,
                            source_location where = source_location::current()) const;
  /// Over `dims`; none: over all.
  Tensor sum(std::vector<int64_t> dims = {}, bool keep = false,
             source_location where = source_location::current()) const;
  Tensor mean(std::vector<int64_t> dims = {}, bool keep = false,
              source_location where = source_location::current()) const;
  Tensor max(std::vector<int64_t> dims = {}, bool keep = false,
             source_location where = source_location::current()) const;
  Tensor min(std::vector<int64_t> dims = {}, bool keep = false,
             source_location where = source_location::current()) const;
  Tensor to(Dtype dtype, source_location where = source_location::current()) const;

  /// In place, where no gradient passes.
  Tensor& add_(const Tensor& other, source_location where = source_location::current());
  Tensor& copy_(const Tensor& other, source_location where = source_location::current());

  const std::shared_ptr<Node>& node() const { return node_; }

 private:
  std::shared_ptr<Node> node_;
};

/// An operand of an operator, with the line that has it.
struct Operand {
  const Tensor& tensor;
  source_location where;
  Operand(const Tensor& one,
          source_location at = source_location::current())  // NOLINT: it is meant to convert
      : tensor(one), where(at) {}
};
Tensor operator+(Operand a, const Tensor& b);
Tensor operator-(Operand a, const Tensor& b);
Tensor operator*(Operand a, const Tensor& b);
Tensor operator/(Operand a, const Tensor& b);
Tensor operator+(Operand a, double by);
Tensor operator-(Operand a, double by);
Tensor operator*(Operand a, double by);
Tensor operator*(double by, Operand a);
Tensor operator/(Operand a, double by);
Tensor operator-(Operand a);
Tensor operator==(Operand a, const Tensor& b);
Tensor operator<(Operand a, const Tensor& b);
Tensor operator>(Operand a, const Tensor& b);

/// Made where they are first used: a weight of a product as the signal of that product says. Values do not
/// depend on it. Each call of randn() takes another seed; the first of a program is that of manual_seed().
Tensor full(Shape shape, double value, Dtype dtype = Dtype::kFp32,
            source_location where = source_location::current());
Tensor zeros(Shape shape, Dtype dtype = Dtype::kFp32, source_location where = source_location::current());
Tensor ones(Shape shape, Dtype dtype = Dtype::kFp32, source_location where = source_location::current());
Tensor randn(Shape shape, Dtype dtype = Dtype::kFp32, source_location where = source_location::current());
Tensor arange(int64_t size, source_location where = source_location::current());
/// Values of this process, row-major. They travel when they are first used, to one worker.
Tensor tensor(const std::vector<float>& values, Shape shape,
              source_location where = source_location::current());
Tensor tensor(const std::vector<int64_t>& values, Shape shape,
              source_location where = source_location::current());
Tensor zeros_like(const Tensor& one, source_location where = source_location::current());
void manual_seed(int64_t seed);

Tensor matmul(const Tensor& a, const Tensor& b, source_location where = source_location::current());
Tensor maximum(const Tensor& a, const Tensor& b, source_location where = source_location::current());
Tensor minimum(const Tensor& a, const Tensor& b, source_location where = source_location::current());
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b,
             source_location at = source_location::current());
Tensor cat(const std::vector<Tensor>& tensors, int64_t dim,
           source_location where = source_location::current());
Tensor exp(const Tensor& x, source_location where = source_location::current());
Tensor log(const Tensor& x, source_location where = source_location::current());
Tensor sqrt(const Tensor& x, source_location where = source_location::current());
Tensor rsqrt(const Tensor& x, source_location where = source_location::current());
Tensor abs(const Tensor& x, source_location where = source_location::current());
Tensor square(const Tensor& x, source_location where = source_location::current());
Tensor tanh(const Tensor& x, source_location where = source_location::current());
Tensor sigmoid(const Tensor& x, source_location where = source_location::current());
Tensor relu(const Tensor& x, source_location where = source_location::current());
Tensor gelu(const Tensor& x, source_location where = source_location::current());
Tensor silu(const Tensor& x, source_location where = source_location::current());
/// The mask is a function of the seed and an element's place.
Tensor dropout(const Tensor& x, double p, int64_t seed, source_location where = source_location::current());

/// On while it lives: nothing keeps what gradients need.
class no_grad {
 public:
  no_grad();
  ~no_grad();
  no_grad(const no_grad&) = delete;
  no_grad& operator=(const no_grad&) = delete;

 private:
  bool before_;
};

/// While it lives, products (matmul, linear, attention) are computed in bf16, and exponents, sums, norms,
/// softmax and losses in fp32, as torch.autocast has it; of two dtypes an operation takes the wider.
/// Parameters, their gradients and what optimizers keep stay fp32. Scopes nest; the innermost counts. Throws
/// trireme::ConfigError for dtypes other than bf16, which needs no scale of the loss, and fp32, which is off.
class autocast {
 public:
  explicit autocast(Dtype dtype = Dtype::kBf16);
  ~autocast();
  autocast(const autocast&) = delete;
  autocast& operator=(const autocast&) = delete;

 private:
  std::optional<Dtype> before_;
};

}  // namespace gt
