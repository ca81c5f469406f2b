#pragma once
// Layers and losses of programs that workers run, and optimizers. A layer only holds its parameters: the
// signal of its call says where they lie.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "trireme/gt/tensor.h"

namespace gt {

namespace nn::functional {

/// (..., in) x (out, in) + (out); an empty bias: none.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              source_location where = source_location::current());
/// int64 (...) and (words, width): (..., width).
Tensor embedding(const Tensor& words, const Tensor& table,
                 source_location where = source_location::current());
/// (batch, heads, tokens, width), with fewer heads of keys and values where they are shared.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
                 source_location where = source_location::current());
Tensor softmax(const Tensor& x, int64_t dim, source_location where = source_location::current());
Tensor log_softmax(const Tensor& x, int64_t dim, source_location where = source_location::current());
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps = 1e-5,
                  source_location where = source_location::current());
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps = 1e-6,
                source_location where = source_location::current());
/// The mean over rows of (rows, words) and int64 (rows).
Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     source_location where = source_location::current());
Tensor mse_loss(const Tensor& x, const Tensor& target, source_location where = source_location::current());

}  // namespace nn::functional

namespace nn {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

/// x W + b with W (in, out), as the document multiplies: axis 1 of a signal splits what comes out.
struct Linear {
  Linear(int64_t in, int64_t out, bool with_bias = true, double std = 0.02);
  Tensor operator()(const Tensor& x, source_location where = source_location::current()) const;
  NamedTensors parameters(const std::string& name) const;
  Tensor weight, bias;
};

struct Embedding {
  Embedding(int64_t words, int64_t width, double std = 0.02);
  Tensor operator()(const Tensor& words, source_location where = source_location::current()) const;
  NamedTensors parameters(const std::string& name) const;
  Tensor weight;
};

struct LayerNorm {
  explicit LayerNorm(int64_t width, double eps = 1e-5);
  Tensor operator()(const Tensor& x, source_location where = source_location::current()) const;
  NamedTensors parameters(const std::string& name) const;
  Tensor weight, bias;
  double eps;
};

}  // namespace nn

/// Updates parameters in place with their gradients. A parameter without a gradient stays.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  void step(source_location where = source_location::current());
  void zero_grad(source_location where = source_location::current());
  double lr;

  /// A parameter with what the optimizer keeps of it.
  struct State {
    Tensor parameter;
    std::vector<Tensor> moments = {};  ///< one of each of kinds(); empty before the first gradient
    int64_t steps = 0;                 ///< updates
  };
  const std::vector<State>& states() const { return states_; }
  /// Names of moments, as torch.optim has them: "exp_avg".
  const std::vector<std::string>& kinds() const { return kinds_; }

 protected:
  Optimizer(std::vector<Tensor> parameters, double rate, std::vector<std::string> kinds);

 private:
  friend int64_t load_training(const std::string& path, const nn::NamedTensors& named, Optimizer& optimizer,
                               source_location where);
  /// The operation of a parameter's update number `steps`, which counts from 1.
  virtual std::pair<trireme::plan::Op, trireme::plan::OpAttributes> rule(int64_t steps) const = 0;
  void update(State& state, const Tensor& gradient, const source_location& where);

  std::vector<State> states_;
  std::vector<std::string> kinds_;
};

/// Updates as torch.optim.SGD does.
class SGD : public Optimizer {
 public:
  SGD(std::vector<Tensor> parameters, double lr, double momentum = 0, double weight_decay = 0);

 private:
  std::pair<trireme::plan::Op, trireme::plan::OpAttributes> rule(int64_t steps) const override;
  double momentum_, weight_decay_;
};

/// Updates as torch.optim.AdamW does.
class AdamW : public Optimizer {
 public:
  AdamW(std::vector<Tensor> parameters, double lr, double beta1 = 0.9, double beta2 = 0.999,
        double eps = 1e-8, double weight_decay = 0.01);

 private:
  std::pair<trireme::plan::Op, trireme::plan::OpAttributes> rule(int64_t steps) const override;
  double beta1_, beta2_, eps_, weight_decay_;
};

/// Scales gradients so that the norm over all of them, on all workers, is at most `most`; returns what it
/// was. Nothing waits.
Tensor clip_grad_norm(const std::vector<Tensor>& parameters, double most,
                      source_location where = source_location::current());

}  // namespace gt
