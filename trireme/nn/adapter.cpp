#include "trireme/nn/adapter.h"

#include "trireme/plan/adapter.h"

namespace trireme::nn {

void add_adapters(const plan::AdapterConfig& adapter,
                  std::initializer_list<std::pair<std::string_view, std::shared_ptr<Linear>>> layers) {
  for (const auto& [name, layer] : layers) {
    if (!plan::adapts(adapter, name)) continue;
    layer->add_adapter({.rank = adapter.rank,
                        .scale = plan::scale_of(adapter),
                        .dropout = adapter.dropout,
                        .lengths = adapter.kind == plan::AdapterKind::kDora});
  }
}

}  // namespace trireme::nn
