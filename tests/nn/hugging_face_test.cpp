// Models that Hugging Face's transformers has written give the same logits here, and what we write of them is
// what it has written, byte for byte; tests/reference/check_hugging_face.py reads that afterwards. The same
// for checkpoints of PyTorch's DCP.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/relative_error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/new_folder.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/nn/language_model.h"
#include "trireme/plan/hugging_face.h"
#include "trireme/plan/model_facts.h"

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
