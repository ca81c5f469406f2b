#pragma once
// Shared by the records of model families. Private to plan/*_family.cpp and plan/model_*.cpp.
#include <string>
#include <vector>

#include "trireme/plan/model_family.h"

namespace trireme::plan {

/// Width of all queries of a token, and of attention's output.
inline int64_t query_width(const ModelConfig& model) {
  return model.n_heads * head_dim(model);
}
/// Width of all keys of a token, and of all values.
inline int64_t kv_width(const ModelConfig& model) {
  return model.n_kv_heads * head_dim(model);
}

extern const ModelFamilyRecord kGpt2Record, kLlamaRecord, kMlpRecord, kResNetRecord, kLeNetRecord;

/// A matrix that starts normally distributed with deviation sqrt(2 / (5 d_model)), which is 0.02 at width
/// 1000 (Nguyen and Salazar 2019).
ParamSpec matrix(const ModelConfig& model, std::string name, std::vector<int64_t> shape,
                 std::optional<BlockLayer> layer = {});
/// A matrix that ends a residual branch: its deviation is divided by sqrt(2 n_layers) (Radford et al. 2019).
ParamSpec residual_matrix(const ModelConfig& model, std::string name, std::vector<int64_t> shape,
                          BlockLayer layer);
/// A vector of ones, as norms begin.
ParamSpec ones(std::string name, int64_t size);
/// A vector of zeros, as biases begin.
ParamSpec zeros(std::string name, int64_t size);

}  // namespace trireme::plan
