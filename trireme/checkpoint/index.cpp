#include "trireme/checkpoint/index.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/utf8.h"
#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr const char* kSchema = "trireme.checkpoint/1";
constexpr const char* kCommitSchema = "trireme.commit/1";
constexpr size_t kMaxFiles = 65'536;
constexpr size_t kMaxTensors = 1'000'000;
constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxDims = 64;

std::string quoted(const std::string& text) {
  return Json(text).dump();
}

std::string format_file(const StoredFile& file) {
  return fmt::format(R"({{"name":"{}","bytes":{},"header_bytes":{},"header_xxh3":"{}"}})", file.name,
                     file.bytes, file.header_bytes, hex64(file.header_digest));
}

std::string format_piece(const StoredPiece& piece, const plan::Shape& shape) {
  std::string box;
  if (piece.region.extent != shape)
    box = fmt::format(R"("start":[{}],"extent":[{}],)", fmt::join(piece.region.start, ","),
                      fmt::join(piece.region.extent, ","));
  if (!piece.region.view.empty()) box += fmt::format(R"("view":[{}],)", fmt::join(piece.region.view, ","));
  std::vector<std::string> digests;
  for (const uint64_t digest : piece.digests) digests.push_back(fmt::format("\"{}\"", hex64(digest)));
  return fmt::format(R"({{"file":{},"entry":{},"offset":{},{}"range":[{},{}],"xxh3":[{}]}})", piece.file,
                     quoted(piece.entry), piece.offset, box, piece.region.range.begin, piece.region.range.end,
                     fmt::join(digests, ","));
}

std::string format_tensor(const std::string& name, const StoredTensor& tensor) {
  std::vector<std::string> pieces;
  for (const StoredPiece& piece : tensor.pieces) pieces.push_back(format_piece(piece, tensor.shape));
  return fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"pieces":[{}]}})", quoted(name), tensor.dtype,
                     fmt::join(tensor.shape, ","), fmt::join(pieces, ","));
}

/// Reads an index and keeps the place that messages name.
class Parser {
 public:
  explicit Parser(const std::string& path) : path_(path) {}

  Index parse(const Json& document) {
    refuse_other_keys(
        document, {"schema", "step", "generation", "chunk", "files", "state", "metadata", "tensors"}, path_);
    if (const std::string schema = text_of(document, "schema", path_); schema != kSchema)
      fail_json(path_, fmt::format("schema is '{:.80}', but this version reads '{}'", schema, kSchema));
    if (count_of(document, "chunk", path_) != kChunkBytes)
      fail_json(path_, fmt::format("digests are not over chunks of {} bytes", kChunkBytes));
    index_.step = count_of(document, "step", path_);
    index_.generation = count_of(document, "generation", path_);
    take_files(value_of(document, "files", path_));
    if (const Json& state = value_of(document, "state", path_); !state.is_null())
      index_.state = file_of(state);
    take_metadata(value_of(document, "metadata", path_));
    take_tensors(value_of(document, "tensors", path_));
    check_files();
    return std::move(index_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    fail_json(path_, name_.empty() ? std::string(what) : fmt::format("tensor '{:.200}' {}", name_, what));
  }

  std::vector<int64_t> numbers(const Json& object, const char* key) const {
    const Json& list = value_of(object, key, path_);
    if (!list.is_array() || list.size() > kMaxDims) fail(fmt::format("has no list of numbers '{}'", key));
    std::vector<int64_t> result;
    for (const Json& number : list) {
      if (!number.is_number_unsigned() || number.get<uint64_t>() > uint64_t{1} << 62)
        fail(fmt::format("has a '{}' with something other than numbers of 62 bits", key));
      result.push_back(number.get<int64_t>());
    }
    return result;
  }

  StoredFile file_of(const Json& object) const {
    refuse_other_keys(object, {"name", "bytes", "header_bytes", "header_xxh3"}, path_);
    StoredFile file{.name = text_of(object, "name", path_),
                    .bytes = count_of(object, "bytes", path_),
                    .header_bytes = count_of(object, "header_bytes", path_),
                    .header_digest = hash_of(value_of(object, "header_xxh3", path_), "header_xxh3", path_)};
    if (!is_file_name(file.name))
      fail(fmt::format("'{:.200}' is not a valid name for a checkpoint file", file.name));
    if (file.header_bytes > file.bytes)
      fail(fmt::format("file {} has {} bytes but a header of {}", file.name, file.bytes, file.header_bytes));
    return file;
  }

  void take_files(const Json& list) {
    if (!list.is_array() || list.size() > kMaxFiles) fail("'files' is not a list of at most 65536");
    std::set<std::string> names;
    for (const Json& object : list) {
      index_.files.push_back(file_of(object));
      if (!names.insert(index_.files.back().name).second)
        fail(fmt::format("file {} is listed twice", index_.files.back().name));
    }
  }

  void take_metadata(const Json& object) {
    if (!object.is_object()) fail("'metadata' is not an object");
    for (const auto& [key, value] : object.items()) {
      if (!value.is_string()) fail(fmt::format("the metadata '{:.80}' is not a string", key));
      index_.metadata.emplace(key, value.get<std::string>());
    }
  }

  void take_tensors(const Json& object) {
    if (!object.is_object() || object.size() > kMaxTensors)
      fail("'tensors' is not an object of at most 1000000 entries");
    for (const auto& [name, value] : object.items()) {
      name_ = name;
      if (name.empty() || name.size() > kMaxNameBytes)
        fail("has an empty name or one of more than 1024 bytes");
      if (printable_line(name) != name) fail("has a name with control characters");
      take_tensor(value);
    }
    name_.clear();
  }

  void take_tensor(const Json& object) {
    refuse_other_keys(object, {"dtype", "shape", "pieces"}, path_);
    StoredTensor& tensor = index_.tensors[name_];
    tensor.dtype = text_of(object, "dtype", path_);
    tensor.shape = numbers(object, "shape");
    const int64_t itemsize = safetensors_itemsize(tensor.dtype);
    if (itemsize == 0) fail(fmt::format("has unknown dtype '{:.20}'", tensor.dtype));
    const auto numel = plan::checked_numel(tensor.shape);
    int64_t bytes = 0;
    if (!numel || __builtin_mul_overflow(*numel, itemsize, &bytes))
      fail("has a shape that overflows 63 bits");
    const Json& pieces = value_of(object, "pieces", path_);
    if (!pieces.is_array()) fail("has no list 'pieces'");
    for (const Json& piece : pieces) tensor.pieces.push_back(piece_of(piece, tensor.shape, itemsize));
  }

  StoredPiece piece_of(const Json& object, const plan::Shape& shape, int64_t itemsize) const {
    refuse_other_keys(object, {"file", "entry", "offset", "start", "extent", "view", "range", "xxh3"}, path_);
    StoredPiece piece{.file = static_cast<size_t>(count_of(object, "file", path_)),
                      .entry = text_of(object, "entry", path_),
                      .offset = count_of(object, "offset", path_),
                      .region = plan::Region::whole(shape),
                      .digests = {}};
    if (object.contains("start") || object.contains("extent")) {
      piece.region.start = numbers(object, "start");
      piece.region.extent = numbers(object, "extent");
    }
    if (object.contains("view")) piece.region.view = numbers(object, "view");
    const std::vector<int64_t> range = numbers(object, "range");
    if (range.size() != 2) fail("has a 'range' that is not two numbers");
    piece.region.range = {range[0], range[1]};
    if (const std::string reason = plan::misfit(piece.region, shape); !reason.empty()) fail(reason);
    check_place(piece, itemsize);
    take_digests(piece, value_of(object, "xxh3", path_), piece.region.numel() * itemsize);
    return piece;
  }

  void check_place(const StoredPiece& piece, int64_t itemsize) const {
    if (piece.file >= index_.files.size())
      fail(fmt::format("is in file {}, but there are only {}", piece.file, index_.files.size()));
    const StoredFile& file = index_.files[piece.file];
    const int64_t bytes = piece.region.numel() * itemsize;
    if (piece.offset < file.header_bytes || piece.offset > file.bytes || bytes > file.bytes - piece.offset) {
      fail(fmt::format("has {} bytes at {} of {}, whose data span bytes {} to {}", bytes, piece.offset,
                       file.name, file.header_bytes, file.bytes));
    }
  }

  void take_digests(StoredPiece& piece, const Json& list, int64_t bytes) const {
    const int64_t chunks = bytes / kChunkBytes + (bytes % kChunkBytes > 0 ? 1 : 0);
    if (!list.is_array() || static_cast<int64_t>(list.size()) != chunks)
      fail(fmt::format("has {} digests for {} bytes", list.size(), bytes));
    for (const Json& digest : list) piece.digests.push_back(hash_of(digest, "xxh3", path_));
  }

  /// Every byte behind the headers belongs to one piece, so that its digest tells of it.
  void check_files() const {
    std::vector<std::vector<plan::Range>> places(index_.files.size());
    for (const auto& [name, tensor] : index_.tensors) {
      for (const StoredPiece& piece : tensor.pieces) {
        const int64_t bytes = piece.region.numel() * safetensors_itemsize(tensor.dtype);
        if (bytes > 0) places[piece.file].push_back({piece.offset, piece.offset + bytes});
      }
    }
    for (size_t i = 0; i < places.size(); ++i) {
      std::ranges::sort(places[i], {}, &plan::Range::begin);
      int64_t end = index_.files[i].header_bytes;
      for (const plan::Range& place : places[i]) {
        if (place.begin != end)
          fail(fmt::format("a piece of {} begins at byte {}, but the previous one ends at {}",
                           index_.files[i].name, place.begin, end));
        end = place.end;
      }
      if (end != index_.files[i].bytes)
        fail(fmt::format("the pieces of {} end at byte {}, but the file at {}", index_.files[i].name, end,
                         index_.files[i].bytes));
    }
  }

  const std::string& path_;
  std::string name_;  ///< of the tensor being read
  Index index_;
};

std::string commit_body(const Commit& commit) {
  return fmt::format(R"({{"schema":"{}","step":{},"generation":{},"index_bytes":{},"index_xxh3":"{}")",
                     kCommitSchema, commit.step, commit.generation, commit.index_bytes,
                     hex64(commit.index_digest));
}

}  // namespace

int64_t StoredTensor::bytes() const {
  int64_t numel = 1;
  for (const int64_t dim : shape) numel *= dim;
  return numel * safetensors_itemsize(dtype);
}

int64_t Index::bytes() const {
  int64_t sum = 0;
  for (const auto& [name, tensor] : tensors) sum += tensor.bytes();
  return sum;
}

std::string format_index(const Index& index) {
  std::vector<std::string> files, tensors;
  for (const StoredFile& file : index.files) files.push_back(format_file(file));
  for (const auto& [name, tensor] : index.tensors) tensors.push_back(format_tensor(name, tensor));
  return fmt::format(
      "{{\"schema\":\"{}\",\"step\":{},\"generation\":{},\"chunk\":{},\n\"files\":[{}],\n"
      "\"state\":{},\n\"metadata\":{},\n\"tensors\":{{\n{}\n}}}}\n",
      kSchema, index.step, index.generation, kChunkBytes, fmt::join(files, ",\n"),
      index.state.name.empty() ? "null" : format_file(index.state), Json(index.metadata).dump(),
      fmt::join(tensors, ",\n"));
}

Index parse_index(std::string_view text, const std::string& path) {
  return Parser(path).parse(parse_json(text, path));
}

void check_coverage(const Index& index, const std::string& path) {
  for (const auto& [name, tensor] : index.tensors) {
    std::vector<const plan::Region*> regions;
    for (const StoredPiece& piece : tensor.pieces) regions.push_back(&piece.region);
    if (const std::string reason = plan::coverage_error(tensor.shape, regions); !reason.empty()) {
      throw DataError(
          "[checkpoint.index] {}: tensor '{}' [{}]: {}; the checkpoint is incomplete, use another one", path,
          name, fmt::join(tensor.shape, ", "), reason);
    }
  }
}

void merge(Index& index, const Index& part, const std::string& path) {
  if (part.step != index.step || part.generation != index.generation) {
    throw DataError(
        "[checkpoint.index] {} is from step {} and generation {}, but the checkpoint is from {} and {}", path,
        part.step, part.generation, index.step, index.generation);
  }
  const size_t first_file = index.files.size();
  for (const StoredFile& file : part.files) {
    const auto known = std::ranges::find(index.files, file.name, &StoredFile::name);
    if (known != index.files.end())
      throw DataError("[checkpoint.index] {}: another rank has also written {}", path, file.name);
    index.files.push_back(file);
  }
  for (const auto& [name, tensor] : part.tensors) {
    const auto [known, is_new] =
        index.tensors.try_emplace(name, StoredTensor{tensor.dtype, tensor.shape, {}});
    if (known->second.dtype != tensor.dtype || known->second.shape != tensor.shape) {
      throw DataError("[checkpoint.index] {}: tensor '{}' is {} [{}], but {} [{}] on another rank", path,
                      name, tensor.dtype, fmt::join(tensor.shape, ", "), known->second.dtype,
                      fmt::join(known->second.shape, ", "));
    }
    for (StoredPiece piece : tensor.pieces) {
      piece.file += first_file;
      known->second.pieces.push_back(std::move(piece));
    }
  }
  index.metadata.insert(part.metadata.begin(), part.metadata.end());
}

std::string format_commit(const Commit& commit) {
  const std::string body = commit_body(commit);
  return fmt::format("{},\"xxh3\":\"{}\"}}\n", body, hex64(xxh3(body)));
}

Commit parse_commit(std::string_view text, const std::string& path) {
  const Json document = parse_json(text, path);
  const Commit commit{.step = count_of(document, "step", path),
                      .generation = count_of(document, "generation", path),
                      .index_bytes = count_of(document, "index_bytes", path),
                      .index_digest = hash_of(value_of(document, "index_xxh3", path), "index_xxh3", path)};
  // A text that reads the same may still have other bytes, and no digest covers this file.
  if (format_commit(commit) != text) fail_json(path, "its bytes differ from those that were written");
  return commit;
}

}  // namespace trireme::checkpoint
