#pragma once
// The tensors of a file that a run leaves, and its adapters.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "trireme/checkpoint/safetensors.h"
#include "trireme/state/state_file.h"

namespace trireme::test {

using SavedTensors = std::map<std::string, at::Tensor>;

inline SavedTensors saved_tensors(const std::filesystem::path& path) {
  SavedTensors tensors;
  const checkpoint::SafetensorsReader file(path.string());
  for (const auto& [name, info] : file.tensors()) tensors[name] = file.read(name).clone();
  return tensors;
}

struct SavedAdapters {
  SavedTensors tensors;
  std::string base;  ///< the digest of the weights that they stand on
};

/// The adapters in `folder`, as PEFT has them.
inline SavedAdapters saved_adapters(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "adapter_model.safetensors";
  return {saved_tensors(file), state::read_notes(file.string()).at("base")};
}

/// Expects the same base, and tensors that differ by at most `share` of their length, which is not zero.
inline void expect_near_adapters(const SavedAdapters& got, const SavedAdapters& wanted, double share,
                                 const std::string& what) {
  EXPECT_EQ(got.base, wanted.base) << what;
  ASSERT_EQ(got.tensors.size(), wanted.tensors.size()) << what;
  for (const auto& [name, value] : wanted.tensors) {
    const double size = value.norm().item<double>();
    EXPECT_GT(size, 0.0) << name;
    EXPECT_LE((got.tensors.at(name) - value).norm().item<double>(), share * size) << what << ", " << name;
  }
}

}  // namespace trireme::test
