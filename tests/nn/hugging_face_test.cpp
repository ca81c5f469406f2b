// Models that Hugging Face's transformers has written give the same logits here, and what we write of them is
// what it has written, byte for byte; tests/reference/check_hugging_face.py reads that afterwards. The same
// for checkpoints of PyTorch's DCP.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/new_folder.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/comm/mesh.h"
#include "trireme/nn/language_model.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/hugging_face.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/train/adapter.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;
using checkpoint::SafetensorsReader;

constexpr double kTolerance = 1e-5;
const std::string kRoot = HUGGING_FACE_DIR;

/// Empty where there is something to compare with.
std::string reason_to_skip() {
  if (fs::exists(kRoot + "/skipped")) return read_file(kRoot + "/skipped");
  return fs::exists(kRoot) ? "" : "there is no " + kRoot + ": TRIREME_PYTHON was not set for CMake";
}

std::vector<std::string> cases() {
  std::vector<std::string> folders;
  for (const auto& entry : fs::directory_iterator(kRoot)) {
    if (fs::exists(entry.path() / "case.safetensors")) folders.push_back(entry.path().string());
  }
  std::ranges::sort(folders);
  return folders;
}

plan::ModelConfig model_of(const std::string& folder) {
  return plan::from_hugging_face(checkpoint::read_model_config(folder), folder);
}

at::Tensor logits_of(const std::string& folder, const at::Tensor& tokens) {
  const at::NoGradGuard no_grad;
  const auto model = nn::build(model_of(folder));
  model->eval();
  const SafetensorsReader weights(folder);
  for (auto& parameter : model->named_parameters()) parameter.value().copy_(weights.read(parameter.key()));
  return model->forward(tokens);
}

void expect_equal(const std::string& a, const std::string& b) {
  for (const auto& difference : checkpoint::compare(*checkpoint::open_source(a), *checkpoint::open_source(b)))
    ADD_FAILURE() << a << " and " << b << ": " << difference.tensor << " " << difference.what;
}

TEST(HuggingFace, ModelsOfTransformersGiveTheSameLogits) {
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  const auto folders = cases();
  EXPECT_GE(folders.size(), 9u);
  for (const std::string& folder : folders) {
    const SafetensorsReader reference(folder + "/case.safetensors");
    const at::Tensor logits = logits_of(folder + "/model", reference.read("tokens"));
    EXPECT_LE(test::relative_error(logits, reference.read("logits")), kTolerance) << folder;
  }
}

TEST(HuggingFace, WhatIsWrittenIsWhatWasReadByteForByte) {
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  for (const std::string& folder : cases()) {
    const plan::ModelConfig model = model_of(folder + "/model");
    const auto weights = checkpoint::open_model_folder(folder + "/model");
    const plan::ModelFacts facts = plan::describe(model, model.max_seq_len);
    checkpoint::check_fit(*weights, facts);
    checkpoint::NewFolder out(folder + "/exported", /*replaces=*/true);
    constexpr int64_t kSmall = 30'000;  // bytes a file, so that there are some
    checkpoint::write_model_files(out.folder(), *weights, checkpoint::parameter_names(facts),
                                  {.max_file_bytes = kSmall});
    out.folder().write_file("config.json", plan::to_hugging_face(model, "float32").dump());
    out.commit();
    expect_equal(folder + "/model", folder + "/exported");
  }
}

/// LoRA as peft.LoraConfig in make_hugging_face.py has it.
plan::ModelConfig with_adapter(plan::ModelConfig model, const SafetensorsReader& adapter) {
  std::set<std::string> targets;
  bool scales = false;
  const std::string suffix = std::string(plan::kAdapterIn) + ".weight";
  for (const auto& [name, info] : adapter.tensors()) {
    scales = scales || plan::is_magnitude(name);
    if (!name.ends_with(suffix)) continue;
    const std::string module = name.substr(0, name.size() - suffix.size());
    targets.insert(module.substr(module.rfind('.') + 1));
  }
  model.adapter = {.kind = scales ? plan::AdapterKind::kDora : plan::AdapterKind::kLora,
                   .rank = 4,
                   .alpha = 8.0,
                   .targets = join(std::vector(targets.begin(), targets.end()), ",")};
  return model;
}

/// A parameter of an adapter as the engine has it: a length without that of the base.
at::Tensor own_value(const SafetensorsReader& file, const SafetensorsReader& base, const std::string& name,
                     const plan::ModelConfig& model) {
  const at::Tensor value = file.read("base_model.model." + name);
  if (!plan::is_magnitude(name)) return value;
  const std::string module = name.substr(0, name.size() - std::string_view(plan::kMagnitude).size());
  const at::Tensor weight = base.read(module + ".weight");
  return value - weight.norm(2, plan::record_of(model.family).in_out ? 0 : 1);
}

/// Trains on one rank what PEFT has trained there, and exports it. Returns how many matrices are trained.
int64_t train_as_peft(const std::string& folder, const std::shared_ptr<comm::World>& world) {
  int64_t trained = 0;
  const SafetensorsReader base(folder + "/base"), start(folder + "/adapter.safetensors"),
      reference(folder + "/trained.safetensors");
  const plan::ModelConfig config = with_adapter(model_of(folder + "/base"), start);
  const plan::ModelFacts facts = plan::describe(config, config.max_seq_len);
  const auto model = nn::build(config);
  const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
  const auto values = [&](const std::string& name, const plan::Region& region, at::Tensor& out) {
    const at::Tensor whole =
        plan::is_of_adapter(name) ? own_value(start, base, name, config) : base.read(name);
    out.copy_(whole.reshape({-1}).narrow(0, region.range.begin, region.numel()));
  };
  parallel::DataParallel engine(*model, facts.units, mesh, {}, values);
  model->set_unit_runner([&](const nn::Unit& unit, const at::Tensor& x, bool begins_pass) {
    return engine.run_unit(unit.name, x, unit.forward, begins_pass);
  });
  const auto optimizer =
      optim::build({.lr = 5e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1},
                   engine.optimizer_params(optim::decay_matrices));
  const at::Tensor tokens = reference.read("tokens"), losses = reference.read("losses");
  const int64_t length = tokens.size(1);
  for (int64_t step = 0; step < losses.size(0); ++step) {
    const at::Tensor loss = model->loss(tokens.narrow(1, 0, length - 1).contiguous(),
                                        tokens.narrow(1, 1, length - 1).contiguous());
    EXPECT_NEAR(loss.item<double>(), losses[step].item<double>(), 1e-4) << folder << " step " << step;
    engine.backward(loss);
    engine.step(*optimizer);
  }
  EXPECT_LT(losses[-1].item<double>(), losses[0].item<double>() - 0.3) << "nothing was learned";
  engine.visit_weights([&](const std::string& name, const at::Tensor& value) {
    const at::Tensor theirs = reference.read("base_model.model." + name),
                     wanted = own_value(reference, base, name, config);
    EXPECT_LE(test::relative_error(value + (theirs - wanted), theirs), 1e-4) << folder << " " << name;
    ++trained;
  });
  parallel::DataParallel::Weights weights(engine);
  const train::AdaptedModel adapted{
      .config = config,
      .facts = facts,
      .visit_frozen = [&](const train::AdaptedModel::Body& body) { engine.visit_frozen(body); },
      .visit_trained = [&](const train::AdaptedModel::Body& body) { engine.visit_weights(body); },
      .trained = [&](const std::string& name) { return weights.whole(name); }};
  train::save_adapter(*mesh.all, adapted, folder + "/exported", "fp32 of transformers");
  return trained;
}

/// 20 steps of AdamW on the same tokens: the engine, its optimizer and the model, from files of
/// transformers and PEFT.
TEST(HuggingFace, AdaptersAreTrainedAsPeftTrainsThem) {
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  test::run_ranks(1, [](const std::shared_ptr<comm::World>& world) {
    int64_t trained = 0;
    for (const auto& entry : fs::directory_iterator(kRoot + "/adapters"))
      trained += train_as_peft(entry.path(), world);
    EXPECT_EQ(trained, 2 * (2 * (7 + 2 + 4) + 3 * (7 + 4)));  // A and B of two blocks, and lengths
  });
}

TEST(HuggingFace, CheckpointsOfDcpAreReadAndWritten) {
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  expect_equal(kRoot + "/dcp", kRoot + "/dcp.safetensors");
  const auto source = checkpoint::open_source(kRoot + "/dcp");
  std::vector<std::string> names;
  for (const auto& [name, tensor] : source->tensors()) names.push_back(name);
  checkpoint::NewFolder out(kRoot + "/dcp_exported", /*replaces=*/true);
  checkpoint::write_dcp_files(out.folder(), *source, names, 3);
  out.commit();
  expect_equal(kRoot + "/dcp_exported", kRoot + "/dcp.safetensors");
}

}  // namespace
}  // namespace trireme
