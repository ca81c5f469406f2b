#pragma once
// Documents of a batch for the model that reads it.
#include "trireme/data/document_table.h"
#include "trireme/nn/documents.h"

namespace trireme::train {

/// On the device, enqueued on its current stream.
inline nn::Documents documents_on(at::Device device, const data::DocumentTable& table) {
  return nn::Documents{.starts = table.starts, .ends = table.ends}.to(device);
}

}  // namespace trireme::train
