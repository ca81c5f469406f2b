#include "trireme/nn/adapter.h"

#include "trireme/plan/adapter.h"

namespace trireme::nn {

void add_adapters(const plan::AdapterConfig& adapter,
                  std::initializer_list<std::pair<std::string_view, std::shared_ptr<Linear>>> layers) {
  for (const auto& [name, layer] : layers) {
    if (plan::adapts(adapter, name))
      layer->add_adapter(adapter.rank, plan::scale_of(adapter), adapter.dropout);
  }
}

}  // namespace trireme::nn
