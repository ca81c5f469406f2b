#pragma once
// The demo's model in a size for tests, its data, and files of signals for its meshes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "examples/controller_mini_gpt/model.h"

namespace trireme {

using Values = std::map<std::string, std::vector<float>>;

inline constexpr int64_t kBatch = 4, kMicroBatches = 4, kSteps = 3;
inline const mini_gpt::Config kConfig{
    .layers = 4, .width = 32, .heads = 4, .hidden = 64, .vocabulary = 53, .tokens = 6, .stages = 4};

/// Stages of `tp` workers each, on as many lists of workers as there are stages; there and back: on half as
/// many.
inline std::string signals_of(int64_t stages, int64_t tp, bool there_and_back) {
  std::string text;
  for (int64_t number = 0; number < stages; ++number) {
    const int64_t stage = there_and_back ? std::min(number, stages - 1 - number) : number;
    text += "pp_stage" + std::to_string(number) + ":\n  shard:\n    axis: 0\n    workers: [";
    for (int64_t i = 0; i < tp; ++i) text += (i > 0 ? ", " : "") + std::to_string(stage * tp + i);
    text += "]\n";
  }
  return text;
}

inline std::vector<int64_t> words_of(int64_t step, int64_t micro_batch, int64_t ahead) {
  std::vector<int64_t> words;
  for (int64_t i = 0; i < kBatch * kConfig.tokens; ++i) {
    const int64_t at = i + ahead + 7 * micro_batch + 31 * step;
    words.push_back((at * at + 3 * at) % kConfig.vocabulary);
  }
  return words;
}

inline Values values_of(const gt::nn::NamedTensors& parameters) {
  Values values;
  for (const auto& [name, tensor] : parameters) values[name] = tensor.fetch().floats();
  return values;
}

inline std::string signals_file(const mini_gpt::Config& config, int64_t tp, int64_t workers) {
  static std::atomic<int64_t> files = 0;
  std::string path = ::testing::TempDir() + "signals-" + std::to_string(::getpid()) + "-" +
                     std::to_string(files++) + ".yaml";
  std::ofstream(path) << signals_of(config.stages, tp, 2 * workers == config.stages * tp);
  return path;
}

inline mini_gpt::Config with_stages(int64_t stages) {
  mini_gpt::Config config = kConfig;
  config.stages = stages;
  return config;
}

}  // namespace trireme
