#pragma once
// Which linear layers of a model get adapters (plan/adapter.h).
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>

#include "trireme/nn/layers.h"
#include "trireme/plan/config.h"

namespace trireme::nn {

/// Gives those of a block's layers that `adapter` targets by name an adapter each. Does nothing without
/// adapters.
void add_adapters(const plan::AdapterConfig& adapter,
                  std::initializer_list<std::pair<std::string_view, std::shared_ptr<Linear>>> layers);

}  // namespace trireme::nn
