#include "trireme/checkpoint/source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/safetensors_file.h"
#include "trireme/checkpoint/store.h"
#include "trireme/checkpoint/tensor_file.h"
#include "trireme/checkpoint/unfinished.h"

namespace trireme::checkpoint {
namespace {

class FileSource : public Source {
 public:
  explicit FileSource(const std::string& path) : Source(path), file_(InputFile(path)) {
    for (const auto& [name, entry] : file_.header().tensors) tensors_[name] = {entry.dtype, entry.shape};
  }
  const std::map<std::string, std::string>& metadata() const override { return file_.header().metadata; }
  void read(const std::string& name, const plan::Region& region, void* out) const override {
    const SourceTensor& tensor = tensors_.at(name);
    check_readable_dtype(path(), name, tensor.dtype);
    const int64_t itemsize = safetensors_itemsize(tensor.dtype);
    for (plan::RunCursor cursor(tensor.shape, region); !cursor.done(); cursor.next()) {
      const plan::Run& run = cursor.run();
      file_.read(name, run.begin * itemsize, static_cast<char*>(out) + run.local * itemsize,
                 run.length * itemsize);
    }
  }

 private:
  SafetensorsFile file_;
};

class CheckpointSource : public Source {
 public:
  explicit CheckpointSource(const std::string& path) : Source(path), checkpoint_(path) {
    for (const auto& [name, tensor] : checkpoint_.index().tensors)
      tensors_[name] = {tensor.dtype, tensor.shape};
  }
  const std::map<std::string, std::string>& metadata() const override { return checkpoint_.index().metadata; }
  void read(const std::string& name, const plan::Region& region, void* out) const override {
    checkpoint_.read(name, region, out);
  }

 private:
  Checkpoint checkpoint_;
};

std::string describe(const SourceTensor& tensor) {
  return fmt::format("{} [{}]", tensor.dtype, fmt::join(shape_in_file(tensor.dtype, tensor.shape), ", "));
}

/// Reads the same tensor of both, part by part.
Difference compare_tensor(const std::string& name, const Source& a, const Source& b) {
  const SourceTensor& tensor = a.tensors().at(name);
  const auto itemsize = static_cast<size_t>(safetensors_itemsize(tensor.dtype));
  Difference difference{.tensor = name, .what = {}};
  read_both(a, name, b, name, [&](std::span<const char> left, std::span<const char> right) {
    if (std::ranges::equal(left, right)) return true;
    for (size_t at = 0; at < left.size(); at += itemsize) {
      if (std::memcmp(&left[at], &right[at], itemsize) == 0) continue;
      ++difference.elements;
      const double distance =
          std::abs(number_at(tensor.dtype, &left[at]) - number_at(tensor.dtype, &right[at]));
      if (distance > difference.largest) difference.largest = distance;
    }
    return true;
  });
  if (difference.elements > 0)
    difference.what = fmt::format("{} of {} elements", difference.elements, tensor.numel());
  return difference;
}

bool selected(const Conversion& how, const std::string& name) {
  return !how.select || how.select(name);
}

/// Reads pieces for a file, in the order in which the file has them.
class PartReader {
 public:
  PartReader(const Source& source, const std::vector<PieceSpec>& pieces) : source_(source), pieces_(pieces) {}
  const void* operator()(size_t index) {
    const PieceSpec& piece = pieces_[index];
    buffer_.resize(static_cast<size_t>(piece.region.numel() * safetensors_itemsize(piece.dtype)));
    source_.read(piece.tensor, piece.region, buffer_.data());
    return buffer_.data();
  }

 private:
  const Source& source_;
  const std::vector<PieceSpec>& pieces_;
  std::vector<char> buffer_;
};

}  // namespace

int64_t SourceTensor::numel() const {
  return plan::checked_numel(shape).value();
}

int64_t SourceTensor::bytes() const {
  constexpr int64_t kBitsOfByte = 8;
  const int64_t all = numel(), bits = safetensors_bits(dtype);
  return all / kBitsOfByte * bits + all % kBitsOfByte * bits / kBitsOfByte;
}

std::unique_ptr<Source> open_source(const std::string& path) {
  std::error_code error;
  refuse_pickle(path);
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status))
    throw EnvironmentError("[checkpoint.source] {} is not there, or was removed meanwhile; check the path",
                           path);
  if (!std::filesystem::is_directory(status)) return std::make_unique<FileSource>(path);
  if (is_model_folder(path)) return open_model_folder(path);
  return std::make_unique<CheckpointSource>(path);
}

void read_both(const Source& a, const std::string& tensor_of_a, const Source& b,
               const std::string& tensor_of_b,
               const std::function<bool(std::span<const char> left, std::span<const char> right)>& body) {
  const SourceTensor& tensor = a.tensors().at(tensor_of_a);
  const int64_t itemsize = safetensors_itemsize(tensor.dtype), numel = tensor.numel();
  std::vector<char> left, right;
  for (int64_t begin = 0; begin < numel; begin += kPartNumel) {
    const plan::Region part = plan::Region::flat(tensor.shape, {begin, std::min(numel, begin + kPartNumel)});
    left.resize(static_cast<size_t>(part.numel() * itemsize));
    right.resize(left.size());
    a.read(tensor_of_a, part, left.data());
    b.read(tensor_of_b, part, right.data());
    if (!body(left, right)) return;
  }
}

std::vector<Difference> compare(const Source& a, const Source& b) {
  std::vector<Difference> differences;
  for (const auto& [name, tensor] : a.tensors()) {
    const auto other = b.tensors().find(name);
    if (other == b.tensors().end()) {
      differences.push_back({.tensor = name, .what = "only in the first"});
    } else if (tensor != other->second) {
      differences.push_back(
          {.tensor = name, .what = fmt::format("{} against {}", describe(tensor), describe(other->second))});
    } else if (Difference difference = compare_tensor(name, a, b); difference.elements > 0) {
      differences.push_back(std::move(difference));
    }
  }
  for (const auto& [name, tensor] : b.tensors()) {
    if (!a.tensors().contains(name)) differences.push_back({.tensor = name, .what = "only in the second"});
  }
  std::ranges::sort(differences, {}, &Difference::tensor);
  return differences;
}

namespace {

std::map<std::string, std::string> metadata_of(const Source& source, const Conversion& how) {
  std::map<std::string, std::string> metadata = source.metadata();
  std::erase_if(metadata, [&](const auto& entry) { return how.without.contains(entry.first); });
  return metadata;
}

}  // namespace

std::string convert_to_checkpoint(const Source& source, const std::string& parent, const Conversion& how) {
  Store store(parent);
  const std::string temporary = temporary_name(how.step, store.generation(), 1);
  const Folder folder = store.begin(temporary);
  try {
    for (int64_t file = 0; file < how.files; ++file) {
      ShardSpec spec{.rank = file,
                     .step = how.step,
                     .generation = store.generation(),
                     .pieces = {},
                     .metadata = metadata_of(source, how),
                     .state = {}};
      for (const auto& [name, tensor] : source.tensors()) {
        const plan::Region share = plan::share_of(plan::Region::whole(tensor.shape), file, how.files);
        if (selected(how, name)) spec.pieces.push_back({name, tensor.dtype, tensor.shape, share});
      }
      PartReader parts(source, spec.pieces);
      write_shard(folder, spec, std::ref(parts));
    }
    return store.commit({.temporary = temporary, .step = how.step, .ranks = how.files, .state = how.state});
  } catch (...) {
    store.abandon(temporary);
    throw;
  }
}

void convert_to_file(const Source& source, const std::string& path, const Conversion& how) {
  if (is_special_file(path))
    throw ConfigError("[checkpoint.convert] {} is not a regular file; give a path for one", path);
  const std::filesystem::path target(follow_links(path));
  if (!how.replaces && std::filesystem::exists(target)) {
    throw EnvironmentError(
        "[checkpoint.convert] {} exists already; choose another file, or replace it with --force", path);
  }
  std::vector<FileEntry> entries;
  for (const auto& [tensor, info] : source.tensors()) {
    if (selected(how, tensor)) entries.push_back(whole_entry(source, tensor));
  }
  UnfinishedFile unfinished(target);
  OutputFile file = unfinished.output();
  write_tensor_file(file, source, std::move(entries), metadata_of(source, how));
  unfinished.finish();
}

}  // namespace trireme::checkpoint
