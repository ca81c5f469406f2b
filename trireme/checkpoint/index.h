#pragma once
// The index of a checkpoint: its tensors as pieces in files, with the digests of every byte. Each rank
// reports the file that it has written as an index of that one file.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/region.h"

namespace trireme::checkpoint {

/// Each chunk of so many bytes of a piece, counted from its start, has a digest of its own, so that reading a
/// part verifies only the chunks around it.
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
  plan::Region region;
  std::vector<uint64_t> digests;  ///< XXH3 of its chunks
};

struct StoredTensor {
  std::string dtype;  ///< as safetensors has it
  plan::Shape shape;
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

/// The index as text: JSON with a line for each tensor.
std::string format_index(const Index& index);

/// Parses an index and checks what can be checked without the files: names, dtypes and shapes are possible,
/// pieces lie within their tensors and files, every byte of the data has a digest. Throws DataError naming
/// `path` and the tensor.
Index parse_index(std::string_view text, const std::string& path);

/// Proves that the pieces cover every element of every tensor once. Throws DataError naming the tensor.
void check_coverage(const Index& index, const std::string& path);

/// Adds the files and pieces of `part`. Throws DataError when the two do not belong to one checkpoint, or
/// disagree about a tensor.
void merge(Index& index, const Index& part, const std::string& path);

/// The proof that a checkpoint was whole when it was written.
struct Commit {
  int64_t step = 0;
  int64_t generation = 0;
  int64_t index_bytes = 0;
  uint64_t index_digest = 0;  ///< XXH3
};

std::string format_commit(const Commit& commit);
/// Accepts only what format_commit() makes. Throws DataError naming `path`.
Commit parse_commit(std::string_view text, const std::string& path);

}  // namespace trireme::checkpoint
