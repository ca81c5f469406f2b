#include "trireme/checkpoint/model_layout.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/strict_json.h"
#include "trireme/plan/hugging_face.h"

namespace trireme::checkpoint {
namespace {

using Json = nlohmann::json;

/// Far beyond any tensor; the sum of two is a number still.
constexpr int64_t kFurthest = int64_t{1} << 61;

/// Where the boxes of a file's entries begin; null: they are whole tensors.
Json starts_of(const SafetensorsHeader& header, const std::string& path) {
  const auto found = header.metadata.find(kDcpBoxes);
  return found == header.metadata.end() ? Json() : parse_json(found->second, path, kFetchAgain);
}

plan::Region region_of(const Json& starts, const std::string& entry, const HeaderEntry& info,
                       const std::string& path) {
  const plan::Shape& shape = info.shape;
  if (starts.is_null()) return plan::Region::whole(shape);
  const Json& start = value_of(value_of(starts, entry.c_str(), path), kDcpBoxStart, path);
  const auto can_be = [](const Json& offset) {
    return offset.is_number_unsigned() && offset.get<uint64_t>() < static_cast<uint64_t>(kFurthest);
  };
  const bool fits = start.is_array() && start.size() == shape.size() && std::ranges::all_of(start, can_be) &&
                    std::ranges::all_of(shape, [](int64_t size) { return size < kFurthest; });
  if (!fits)
    fail_json(path, fmt::format("'{}' of '{:.80}' is not an offset in {} dimensions", kDcpBoxStart, entry,
                                shape.size()));
  auto begin = shape_from_file(info.dtype, start.get<plan::Shape>());
  if (!begin)
    fail_json(path, fmt::format("'{}' of '{:.80}' is within a byte of two numbers", kDcpBoxStart, entry));
  return plan::Region::box(std::move(*begin), shape);
}

void compare_with_index(const std::string& path, const SafetensorsHeader& header,
                        const std::set<std::string>& listed) {
  std::vector<std::string> missing, extra;
  for (const std::string& tensor : listed) {
    if (!header.tensors.contains(tensor)) missing.push_back(tensor);
  }
  for (const auto& [tensor, entry] : header.tensors) {
    if (!listed.contains(tensor)) extra.push_back(tensor);
  }
  if (!missing.empty())
    unusable_folder(path, fmt::format("it lacks tensors that {} lists: {}", kFilesIndex, some_of(missing)));
  if (!extra.empty())
    unusable_folder(path, fmt::format("it has tensors that {} lists elsewhere or not at all: {}", kFilesIndex,
                                      some_of(extra)));
}

}  // namespace

void unusable_folder(const std::string& path, const std::string& reason) {
  throw DataError("[checkpoint.model_folder] {}: {}; fetch the folder again from its source", path,
                  printable_line(reason));
}

FilesIndex parse_files_index(std::string_view text, const std::string& path) {
  const Json index = parse_json(text, path, kFetchAgain);
  const Json& map = value_of(index, "weight_map", path);
  if (!map.is_object() || map.empty()) fail_json(path, "'weight_map' names no tensors", kFetchAgain);
  FilesIndex files;
  for (const auto& [tensor, name] : map.items()) {
    if (!name.is_string())
      fail_json(path, fmt::format("the file of '{:.80}' is not a string", tensor), kFetchAgain);
    const std::string file = name.get<std::string>();
    if (!is_file_name(file) || !file.ends_with(".safetensors"))
      unusable_folder(
          path, fmt::format("'{:.80}' should be in '{:.200}', which is not a safetensors file in this folder",
                            tensor, file));
    files[file].insert(tensor);
  }
  return files;
}

void ModelLayout::add_file(const std::string& path, const SafetensorsHeader& header, int64_t data_begin,
                           const FilesIndex& index) {
  const std::string name = std::filesystem::path(path).filename();
  if (const auto listed = index.find(name); listed != index.end())
    compare_with_index(path, header, listed->second);
  // Nothing but the checkpoint's index proves its bytes, so a checkpoint without one is no folder of files.
  if (header.metadata.contains(std::string(kPieceOf)))
    unusable_folder(path, "it is a part of a checkpoint whose index.json and COMMIT.json are gone");
  const Json starts = starts_of(header, path);
  for (const auto& [entry, info] : header.tensors) {
    const plan::Region region = region_of(starts, entry, info, path);
    add_box(entry, info.dtype, {files_.size(), data_begin + info.begin, region}, starts.is_null());
  }
  if (metadata_.empty() && starts.is_null()) metadata_ = header.metadata;
  files_.push_back(name);
}

/// The shape of a tensor reaches to the end of its furthest box.
void ModelLayout::add_box(const std::string& name, const std::string& dtype, Box box, bool whole) {
  auto [found, is_new] =
      tensors_.try_emplace(name, SourceTensor{dtype, plan::Shape(box.region.extent.size())});
  SourceTensor& tensor = found->second;
  if (!is_new && whole)
    unusable_folder(path_, fmt::format("tensor '{:.80}' is in {} and in another file", name,
                                       files_[boxes_.at(name).front().file]));
  if (tensor.dtype != dtype || tensor.shape.size() != box.region.extent.size())
    unusable_folder(path_, fmt::format("boxes of tensor '{:.80}' have different dtypes or dimensions", name));
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim)
    tensor.shape[dim] = std::max(tensor.shape[dim], box.region.start[dim] + box.region.extent[dim]);
  boxes_[name].push_back(std::move(box));
}

void ModelLayout::check_boxes() const {
  for (const auto& [name, tensor] : tensors_) {
    if (!plan::checked_numel(tensor.shape))
      unusable_folder(path_, fmt::format("tensor '{:.80}' is too large", name));
    std::vector<const plan::Region*> regions;
    for (const Box& box : boxes_.at(name)) regions.push_back(&box.region);
    if (const std::string error = plan::coverage_error(tensor.shape, regions); !error.empty())
      unusable_folder(path_, fmt::format("the files do not make up tensor '{:.80}': {}", name, error));
  }
}

void ModelLayout::take_names(const Json& config) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.insert(name);
  const plan::HuggingFaceNames rename(config, names);
  std::map<std::string, SourceTensor> tensors;
  std::map<std::string, std::vector<Box>> boxes;
  for (auto& [name, tensor] : tensors_) {
    const auto ours = rename(name);
    if (!ours) continue;
    if (!tensors.emplace(*ours, tensor).second)
      unusable_folder(path_, fmt::format("two tensors map to parameter '{:.80}'", *ours));
    boxes.emplace(*ours, std::move(boxes_.at(name)));
  }
  tensors_ = std::move(tensors);
  boxes_ = std::move(boxes);
}

}  // namespace trireme::checkpoint
