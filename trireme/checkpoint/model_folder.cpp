#include "trireme/checkpoint/model_folder.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/model_layout.h"
#include "trireme/checkpoint/safetensors_file.h"
#include "trireme/checkpoint/store.h"
#include "trireme/checkpoint/strict_json.h"
#include "trireme/checkpoint/tensor_file.h"
#include "trireme/plan/hugging_face.h"

namespace trireme::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr const char* kOneFile = "model.safetensors";
constexpr const char* kSuffix = ".safetensors";

/// Hugging Face's cache keeps files as links to "../../blobs/HASH". Other links are not followed.
bool is_blob(const fs::path& target) {
  const std::string text = target.string();
  constexpr std::string_view kBlobs = "../../blobs/";
  return text.starts_with(kBlobs) && text.size() > kBlobs.size() &&
         text.find_first_not_of("0123456789abcdef", kBlobs.size()) == std::string::npos;
}

InputFile open_inside(const Folder& folder, const std::string& name) {
  std::error_code error;
  const std::string path = folder.path_of(name);
  if (is_file_name(name) && fs::is_symlink(fs::symlink_status(path, error))) {
    const fs::path target = fs::read_symlink(path, error);
    const fs::path blob = fs::path(folder.path()) / target;
    if (is_blob(target) && !fs::is_symlink(fs::symlink_status(blob, error))) return InputFile(blob.string());
  }
  return folder.open_file(name);
}

bool has_suffix(const std::string& name, std::initializer_list<const char*> suffixes) {
  return std::ranges::any_of(suffixes, [&](const char* suffix) { return name.ends_with(suffix); });
}

bool is_pickle(const std::string& name) {
  return has_suffix(name, {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp"});
}

/// The folder's index of files; empty: it has none.
FilesIndex files_index(const Folder& folder) {
  if (!folder.has(kFilesIndex)) return {};
  const InputFile file = open_inside(folder, kFilesIndex);
  return parse_files_index(file.text(kMaxJsonBytes), file.path());
}

void refuse_without_weights(const Folder& folder) {
  std::vector<std::string> pickles;
  for (const std::string& name : folder.names()) {
    if (is_pickle(name)) pickles.push_back(name);
  }
  if (!pickles.empty()) refuse_pickle(folder.path_of(pickles.front()));
  throw DataError("[checkpoint.model_folder] {} has no safetensors files; give the folder with the weights",
                  folder.path());
}

std::vector<std::string> files_of(const Folder& folder, const FilesIndex& index) {
  std::vector<std::string> names;
  for (const auto& [name, tensors] : index) names.push_back(name);
  if (names.empty() && folder.has(kOneFile)) names.emplace_back(kOneFile);
  if (!names.empty()) return names;
  for (const std::string& name : folder.names()) {
    if (is_file_name(name) && name.ends_with(kSuffix)) names.push_back(name);
  }
  if (names.empty()) refuse_without_weights(folder);
  return names;
}

/// Tensors of many files, each as one box or more.
class FolderSource : public Source {
 public:
  /// `rename`: names as plan::describe() has them, where the family is known.
  FolderSource(const std::string& path, bool rename) : Source(path), folder_(path), layout_(path) {
    const FilesIndex index = files_index(folder_);
    for (const std::string& name : files_of(folder_, index)) {
      const SafetensorsFile file(open_inside(folder_, name));
      layout_.add_file(file.path(), file.header(), file.data_begin(), index);
      files_.push_back({name, file.file().size()});
    }
    layout_.check_boxes();
    if (rename && folder_.has(kModelConfigName)) layout_.take_names(read_model_config(path));
    tensors_ = layout_.tensors();
  }

  const std::map<std::string, std::string>& metadata() const override { return layout_.metadata(); }

  void read(const std::string& name, const plan::Region& region, void* out) const override {
    const SourceTensor& tensor = tensors_.at(name);
    check_readable_dtype(path(), name, tensor.dtype);
    const int64_t itemsize = safetensors_itemsize(tensor.dtype);
    for (const ModelLayout::Box& box : layout_.boxes_of(name)) {
      std::shared_ptr<const InputFile> file;
      intersect(tensor.shape, box.region, region, [&](int64_t from, int64_t to, int64_t count) {
        if (!file) file = open(box.file);
        file->read(box.offset + from * itemsize, static_cast<char*>(out) + to * itemsize, count * itemsize);
      });
    }
  }

 private:
  struct File {
    std::string name;
    int64_t bytes = 0;
  };

  std::shared_ptr<const InputFile> open(size_t index) const {
    const std::lock_guard lock(mutex_);
    if (last_.second && last_.first == index) return last_.second;
    auto file = std::make_shared<const InputFile>(open_inside(folder_, files_[index].name));
    if (file->size() != files_[index].bytes)
      unusable_folder(file->path(), "it has changed since it was opened");
    last_ = {index, file};
    return file;
  }

  Folder folder_;
  std::vector<File> files_;
  ModelLayout layout_;
  mutable std::mutex mutex_;
  mutable std::pair<size_t, std::shared_ptr<const InputFile>> last_;  ///< the file that was read last
};

bool equal_tensors(const Source& source, const std::string& a, const std::string& b) {
  if (source.tensors().at(a) != source.tensors().at(b)) return false;
  bool equal = true;
  read_both(source, a, source, b, [&](std::span<const char> left, std::span<const char> right) {
    equal = std::ranges::equal(left, right);
    return equal;
  });
  return equal;
}

FileEntry entry_of(const Source& source, const std::string& tensor, const std::string& dtype) {
  FileEntry entry = whole_entry(source, tensor);
  if (dtype.empty() || !can_cast(entry.dtype, dtype)) return entry;
  entry.dtype = dtype;
  return entry;
}

/// Splits tensors into files in the order given, so that neighbours stay together.
std::vector<std::vector<FileEntry>> split(const Source& source, const std::vector<std::string>& tensors,
                                          const ModelFolderOptions& options) {
  std::vector<std::vector<FileEntry>> files(1);
  int64_t bytes = 0;
  for (const std::string& tensor : tensors) {
    FileEntry entry = entry_of(source, tensor, options.dtype);
    if (!files.back().empty() && bytes + entry.bytes() > options.max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += entry.bytes();
    files.back().push_back(std::move(entry));
  }
  return files;
}

/// The rows of a tensor that file `index` of `count` has; a tensor without rows goes whole to the first file.
plan::Region rows_of(const plan::Shape& shape, int64_t index, int64_t count) {
  const bool shared = !shape.empty() && *plan::checked_numel(shape) > 0;
  if (!shared) return index == 0 ? plan::Region::whole(shape) : plan::Region::flat(shape, {0, 0});
  const plan::Range rows = plan::share_of(plan::Region::whole({shape.front()}), index, count).range;
  plan::Shape start(shape.size(), 0), extent = shape;
  start.front() = rows.begin;
  extent.front() = rows.size();
  return plan::Region::box(std::move(start), std::move(extent));
}

}  // namespace

bool is_model_folder(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error) || is_checkpoint(path)) return false;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename();
    if (name == kModelConfigName || name.ends_with(kSuffix) || is_pickle(name)) return true;
  }
  return false;
}

std::unique_ptr<Source> open_model_folder(const std::string& path) {
  return std::make_unique<FolderSource>(path, /*rename=*/true);
}

Json read_model_config(const std::string& path) {
  const Folder folder(path);
  const InputFile file = open_inside(folder, kModelConfigName);
  Json config = parse_json(file.text(kMaxJsonBytes), file.path(), kFetchAgain);
  if (!config.is_object()) fail_json(file.path(), "it is not a JSON object", kFetchAgain);
  return config;
}

void check_tied_head(const std::string& path) {
  const FolderSource stored(path, /*rename=*/false);
  std::set<std::string> names;
  for (const auto& [name, tensor] : stored.tensors()) names.insert(name);
  const plan::HuggingFaceNames rename(read_model_config(path), names);
  if (rename.tied_to().empty() || !names.contains(plan::HuggingFaceNames::kHead)) return;
  for (const std::string& name : names) {
    if (rename(name) != rename.tied_to()) continue;
    if (equal_tensors(stored, plan::HuggingFaceNames::kHead, name)) return;
    unusable_folder(
        path, fmt::format("config.json ties {} to {}, but they differ", plan::HuggingFaceNames::kHead, name));
  }
}

void refuse_pickle(const std::string& path) {
  std::error_code error;
  if (!is_pickle(path) || !fs::is_regular_file(path, error)) return;
  throw DataError(
      "[checkpoint.model_folder] {} is a pickle, which can execute arbitrary code when loaded; convert it to "
      "safetensors with the tool that wrote it, such as save_pretrained() of transformers",
      path);
}

bool CarriedFiles::make_tokenizer() const {
  const auto has = [this](const char* name) { return std::ranges::find(there, name) != there.end(); };
  return has("tokenizer.json") || has("tokenizer.model") || (has("vocab.json") && has("merges.txt"));
}

CarriedFiles carried_files(const std::string& from) {
  static constexpr auto kCarried =
      std::to_array<const char*>({"generation_config.json", "tokenizer.json", "tokenizer.model",
                                  "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                                  "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"});
  const Folder folder(from);
  CarriedFiles files;
  for (const char* name : kCarried) (folder.has(name) ? files.there : files.missing).emplace_back(name);
  return files;
}

void carry_file(const std::string& from, const std::string& name, const Folder& to) {
  const InputFile file = open_inside(Folder(from), name);
  OutputFile copy = to.create_file(name);
  constexpr int64_t kPart = int64_t{1} << 20;
  std::vector<char> buffer(static_cast<size_t>(std::min(kPart, file.size())));
  for (int64_t begin = 0; begin < file.size(); begin += kPart) {
    const int64_t bytes = std::min(kPart, file.size() - begin);
    file.read(begin, buffer.data(), bytes);
    copy.append(buffer.data(), bytes);
  }
  copy.finish();
}

void write_model_files(const Folder& folder, const Source& source, const std::vector<std::string>& tensors,
                       const ModelFolderOptions& options) {
  const auto files = split(source, tensors, options);
  OrderedJson map = OrderedJson::object();
  int64_t bytes = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name =
        files.size() == 1 ? kOneFile : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    write_tensor_file(folder, name, source, files[i], {{"format", "pt"}});
    for (const FileEntry& entry : files[i]) {
      map[entry.name] = name;
      bytes += entry.bytes();
    }
  }
  if (files.size() == 1) return;
  const OrderedJson index{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
  folder.write_file(kFilesIndex, index.dump(2) + "\n");
}

void write_dcp_files(const Folder& folder, const Source& source, const std::vector<std::string>& tensors,
                     int64_t files) {
  for (int64_t file = 0; file < files; ++file) {
    std::vector<FileEntry> entries;
    OrderedJson places = OrderedJson::object();
    for (const std::string& tensor : tensors) {
      const SourceTensor& info = source.tensors().at(tensor);
      const plan::Region rows = rows_of(info.shape, file, files);
      if (rows.numel() == 0 && file > 0) continue;  // the first file has a part of each
      entries.push_back({tensor, tensor, info.dtype, rows});
      places[tensor] = {{kDcpBoxStart, shape_in_file(info.dtype, rows.start)}};
    }
    if (entries.empty() && file > 0) continue;
    write_tensor_file(folder, fmt::format("shard-{:05}-model-00001-of-00001.safetensors", file + 1), source,
                      std::move(entries),
                      {{kDcpBoxes, places.dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}});
  }
}

}  // namespace trireme::checkpoint
