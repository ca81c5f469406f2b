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

namespace trireme::plan {
struct Region;
}

namespace trireme::checkpoint {

class Source;

struct TensorInfo {
  at::ScalarType dtype;  ///< Undefined: torch has none for what the file has, which cannot be read
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
  /// A CPU copy of the tensor. Throws DataError when there is no tensor of that name, torch has no dtype for
  /// it, or its bytes are damaged.
  at::Tensor read(const std::string& name) const;
  /// A region of the tensor as a CPU copy (region.numel()); no other elements are read. Throws as read(), and
  /// LogicError when the region is no part of the tensor.
  at::Tensor read(const std::string& name, const plan::Region& region) const;
  const std::string& path() const;

 private:
  const TensorInfo& info_of(const std::string& name) const;

  std::unique_ptr<Source> source_;
  std::map<std::string, TensorInfo> tensors_;
};

/// Declares all tensors first, then takes their contents one by one, so that nobody holds the whole model.
/// The file appears under its name only in commit(); when that name is a symbolic link, the link's target is
/// replaced. Several writers of one name do not disturb each other: each replaces what was there before.
/// Throws ConfigError for a pipe or a device, EnvironmentError when the disk fails.
class SafetensorsWriter {
 public:
  /// Creates a hidden file of its own beside `path` (".NAME.PROCESS-N.trireme-tmp"), of the full length. A
  /// process that is killed before commit() leaves it there, and the next writer of `path` removes it.
  SafetensorsWriter(const std::string& path, const std::map<std::string, TensorInfo>& tensors,
                    const std::map<std::string, std::string>& metadata);
  /// Without commit(), removes what was written; what was at `path` before stays.
  ~SafetensorsWriter();
  /// `tensor`: on any device, of the declared dtype and shape; the host waits for a copy from a GPU. Throws
  /// LogicError for a name that was not declared or was written before, and for another dtype or shape.
  void write(const std::string& name, const at::Tensor& tensor);
  /// Puts what was written onto the disk and gives it its name. Throws LogicError when a declared tensor was
  /// not written.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme::checkpoint
