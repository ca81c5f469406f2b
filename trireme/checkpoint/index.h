#pragma once
// What a checkpoint holds and where: its tensors as pieces in files, with the digests of every byte. The same
// text with one file is what each rank reports of what it has written.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/checkpoint/region.h"

namespace trireme::checkpoint {

/// Bytes of a piece that have a digest of their own, counted from its start: what is read to verify less.
inline constexpr int64_t kChunkBytes = int64_t{4} << 20;

struct StoredFile {
  std::string name;  ///< in the checkpoint's folder
  int64_t bytes = 0;
  int64_t header_bytes = 0;    ///< before the data: length and JSON
  uint64_t header_digest = 0;  ///< XXH3 of them
  bool operator==(const StoredFile&) const = default;
};

/// A part of a tensor as one entry of a safetensors file.
struct StoredPiece {
  size_t file = 0;
  std::string entry;   ///< its name in the file
  int64_t offset = 0;  ///< from the start of the file, in bytes
  Region region;
  std::vector<uint64_t> digests;  ///< XXH3 of its chunks
};

struct StoredTensor {
  std::string dtype;  ///< as safetensors has it
  Shape shape;
  std::vector<StoredPiece> pieces;
  int64_t bytes() const;  ///< of the whole tensor
};

struct Index {
  int64_t step = 0;
  int64_t generation =
      0;  ///< of the run that wrote it: higher than those of all that ran before in its folder
  std::vector<StoredFile> files;
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;  ///< such as other names of tensors
  /// A file of the run's own beside the tensors; no name: none.
  StoredFile state;
  int64_t bytes() const;  ///< of all tensors
};

/// One line of JSON a tensor.
std::string format_index(const Index& index);

/// Parses and checks what can be without the files: names, dtypes and shapes that can be, pieces within their
/// tensors and files, digests for every byte of the data. Throws DataError naming `path` and the tensor.
Index parse_index(std::string_view text, const std::string& path);

/// Proves that the pieces cover every element of every tensor once. Throws DataError naming the tensor.
void check_coverage(const Index& index, const std::string& path);

/// Adds the files and pieces of `part`. Throws DataError when both do not belong to one checkpoint, or have a
/// tensor of one name that differs.
void merge(Index& index, const Index& part, const std::string& path);

/// Whoever holds this holds a checkpoint that was whole when it was written.
struct Commit {
  int64_t step = 0;
  int64_t generation = 0;
  int64_t index_bytes = 0;
  uint64_t index_digest = 0;  ///< XXH3
};

std::string format_commit(const Commit& commit);
/// Takes nothing but what format_commit() makes. Throws DataError naming `path`.
Commit parse_commit(std::string_view text, const std::string& path);

}  // namespace trireme::checkpoint
