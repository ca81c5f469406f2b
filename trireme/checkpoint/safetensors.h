#pragma once
// The safetensors format: u64 little-endian header length, JSON header, raw tensors. Reads ranges, checks
// everything a hostile file could get wrong, writes one tensor at a time in any order of arrival.
// SafetensorsReader also reads a checkpoint of many files (store.h), given the path of its folder.
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
  /// `path`: a file, or a folder as open_source() (source.h) takes it. Throws EnvironmentError when there is
  /// nothing, DataError naming the file and what is wrong: header length, JSON, dtype, shapes against
  /// offsets, overlaps, holes, bytes missing; of a checkpoint also a damaged index.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const;
  /// A CPU copy of the tensor. Throws DataError when there is no tensor of that name, or its bytes are
  /// damaged.
  at::Tensor read(const std::string& name) const;
  /// Elements [begin, end) of the tensor in row-major order, as a CPU copy (end - begin); no other elements
  /// are read. Throws as read(), and LogicError when the tensor has fewer elements.
  at::Tensor read_range(const std::string& name, int64_t begin, int64_t end) const;
  const std::string& path() const;

 private:
  const TensorInfo& info_of(const std::string& name) const;

  std::unique_ptr<Source> source_;
  std::map<std::string, TensorInfo> tensors_;
};

/// Declares all tensors first, then takes their contents one by one, so that nobody holds the whole model.
/// The file appears under its name (temporary + fsync + rename) only in commit(); when that name is a
/// symbolic link, the link's target is replaced. Throws ConfigError for a pipe or a device, EnvironmentError
/// when the disk fails.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const std::map<std::string, TensorInfo>& tensors,
                    const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();
  /// `tensor`: on any device, of the declared dtype and shape; the host waits for a copy from a GPU. Throws
  /// LogicError for a name that was not declared or was written before, and for another dtype or shape.
  void write(const std::string& name, const at::Tensor& tensor);
  /// Throws LogicError when a declared tensor was not written.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme::checkpoint
