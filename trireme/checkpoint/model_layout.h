#pragma once
// Where each tensor of a folder is, by its headers, index and config.json, and that each is there once. Knows
// nothing of files, so that it can be fuzzed alone. Private to model_folder.cpp.
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/checkpoint/source.h"
#include "trireme/plan/region.h"

namespace trireme::checkpoint {

inline constexpr const char* kFilesIndex = "model.safetensors.index.json";

/// Keys in the metadata of DCP's files: JSON that says where the box of each entry begins.
inline constexpr const char* kDcpBoxes = "DCP_SHARDING_INFO";
inline constexpr const char* kDcpBoxStart = "saved_offsets";

/// Names of tensors by the file that has them.
using FilesIndex = std::map<std::string, std::set<std::string>>;

/// Parses a model.safetensors.index.json. Throws DataError naming `path`, also for files outside its folder.
FilesIndex parse_files_index(std::string_view text, const std::string& path);

class ModelLayout {
 public:
  /// Elements of a tensor that lie one after the other in a file.
  struct Box {
    size_t file = 0;     ///< by the order of add_file()
    int64_t offset = 0;  ///< bytes from the start of the file
    plan::Region region;
  };

  /// `path`: of the folder.
  explicit ModelLayout(std::string path) : path_(std::move(path)) {}

  /// Adds the tensors of a file. A file that the index names must have exactly the tensors listed there; one
  /// that it does not name may have any. The metadata of DCP says where its boxes begin. Throws DataError
  /// naming the file and tensors.
  void add_file(const std::string& path, const SafetensorsHeader& header, int64_t data_begin,
                const FilesIndex& index);
  /// Throws DataError naming the tensor whose boxes do not cover it once. After the last file.
  void check_boxes() const;
  /// Names become those of plan::describe(). Throws DataError when two tensors are one parameter.
  void take_names(const nlohmann::json& config);

  const std::map<std::string, SourceTensor>& tensors() const { return tensors_; }
  const std::vector<Box>& boxes_of(const std::string& tensor) const { return boxes_.at(tensor); }
  /// The metadata of the first file whose entries are whole tensors.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  void add_box(const std::string& name, const std::string& dtype, Box box, bool whole);

  std::string path_;
  std::vector<std::string> files_;  ///< names
  std::map<std::string, SourceTensor> tensors_;
  std::map<std::string, std::vector<Box>> boxes_;
  std::map<std::string, std::string> metadata_;
};

/// Throws DataError: the folder cannot be used as it is.
[[noreturn]] void unusable_folder(const std::string& path, const std::string& reason);

}  // namespace trireme::checkpoint
