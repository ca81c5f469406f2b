#include "trireme/checkpoint/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/utf8.h"
#include "trireme/checkpoint/safetensors_file.h"
#include "trireme/checkpoint/store.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::checkpoint {
namespace {

constexpr int64_t kMaxCommitBytes = 4096;

[[noreturn]] void damaged(const std::string& path, std::string_view what) {
  throw DataError("[checkpoint.read] {}: {}; the checkpoint is damaged; use another one", path,
                  printable_line(what));
}

/// Returns the result of `body`. What it fails at because the folder is being removed is not reported as
/// damage or as a failure of the file system.
template <typename Body>
auto unless_removed(const Folder& folder, const Body& body) {
  try {
    return body();
  } catch (const Error&) {
    if (folder.is_in_place()) throw;
    throw Removed(folder.path());
  }
}

Folder existing(const std::string& path) {
  try {
    return Folder(path);
  } catch (const EnvironmentError&) {
    std::error_code error;
    if (!std::filesystem::exists(path, error) && !error) throw Removed(path);
    throw;
  }
}

Commit read_commit(const Folder& folder) {
  const InputFile file = folder.open_file(kCommitName);
  return parse_commit(file.text(kMaxCommitBytes), file.path());
}

Index read_index(const Folder& folder, const Commit& commit) {
  const InputFile file = folder.open_file(kIndexName);
  if (file.size() != commit.index_bytes)
    damaged(file.path(),
            fmt::format("it has {} bytes, but {} were committed", file.size(), commit.index_bytes));
  const std::string text = file.text(kMaxJsonBytes);
  if (xxh3(text) != commit.index_digest)
    damaged(file.path(), "its bytes differ from those that were committed");
  Index index = parse_index(text, file.path());
  if (index.step != commit.step || index.generation != commit.generation)
    damaged(file.path(), "it belongs to another commit");
  return index;
}

/// One piece's chunks, each verified before any byte of it is used.
class ChunkReader {
 public:
  ChunkReader(const InputFile& file, const StoredPiece& piece, int64_t bytes, const std::string& tensor)
      : file_(file), piece_(piece), bytes_(bytes), tensor_(tensor) {}

  /// Bytes [first, first + count) of the piece to `out`. Calls come in ascending order.
  void read(int64_t first, int64_t count, char* out) {
    while (count > 0) {
      const int64_t chunk = first / kChunkBytes, begin = chunk * kChunkBytes;
      const int64_t length = std::min(kChunkBytes, bytes_ - begin);
      const int64_t part = std::min(count, begin + length - first);
      if (part == length) {
        load(chunk, length, out);
      } else {
        if (chunk != held_) {
          buffer_.resize(static_cast<size_t>(length));
          load(chunk, length, buffer_.data());
          held_ = chunk;
        }
        std::memcpy(out, buffer_.data() + (first - begin), static_cast<size_t>(part));
      }
      first += part;
      out += part;
      count -= part;
    }
  }

 private:
  void load(int64_t chunk, int64_t length, char* out) const {
    file_.read(piece_.offset + chunk * kChunkBytes, out, length);
    if (xxh3(out, static_cast<size_t>(length)) == piece_.digests[static_cast<size_t>(chunk)]) return;
    damaged(file_.path(), fmt::format("bytes {} to {} (tensor '{}') differ from those that were written",
                                      piece_.offset + chunk * kChunkBytes,
                                      piece_.offset + chunk * kChunkBytes + length, tensor_));
  }

  const InputFile& file_;
  const StoredPiece& piece_;
  int64_t bytes_;
  const std::string& tensor_;
  std::vector<char> buffer_;
  int64_t held_ = -1;  ///< the chunk in buffer_
};

}  // namespace

Checkpoint::Checkpoint(const std::string& path) : Checkpoint(existing(path)) {}

Checkpoint::Checkpoint(Folder folder)
    : folder_(std::move(folder)),
      commit_(unless_removed(folder_, [this] { return read_commit(folder_); })),
      index_(unless_removed(folder_, [this] { return read_index(folder_, commit_); })),
      held_(index_.files.size()),
      checked_(index_.files.size(), false) {
  check_coverage(index_, folder_.path_of(kIndexName));
  for (const auto& tensor : index_.tensors) {
    for (const StoredPiece& piece : tensor.second.pieces) held_[piece.file].emplace_back(&tensor, &piece);
  }
}

void Checkpoint::check_size(size_t file, const InputFile& input) const {
  if (const int64_t bytes = index_.files[file].bytes; input.size() != bytes)
    damaged(input.path(), fmt::format("it has {} bytes, but {} were written", input.size(), bytes));
}

void Checkpoint::check_files() const {
  unless_removed(folder_, [this] {
    for (size_t file = 0; file < index_.files.size(); ++file)
      check_size(file, folder_.open_file(index_.files[file].name));
  });
}

const StoredTensor& Checkpoint::tensor(const std::string& name) const {
  const auto found = index_.tensors.find(name);
  if (found != index_.tensors.end()) return found->second;
  throw DataError(
      "[checkpoint.read] {} has no tensor '{}' among its {}; check that the checkpoint belongs to this model",
      path(), name, index_.tensors.size());
}

std::string Checkpoint::state() const {
  if (index_.state.name.empty()) return "{}";
  return unless_removed(folder_, [this] {
    const InputFile file = folder_.open_file(index_.state.name);
    std::string text = file.text(kMaxJsonBytes);
    if (static_cast<int64_t>(text.size()) != index_.state.bytes || xxh3(text) != index_.state.header_digest)
      damaged(file.path(), "its bytes differ from those that were written");
    return text;
  });
}

/// Checks that the file's header says what the index says of the file.
void Checkpoint::check_header(size_t file, const InputFile& input) const {
  const StoredFile& stored = index_.files[file];
  check_size(file, input);
  std::string preamble(static_cast<size_t>(stored.header_bytes), '\0');
  input.read(0, preamble.data(), stored.header_bytes);
  if (xxh3(preamble) != stored.header_digest)
    damaged(input.path(), "its header differs from the one that was written");
  if (stored.header_bytes < kHeaderLengthBytes) damaged(input.path(), "it has no header");
  const SafetensorsHeader header =
      parse_safetensors_header(std::string_view(preamble).substr(kHeaderLengthBytes),
                               stored.bytes - stored.header_bytes, input.path());
  for (const auto& [tensor, piece] : held_[file]) {
    const auto entry = header.tensors.find(piece->entry);
    const int64_t begin = piece->offset - stored.header_bytes;
    const int64_t bytes = piece->region.numel() * safetensors_itemsize(tensor->second.dtype);
    if (entry == header.tensors.end() || entry->second.dtype != tensor->second.dtype ||
        entry->second.begin != begin || entry->second.end != begin + bytes)
      damaged(input.path(),
              fmt::format("its header and the index disagree about a piece of tensor '{}'", tensor->first));
  }
  if (held_[file].size() != header.tensors.size())
    damaged(input.path(), fmt::format("its header has {} entries, but the index lists {}",
                                      header.tensors.size(), held_[file].size()));
}

std::shared_ptr<const InputFile> Checkpoint::open(size_t file) const {
  const std::lock_guard lock(mutex_);
  if (last_.second && last_.first == file) return last_.second;
  auto input = std::make_shared<const InputFile>(folder_.open_file(index_.files[file].name));
  if (!checked_[file]) {
    check_header(file, *input);
    checked_[file] = true;
  }
  last_ = {file, input};
  return input;
}

void Checkpoint::read_piece(const std::string& name, const StoredTensor& tensor, const StoredPiece& piece,
                            const plan::Region& region, char* out) const {
  const int64_t itemsize = safetensors_itemsize(tensor.dtype);
  std::shared_ptr<const InputFile> file;
  std::unique_ptr<ChunkReader> chunks;
  intersect(tensor.shape, piece.region, region, [&](int64_t from, int64_t to, int64_t count) {
    if (!chunks) {
      file = open(piece.file);
      chunks = std::make_unique<ChunkReader>(*file, piece, piece.region.numel() * itemsize, name);
    }
    chunks->read(from * itemsize, count * itemsize, out + to * itemsize);
  });
}

void Checkpoint::read(const std::string& name, const plan::Region& region, void* out) const {
  const StoredTensor& stored = tensor(name);
  TRIREME_CHECK(plan::misfit(region, stored.shape).empty(), "[checkpoint.read] {}: tensor '{}': {}", path(),
                name, plan::misfit(region, stored.shape));
  unless_removed(folder_, [&] {
    for (const StoredPiece& piece : stored.pieces)
      read_piece(name, stored, piece, region, static_cast<char*>(out));
  });
}

std::vector<std::string> Checkpoint::verify(const std::function<bool()>& cancelled) const {
  std::vector<std::string> problems;
  const auto attempt = [&](const std::function<void()>& body) {
    try {
      body();
      return true;
    } catch (const Error& error) {
      problems.emplace_back(error.what());
      return false;
    }
  };
  attempt([&] { state(); });
  std::vector<bool> usable;
  for (size_t file = 0; file < index_.files.size(); ++file)
    usable.push_back(attempt([&] { check_header(file, folder_.open_file(index_.files[file].name)); }));
  std::vector<char> buffer;
  for (const auto& [name, tensor] : index_.tensors) {
    const int64_t itemsize = safetensors_itemsize(tensor.dtype);
    for (const StoredPiece& piece : tensor.pieces) {
      if (!usable[piece.file]) continue;
      const int64_t size = piece.region.numel() * itemsize;
      attempt([&] {
        const InputFile file = folder_.open_file(index_.files[piece.file].name);
        ChunkReader chunks(file, piece, size, name);
        for (int64_t done = 0; done < size; done += kChunkBytes) {
          if (cancelled && cancelled()) return;
          const int64_t count = std::min(kChunkBytes, size - done);
          buffer.resize(static_cast<size_t>(count));
          chunks.read(done, count, buffer.data());
        }
      });
    }
  }
  if (!problems.empty() && !folder_.is_in_place()) throw Removed(path());
  return problems;
}

namespace {

Newest look_for_newest(const Folder& folder, const std::string& older_than) {
  std::vector<Listed> all = list_checkpoints(folder);
  std::ranges::reverse(all);
  auto first = all.begin();
  if (!older_than.empty()) {
    first = std::ranges::find(all, older_than, &Listed::name);
    if (first != all.end()) ++first;
  }
  Newest newest;
  for (auto entry = first; entry != all.end() && !newest.checkpoint; ++entry) {
    try {
      if (!entry->commit) continue;
      auto checkpoint = std::make_unique<Checkpoint>(folder.open_folder(entry->name));
      checkpoint->check_files();
      newest.checkpoint = std::move(checkpoint);
    } catch (const Removed&) {
      throw;
    } catch (const Error& error) {
      if (!folder.has(entry->name)) throw Removed(folder.path_of(entry->name));
      newest.passed_over.push_back(fmt::format("{}: {}", entry->name, error.what()));
      ++newest.damaged;
    }
  }
  const int64_t step = newest.checkpoint ? newest.checkpoint->commit().step : -1;
  for (const Listed& entry : all) {
    if (entry.commit || entry.step <= step || !older_than.empty()) continue;
    newest.passed_over.push_back(fmt::format("{}: {}", entry.name, entry.problem));
    newest.damaged += entry.unfinished ? 0 : 1;
  }
  return newest;
}

}  // namespace

/// A run may remove a checkpoint between two of our calls; then there is a newer one.
Newest newest_checkpoint(const Folder& folder, const std::string& older_than) {
  constexpr int kAttempts = 100;
  for (int attempt = 1;; ++attempt) {
    try {
      return look_for_newest(folder, older_than);
    } catch (const Removed&) {
      if (attempt == kAttempts) throw;
    }
  }
}

}  // namespace trireme::checkpoint
