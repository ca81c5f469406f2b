#pragma once
// A text for tests of datasets, and its batches as `trireme train` has them.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/gt/dataset.h"
#include "trireme/train/run_data.h"

namespace trireme {

/// A folder of this process, which is there.
inline std::string text_folder() {
  const std::string folder = ::testing::TempDir() + "texts-" + std::to_string(::getpid());
  std::filesystem::create_directories(folder);
  return folder;
}

/// Writes a text of so many bytes, of which each seed has another one, and returns its path.
inline std::string some_text(const std::string& name, int64_t bytes, uint32_t seed = 1) {
  std::string text;
  while (static_cast<int64_t>(text.size()) < bytes) {
    seed = seed * 1664525U + 1013904223U;
    text += "abcdefghij klmnopq\n"[seed >> 16 & 15U];
  }
  const std::string path = text_folder() + "/" + name;
  std::ofstream(path) << text;
  return path;
}

/// The folder in which tokens of these tests are kept.
inline Environment text_environment() {
  return Environment({{"XDG_CACHE_HOME", text_folder() + "/cache"}});
}

/// Inputs and targets of a batch, row after row.
using Rows = std::pair<std::vector<int64_t>, std::vector<int64_t>>;

inline std::vector<int64_t> values_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

/// The first batches of a run of `trireme train` on these data.
inline std::vector<Rows> trained_batches(const gt::DatasetOptions& options, int64_t steps) {
  train::TrainOptions run;
  run.cache_dir = cache_dir(text_environment());
  run.config.seed = options.seed;
  run.config.data.path = options.path;
  run.config.data.tokenizer = options.tokenizer;
  run.config.data.seq_len = options.seq_len;
  run.config.data.val_fraction = options.val_fraction;
  run.config.model.vocab_size = 256;
  const train::Feed feed =
      train::open_text(run, {})->feed({.global_batch = options.batch, .micro_batch = options.batch});
  std::vector<Rows> batches;
  for (int64_t step = 0; step < steps; ++step) {
    const data::Batch batch = feed();
    batches.emplace_back(values_of(batch.inputs), values_of(batch.targets));
  }
  return batches;
}

}  // namespace trireme
