#include "trireme/checkpoint/tensor_file.h"

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint {
namespace {

SafetensorsHeader header_of(const std::vector<FileEntry>& entries,
                            const std::map<std::string, std::string>& metadata) {
  SafetensorsHeader header{.tensors = {}, .metadata = metadata};
  int64_t end = 0;
  for (const FileEntry& entry : entries) {
    const int64_t begin = std::exchange(end, end + entry.bytes());
    const bool is_new =
        header.tensors
            .insert({entry.name,
                     {.dtype = entry.dtype, .shape = entry.region.extent, .begin = begin, .end = end}})
            .second;
    TRIREME_CHECK(is_new, "[checkpoint.write] two entries have the name '{}'", entry.name);
  }
  return header;
}

void append_entry(OutputFile& file, const Source& source, const FileEntry& entry) {
  const std::string& dtype = source.tensors().at(entry.tensor).dtype;
  std::vector<char> stored, cast_to;
  for (int64_t begin = 0; begin < entry.region.numel(); begin += kPartNumel) {
    plan::Region part = entry.region;
    part.range = {begin, std::min(entry.region.numel(), begin + kPartNumel)};
    stored.resize(static_cast<size_t>(part.numel() * safetensors_itemsize(dtype)));
    source.read(entry.tensor, part, stored.data());
    cast_to.resize(static_cast<size_t>(part.numel() * safetensors_itemsize(entry.dtype)));
    if (cast(dtype, stored.data(), entry.dtype, cast_to.data(), part.numel()) > 0)
      throw NumericsError(
          "[checkpoint.write] tensor '{}' of {} has values that {} cannot represent; choose another dtype",
          entry.tensor, source.path(), entry.dtype);
    file.append(cast_to.data(), static_cast<int64_t>(cast_to.size()));
  }
}

}  // namespace

int64_t FileEntry::bytes() const {
  return region.numel() * safetensors_itemsize(dtype);
}

FileEntry whole_entry(const Source& source, const std::string& tensor) {
  const SourceTensor& info = source.tensors().at(tensor);
  return {tensor, tensor, info.dtype, plan::Region::whole(info.shape)};
}

void write_tensor_file(OutputFile& file, const Source& source, std::vector<FileEntry> entries,
                       const std::map<std::string, std::string>& metadata) {
  for (const FileEntry& entry : entries) check_readable_dtype(source.path(), entry.tensor, entry.dtype);
  std::ranges::stable_sort(entries, {},
                           [](const FileEntry& entry) { return -safetensors_itemsize(entry.dtype); });
  const SafetensorsHeader header = header_of(entries, metadata);
  const std::string preamble = safetensors_preamble(header);
  auto bytes = static_cast<int64_t>(preamble.size());
  for (const FileEntry& entry : entries) bytes += entry.bytes();
  file.reserve(bytes);
  file.append(preamble.data(), static_cast<int64_t>(preamble.size()));
  for (const FileEntry& entry : entries) append_entry(file, source, entry);
  file.finish();
}

void write_tensor_file(const Folder& folder, const std::string& name, const Source& source,
                       std::vector<FileEntry> entries, const std::map<std::string, std::string>& metadata) {
  OutputFile file = folder.create_file(name);
  write_tensor_file(file, source, std::move(entries), metadata);
}

}  // namespace trireme::checkpoint
