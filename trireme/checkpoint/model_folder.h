#pragma once
// Folders of safetensors files as other programs write and read them: those of Hugging Face's transformers,
// with whole tensors in one file or more, and those of PyTorch's DCP (HuggingFaceStorageWriter), with boxes
// of tensors and their places in the metadata of each file. Whatever is read may be hostile.
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/source.h"

namespace trireme::checkpoint {

inline constexpr const char* kModelConfigName = "config.json";

/// Whether `path` is a folder with safetensors files, a config.json or pickles of weights, and no checkpoint
/// of ours. Where safetensors files are missing, open_model_folder() says so.
bool is_model_folder(const std::string& path);

/// Opens the folder's tensors. With a config.json of a family known here they have the names of
/// plan::describe(); constants, and a tied head that is stored all the same, are left out. Files are read by
/// ranges when tensors are. Throws DataError naming files and tensors: an index that names what is not there,
/// or leads out of the folder, a tensor in two files, boxes that do not make up a tensor.
std::unique_ptr<Source> open_model_folder(const std::string& path);

/// The folder's config.json. Throws DataError when there is none, or it is damaged.
nlohmann::json read_model_config(const std::string& path);

/// Throws DataError when the folder has a head that should be tied and differs from what it is tied to.
void check_tied_head(const std::string& path);

/// Throws DataError when `path` has the name of a pickle, which can run any program when it is read.
void refuse_pickle(const std::string& path);

/// Files of a tokenizer and of settings for generating text, in a fixed order: those that the folder has, and
/// the others.
struct CarriedFiles {
  std::vector<std::string> there, missing;
  /// Whether transformers can make a tokenizer of them.
  bool make_tokenizer() const;
};
CarriedFiles carried_files(const std::string& from);
/// Copies one of these files.
void carry_file(const std::string& from, const std::string& name, const Folder& to);

struct ModelFolderOptions {
  std::string dtype = {};  ///< as safetensors has it; empty: as they are
  int64_t max_file_bytes = 5'000'000'000;
};
/// Writes these tensors as transformers does: in files of at most so many bytes unless a tensor is larger,
/// with an index if there is more than one.
void write_model_files(const Folder& folder, const Source& source, const std::vector<std::string>& tensors,
                       const ModelFolderOptions& options);

/// Writes these tensors as `files` ranks of DCP do, each with its share of the rows of every tensor.
void write_dcp_files(const Folder& folder, const Source& source, const std::vector<std::string>& tensors,
                     int64_t files);

}  // namespace trireme::checkpoint
