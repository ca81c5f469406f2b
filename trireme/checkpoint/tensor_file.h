#pragma once
// One safetensors file, written from whatever holds the tensors, part by part.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/source.h"

namespace trireme::checkpoint {

/// A tensor of a source, or a box of it, as one entry of a file.
struct FileEntry {
  std::string name;     ///< in the file
  std::string tensor;   ///< in the source
  std::string dtype;    ///< in the file, to which the source's can be cast
  plan::Region region;  ///< all elements of its box
  int64_t bytes() const;
};

/// The entry of a whole tensor of the source, under its own name.
FileEntry whole_entry(const Source& source, const std::string& tensor);

/// Entries with wide elements come first, so that each starts at a multiple of its element's size. Holds some
/// MiB at a time. Throws EnvironmentError when the disk fails, NumericsError naming a tensor with a number
/// that the file's dtype cannot hold.
void write_tensor_file(OutputFile& file, const Source& source, std::vector<FileEntry> entries,
                       const std::map<std::string, std::string>& metadata);
/// Likewise, to a new file of the folder.
void write_tensor_file(const Folder& folder, const std::string& name, const Source& source,
                       std::vector<FileEntry> entries, const std::map<std::string, std::string>& metadata);

}  // namespace trireme::checkpoint
