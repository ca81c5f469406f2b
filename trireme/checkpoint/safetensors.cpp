#include "trireme/checkpoint/safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/checkpoint/source.h"
#include "trireme/checkpoint/unfinished.h"
#include "trireme/plan/stored_dtype.h"

namespace trireme::checkpoint {
namespace {

/// Undefined: torch has no such dtype.
at::ScalarType dtype_of(std::string_view name) {
  if (name.empty()) return at::ScalarType::Undefined;
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    if (plan::stored_dtype(c10::toString(dtype)) == name) return dtype;
  }
  return at::ScalarType::Undefined;
}

}  // namespace

std::string safetensors_dtype(at::ScalarType dtype, const std::string& tensor) {
  const std::string_view name = plan::stored_dtype(c10::toString(dtype));
  TRIREME_CHECK(
      !name.empty(),
      "[checkpoint.safetensors] tensor '{}' has dtype {}, which the safetensors format cannot store; "
      "give it another one, such as complex64 for complex numbers",
      tensor, c10::toString(dtype));
  return std::string(name);
}

namespace {

void check_bools(const at::Tensor& tensor, const std::string& name, const std::string& path) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  if (std::any_of(bytes, bytes + tensor.numel(), [](unsigned char byte) { return byte > 1; })) {
    throw DataError(
        "[checkpoint.safetensors] {}: tensor '{}' of BOOL has a byte other than 0 and 1; fetch the file "
        "again from its source",
        path, name);
  }
}

/// Places the tensors: wide elements first, so that each starts at a multiple of its own size.
SafetensorsHeader place(const std::map<std::string, TensorInfo>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::vector<std::pair<int64_t, std::string>> order;  // (minus element size, name)
  for (const auto& [name, info] : tensors) {
    TRIREME_CHECK(name != "__metadata__",
                  "[checkpoint.safetensors] '{}' is reserved and cannot name a tensor", name);
    order.emplace_back(-static_cast<int64_t>(c10::elementSize(info.dtype)), name);
  }
  std::ranges::sort(order);
  SafetensorsHeader header{.tensors = {}, .metadata = metadata};
  int64_t offset = 0;
  for (const auto& [minus_size, name] : order) {
    const TensorInfo& info = tensors.at(name);
    const int64_t bytes = c10::multiply_integers(info.shape) * -minus_size;
    header.tensors[name] = {.dtype = safetensors_dtype(info.dtype, name),
                            .shape = info.shape,
                            .begin = offset,
                            .end = offset + bytes};
    offset += bytes;
  }
  return header;
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path) : source_(open_source(path)) {
  for (const auto& [name, tensor] : source_->tensors())
    tensors_[name] = {.dtype = dtype_of(tensor.dtype), .shape = tensor.shape};
}

SafetensorsReader::~SafetensorsReader() = default;

const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return source_->metadata();
}

const std::string& SafetensorsReader::path() const {
  return source_->path();
}

const TensorInfo& SafetensorsReader::info_of(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  throw DataError(
      "[checkpoint.safetensors] {} has no tensor '{}' among its {}; check that the file belongs to this "
      "model",
      path(), name, tensors_.size());
}

at::Tensor SafetensorsReader::read(const std::string& name) const {
  const std::vector<int64_t>& shape = info_of(name).shape;
  return read(name, plan::Region::whole(shape)).view(shape);
}

at::Tensor SafetensorsReader::read(const std::string& name, const plan::Region& region) const {
  const TensorInfo& info = info_of(name);
  check_readable_dtype(path(), name, source_->tensors().at(name).dtype);
  const std::string misfit = plan::misfit(region, info.shape);
  TRIREME_CHECK(misfit.empty(), "[checkpoint.safetensors] {}: tensor '{}': {}", path(), name, misfit);
  at::Tensor tensor = at::empty({region.numel()}, at::TensorOptions().dtype(info.dtype));
  if (tensor.numel() == 0) return tensor;
  source_->read(name, region, tensor.mutable_data_ptr());
  if (info.dtype == at::kBool) check_bools(tensor, name, path());
  return tensor;
}

struct SafetensorsWriter::Impl {
  Impl(std::string final_path, const std::map<std::string, TensorInfo>& tensors,
       const std::map<std::string, std::string>& metadata)
      : path(std::move(final_path)), header(place(tensors, metadata)), declared(tensors), file(path) {
    for (const auto& [name, info] : tensors) missing.insert(name);
    const std::string bytes = safetensors_preamble(header);
    data_begin = static_cast<int64_t>(bytes.size());
    int64_t data_bytes = 0;
    for (const auto& [name, entry] : header.tensors) data_bytes = std::max(data_bytes, entry.end);
    file.resize(data_begin + data_bytes);
    file.write(0, bytes.data(), data_begin);
  }

  std::string path;
  SafetensorsHeader header;
  std::map<std::string, TensorInfo> declared;
  std::set<std::string> missing;  ///< declared and not yet written
  int64_t data_begin = 0;
  UnfinishedFile file;
};

SafetensorsWriter::SafetensorsWriter(const std::string& path,
                                     const std::map<std::string, TensorInfo>& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  if (is_special_file(path))
    throw ConfigError("[checkpoint.safetensors] {} is not a regular file; give a path for one", path);
  impl_ = std::make_unique<Impl>(follow_links(path), tensors, metadata);
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(const std::string& name, const at::Tensor& tensor) {
  TRIREME_CHECK(!impl_->file.is_finished(), "[checkpoint.safetensors] '{}' is written to {} after commit()",
                name, impl_->path);
  const auto declared = impl_->declared.find(name);
  TRIREME_CHECK(declared != impl_->declared.end(), "[checkpoint.safetensors] '{}' was not declared", name);
  const TensorInfo& info = declared->second;
  TRIREME_CHECK(tensor.scalar_type() == info.dtype && tensor.sizes() == at::IntArrayRef(info.shape),
                "[checkpoint.safetensors] '{}' was declared as {} [{}] but is written as {} [{}]", name,
                c10::toString(info.dtype), fmt::join(info.shape, ", "), c10::toString(tensor.scalar_type()),
                fmt::join(tensor.sizes(), ", "));
  TRIREME_CHECK(impl_->missing.erase(name) == 1, "[checkpoint.safetensors] '{}' was already written", name);
  const at::Tensor local = tensor.detach().to(at::kCPU).contiguous();
  impl_->file.write(impl_->data_begin + impl_->header.tensors.at(name).begin, local.const_data_ptr(),
                    static_cast<int64_t>(local.nbytes()));
}

void SafetensorsWriter::commit() {
  TRIREME_CHECK(!impl_->file.is_finished(), "[checkpoint.safetensors] {} was already committed", impl_->path);
  TRIREME_CHECK(impl_->missing.empty(),
                "[checkpoint.safetensors] {} of {} tensors of {} were not written, the first is '{}'",
                impl_->missing.size(), impl_->declared.size(), impl_->path, *impl_->missing.begin());
  impl_->file.finish();
}

}  // namespace trireme::checkpoint
