#include "trireme/checkpoint/safetensors_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::checkpoint {
namespace {

/// The length and as many bytes as it says.
std::string read_preamble(const InputFile& file) {
  uint64_t length = 0;
  if (file.size() < kHeaderLengthBytes) {
    throw DataError(
        "[checkpoint.safetensors] {}: its {} bytes are too few for a header; the file is truncated",
        file.path(), file.size());
  }
  file.read(0, &length, sizeof length);
  if (length > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file.size() - kHeaderLengthBytes))) {
    throw DataError(
        "[checkpoint.safetensors] {}: a header of {} bytes in a file of {} (the limit is {}); the file is "
        "truncated or not a safetensors file",
        file.path(), length, file.size(), kMaxHeaderBytes);
  }
  std::string preamble(sizeof length + length, '\0');
  file.read(0, preamble.data(), static_cast<int64_t>(preamble.size()));
  return preamble;
}

}  // namespace

SafetensorsFile::SafetensorsFile(InputFile file) : file_(std::move(file)) {
  const std::string preamble = read_preamble(file_);
  data_begin_ = static_cast<int64_t>(preamble.size());
  header_ = parse_safetensors_header(std::string_view(preamble).substr(kHeaderLengthBytes),
                                     file_.size() - data_begin_, file_.path());
}

void SafetensorsFile::read(const std::string& name, int64_t first, void* out, int64_t bytes) const {
  const HeaderEntry& entry = header_.tensors.at(name);
  TRIREME_CHECK(0 <= first && 0 <= bytes && bytes <= entry.end - entry.begin - first,
                "[checkpoint.safetensors] {}: cannot read {} bytes at {} of tensor '{}', which has {}",
                path(), bytes, first, name, entry.end - entry.begin);
  file_.read(data_begin_ + entry.begin + first, out, bytes);
}

}  // namespace trireme::checkpoint
