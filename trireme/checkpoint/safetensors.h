#pragma once
// The safetensors format: u64 little-endian header length, JSON header, raw tensors. Reads ranges,
// checks everything a hostile file could get wrong, writes one tensor at a time in any order of arrival. What
// reads a file also reads a checkpoint of many (store.h), by the name of its folder.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace trireme::checkpoint {

class Source;

struct TensorInfo {
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

/// The format's name of a dtype. Throws LogicError naming the tensor when it has none.
std::string safetensors_dtype(at::ScalarType dtype, const std::string& tensor);

class SafetensorsReader {
 public:
  /// Throws DataError naming the file and what is wrong: header length, JSON, dtype, shapes against offsets,
  /// overlaps, holes, bytes missing; of a checkpoint also a damaged index.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const;
  /// A CPU copy. Throws DataError when there is no tensor of that name.
  at::Tensor read(const std::string& name) const;
  /// The same of elements [begin, end) in row-major order, as a (end - begin) tensor: only they are read.
  /// Throws LogicError when the tensor has not so many.
  at::Tensor read_range(const std::string& name, int64_t begin, int64_t end) const;
  const std::string& path() const;

 private:
  const TensorInfo& info_of(const std::string& name) const;

  std::unique_ptr<Source> source_;
  std::map<std::string, TensorInfo> tensors_;
};

/// Declares all tensors first, then takes their contents one by one, so that nobody holds the whole model.
/// The file appears under its name (temporary + fsync + rename) only in commit(); where that is a symbolic
/// link, it is what the link leads to. Throws ConfigError for a pipe or a device.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const std::map<std::string, TensorInfo>& tensors,
                    const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();
  /// `tensor`: any device, of the declared dtype and shape.
  void write(const std::string& name, const at::Tensor& tensor);
  /// Throws LogicError when a declared tensor was not written.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme::checkpoint
