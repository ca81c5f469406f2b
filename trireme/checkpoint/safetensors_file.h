#pragma once
// A safetensors file as named bytes, without tensors: what everything that reads one stands on.
#include <cstdint>
#include <string>

#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint {

class SafetensorsFile {
 public:
  /// Throws DataError naming the file and what is wrong: header length, JSON, dtypes, shapes against offsets,
  /// overlaps, holes, bytes missing.
  explicit SafetensorsFile(InputFile file);

  const std::string& path() const { return file_.path(); }
  const InputFile& file() const { return file_; }
  const SafetensorsHeader& header() const { return header_; }
  int64_t data_begin() const { return data_begin_; }  ///< bytes before the data: length and JSON
  /// Bytes [first, first + bytes) of a tensor of the header. Thread-safe. Throws as InputFile::read().
  void read(const std::string& name, int64_t first, void* out, int64_t bytes) const;

 private:
  InputFile file_;
  SafetensorsHeader header_;
  int64_t data_begin_ = 0;
};

}  // namespace trireme::checkpoint
