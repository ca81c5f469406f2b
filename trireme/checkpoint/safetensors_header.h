#pragma once
// The JSON header of a safetensors file, parsed and checked without building a JSON document: a hostile
// header costs no more memory than its entries, whose number and size are limited. Knows nothing of tensors,
// so that it can be fuzzed alone. Format: https://github.com/huggingface/safetensors#format.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::checkpoint {

struct HeaderEntry {
  std::string dtype;  ///< "F32", "BF16", ...
  std::vector<int64_t> shape;
  int64_t begin = 0;  ///< first byte, counted from the end of the header
  int64_t end = 0;    ///< one past the last byte
};

struct SafetensorsHeader {
  std::map<std::string, HeaderEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// Bits of one element; 0: not a dtype of the format. "F4" counts as torch does, in pairs of numbers that
/// take a byte: the last dimension of its shapes is half of that in the file.
int64_t safetensors_bits(std::string_view dtype);

/// Bytes of one element; 0: not a dtype that can be read here, though one that is not made up of bytes can be
/// listed.
int64_t safetensors_itemsize(std::string_view dtype);

/// Throws DataError when elements of that dtype cannot be read, for safetensors_itemsize() is 0.
void check_readable_dtype(const std::string& path, const std::string& tensor, std::string_view dtype);

/// A shape, or a place in a tensor, as the file has it, whose "F4" counts single numbers.
std::vector<int64_t> shape_in_file(std::string_view dtype, std::vector<int64_t> shape);

/// The other way round. None: "F4" with an odd last dimension.
std::optional<std::vector<int64_t>> shape_from_file(std::string_view dtype, std::vector<int64_t> shape);

/// A key in the metadata of our checkpoints' files, whose pieces nothing but the checkpoint's index proves.
inline constexpr std::string_view kPieceOf = "trireme.piece_of";

/// Parses `json` and checks it against `data_bytes`, the size of what follows: every entry is complete and
/// known, no tensor comes twice, shapes match their ranges, and the ranges cover the data without holes or
/// overlaps. Other fields of an entry are passed over. Throws DataError naming `path` and the entry.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes,
                                           const std::string& path);

/// JSON of a header, entries in the order of their offsets.
std::string format_safetensors_header(const SafetensorsHeader& header);

/// The first bytes of a file: the length and the JSON, padded with spaces so that the data starts at a
/// multiple of 64 bytes. Throws LogicError when they are more than readers take.
std::string safetensors_preamble(const SafetensorsHeader& header);

/// The most bytes that a header may have, as in the reference implementation.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;
inline constexpr int64_t kHeaderLengthBytes = 8;

}  // namespace trireme::checkpoint
