// Law 4: logits, every gradient, 20 losses and the final weights equal PyTorch's, from the files that
// tests/reference/make_reference.py wrote. Goes through the data-parallel engine on one rank and our
// optimizer.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/nn/language_model.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/model_facts.h"
#include "trireme/train/connect.h"

namespace trireme {
namespace {

struct Case {
  nlohmann::json settings;
  std::unique_ptr<checkpoint::SafetensorsReader> tensors;
  plan::ModelConfig model;
  bool bf16 = false;
};

Case read_case(const std::string& name) {
  const std::string folder = std::string(REFERENCE_DIR) + "/" + name;
  Case result;
  result.settings = nlohmann::json::parse(read_file(folder + "/case.json"));
  result.tensors = std::make_unique<checkpoint::SafetensorsReader>(folder + "/case.safetensors");
  const nlohmann::json& model = result.settings["model"];
  result.model.family = plan::parse<plan::ModelFamily>(model["family"].get<std::string>()).value();
  result.model.n_layers = model["n_layers"];
  result.model.d_model = model["d_model"];
  result.model.n_heads = model["n_heads"];
  result.model.n_kv_heads = model["n_kv_heads"];
  result.model.head_dim = model["head_dim"];
  result.model.d_ff = model["d_ff"];
  result.model.vocab_size = model["vocab_size"];
  result.model.max_seq_len = model["max_seq_len"];
  result.model.tie_embeddings = model["tie_embeddings"];
  result.model.norm_eps = model["norm_eps"];
  result.model.rope_theta = model["rope_theta"];
  result.bf16 = result.settings["dtype"] == "bf16";
  return result;
}

/// In fp32 our values must be within `kFp32` of PyTorch's. In bf16 two right implementations differ by more
/// than each differs from fp64, so both are measured against that: all tensors of a kind together may be
/// `kNoWorse` times as far from it as PyTorch's, a single one, which may have only 32 elements, `kOneTensor`
/// times.
class Judge {
 public:
  explicit Judge(const Case& reference) : reference_(reference) {}

  /// `values` are the tensors of one kind ("grads") by name.
  void expect(const std::string& kind, const std::map<std::string, at::Tensor>& values) const {
    double ours = 0.0, peers = 0.0;
    for (const auto& [name, value] : values) {
      const std::string key = name.empty() ? kind : kind + "/" + name;
      const at::Tensor peer = reference_.tensors->read(key);
      if (!reference_.bf16) {
        EXPECT_LT(test::relative_error(value, peer), kFp32) << key;
        continue;
      }
      const at::Tensor exact = reference_.tensors->read("exact/" + key);
      const double our_error = test::relative_error(value, exact),
                   peer_error = test::relative_error(peer, exact);
      EXPECT_LT(our_error, kOneTensor * peer_error) << key;
      ours += our_error * our_error;
      peers += peer_error * peer_error;
    }
    if (!reference_.bf16) return;
    EXPECT_LT(std::sqrt(ours), kNoWorse * std::sqrt(peers)) << kind;
  }

  /// `name` is a series of one number a step.
  void expect_series(const std::vector<double>& values, const std::string& name) const {
    const at::Tensor got = at::tensor(values, at::kDouble);
    const auto series = [&](const std::string& key) {
      return at::tensor(reference_.settings[key].get<std::vector<double>>(), at::kDouble);
    };
    if (!reference_.bf16) {
      EXPECT_LT(test::relative_error(got, series(name)), kFp32) << name;
      return;
    }
    const at::Tensor exact = series("exact_" + name);
    EXPECT_LT(test::relative_error(got, exact), kOneTensor * test::relative_error(series(name), exact))
        << name;
  }

 private:
  static constexpr double kFp32 = 1e-5, kNoWorse = 1.1, kOneTensor = 2.0;
  const Case& reference_;
};

/// The reference's model in the engine, on one rank.
class Trained {
 public:
  Trained(const Case& reference, std::shared_ptr<comm::World> world)
      : reference_(reference),
        length_(reference.settings["seq_len"]),
        units_(plan::describe(reference.model, length_).units),
        model_(nn::build(reference.model)),
        engine_(*model_, units_, comm::make_mesh(world, plan::MeshShape::fit({}, 1)), options(),
                [this](const std::string& name, const plan::Region& region, at::Tensor& out) {
                  out.copy_(reference_.tensors->read("weights/" + name, region));
                }),
        optimizer_(optim::build(optim_config(), engine_.optimizer_params())) {
    train::connect(*model_, engine_);
  }
  Trained(const Trained&) = delete;
  Trained& operator=(const Trained&) = delete;

  at::Tensor logits(const at::Tensor& batch) {
    const at::NoGradGuard no_grad;
    return model_->forward(batch.narrow(1, 0, length_));
  }

  /// The loss of `batch`, whose gradients are there afterwards.
  double differentiate(const at::Tensor& batch) {
    const at::Tensor loss = model_->loss(batch.narrow(1, 0, length_), batch.narrow(1, 1, length_));
    engine_.backward(loss);
    return loss.item<double>();
  }

  /// Updates with those gradients; returns their norm before clipping.
  double step() {
    const double norm = std::sqrt(engine_.local_grad_squares());
    const double factor = optim::clip_factor(norm, reference_.settings["grad_clip"]);
    optimizer_->set_lr(reference_.settings["lr"]);
    engine_.step_scaled(*optimizer_, factor);
    return norm;
  }

  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> grads;
    const std::vector<optim::FlatParam> params = engine_.optimizer_params();
    for (size_t i = 0; i < units_.size(); ++i) {
      const plan::FlatLayout layout(units_[i].params, 1);
      for (const plan::FlatEntry& entry : layout.entries())
        grads[entry.name] = params[i].grad.narrow(0, entry.offset, entry.numel).view(entry.shape);
    }
    return grads;
  }

  std::map<std::string, at::Tensor> weights() {
    std::map<std::string, at::Tensor> weights;
    engine_.visit_weights(
        [&](const std::string& name, const at::Tensor& weight) { weights[name] = weight.clone(); });
    return weights;
  }

 private:
  parallel::Options options() {
    const at::ScalarType compute = reference_.bf16 ? at::kBFloat16 : at::kFloat;
    return {.policy = plan::find_policy(plan::PolicyName::kFsdp),
            .compute = compute,
            .reduce = compute,
            .device = at::kCPU};
  }
  plan::OptimConfig optim_config() const {
    const nlohmann::json& settings = reference_.settings;
    return {.beta1 = settings["beta1"],
            .beta2 = settings["beta2"],
            .eps = settings["eps"],
            .weight_decay = settings["weight_decay"]};
  }

  const Case& reference_;
  int64_t length_;
  std::vector<plan::UnitSpec> units_;
  std::shared_ptr<nn::LanguageModel> model_;
  parallel::DataParallel engine_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

class Parity : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(std::string(REFERENCE_DIR) + "/" + GetParam())) {
      GTEST_SKIP() << "no reference from PyTorch: configure with -DTRIREME_PYTHON=<python with torch 2.11>";
    }
  }
};

TEST_P(Parity, LogitsGradientsLossesAndWeightsEqualPyTorch) {
  const Case reference = read_case(GetParam());
  const Judge judge(reference);
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    Trained trained(reference, world);
    const at::Tensor tokens = reference.tensors->read("tokens");  // (steps, B, T + 1)
    judge.expect("logits", {{"", trained.logits(tokens[0])}});
    std::vector<double> losses, norms;
    for (int64_t step = 0; step < tokens.size(0); ++step) {
      losses.push_back(trained.differentiate(tokens[step]));
      if (step == 0) judge.expect("grads", trained.gradients());
      norms.push_back(trained.step());
    }
    judge.expect_series(losses, "losses");
    judge.expect_series(norms, "grad_norms");
    judge.expect("final", trained.weights());
  });
}

INSTANTIATE_TEST_SUITE_P(Models, Parity,
                         ::testing::Values("gpt2_tied_fp32", "gpt2_untied_fp32", "llama_tied_fp32",
                                           "llama_untied_fp32", "llama_wide_heads_fp32",
                                           "llama_wide_heads_bf16", "mlp_untied_fp32", "mlp_tied_fp32",
                                           "gpt2_tied_bf16", "gpt2_untied_bf16", "llama_tied_bf16",
                                           "llama_untied_bf16"),
                         [](const auto& reference) { return std::string(reference.param); });

}  // namespace
}  // namespace trireme
