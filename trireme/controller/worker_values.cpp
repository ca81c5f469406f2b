#include "trireme/controller/worker_values.h"

#include <ATen/ATen.h>

#include <cstring>

#include "trireme/base/error.h"
#include "trireme/tensor/op_kernels.h"

namespace trireme::controller {

at::Tensor tensor_of(std::string_view bytes, const plan::TensorType& type) {
  if (static_cast<int64_t>(bytes.size()) != type.bytes())
    throw DataError("[controller.worker] {} bytes came for a tensor {} of {} bytes", bytes.size(),
                    to_text(type), type.bytes());
  at::Tensor tensor = at::empty(type.shape, tensor::scalar_type_of(type.dtype));
  std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  return {static_cast<const char*>(values.const_data_ptr()), values.nbytes()};
}

}  // namespace trireme::controller
