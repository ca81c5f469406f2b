#include "trireme/gt/saved_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "trireme/base/error.h"

namespace gt {

using trireme::DataError;
using trireme::EnvironmentError;
using trireme::StreamingHash;
using trireme::checkpoint::HeaderEntry;
using trireme::checkpoint::InputFile;
using trireme::checkpoint::SafetensorsFile;
using trireme::checkpoint::SafetensorsHeader;
using trireme::plan::TensorDtype;

namespace {

/// The format's names, by dtype.
constexpr std::array<const char*, 5> kStoredDtypes = {"F32", "BF16", "F16", "I64", "BOOL"};

SafetensorsFile open_saved(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored))
    throw EnvironmentError("[gt.load] there is no file '{}'; name one that gt::save() has written", path);
  return SafetensorsFile(InputFile(path));
}

}  // namespace

const char* stored_name(TensorDtype dtype) {
  return kStoredDtypes[static_cast<size_t>(dtype)];
}

SavedFile::SavedFile(const std::string& path, const Entries& entries, bool with_state)
    : file_(open_saved(path)), header_(file_.header()) {
  if (with_state && !header_.metadata.contains(kState))
    fail("it has tensors alone, and nothing of an optimizer",
         "gt::load() takes them, and gt::save_training() writes both");
  check_names(entries, with_state);
  for (const auto& [name, entry] : entries) check_type(name, entry);
  read(entries);
  check_digest();
}

int64_t SavedFile::count(const std::string& name) const {
  int64_t number = 0;
  std::memcpy(&number, values_.at(name).data(), sizeof number);
  if (number < 0) fail(fmt::format("'{}' is {}, and counts from 0", name, number), kTakeAnother);
  return number;
}

int64_t SavedFile::note(const char* key, int64_t least) const {
  const auto found = header_.metadata.find(key);
  const std::string text = found == header_.metadata.end() ? "" : found->second;
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, number);
  if (read.ec != std::errc() || read.ptr != end || number < least)
    fail(fmt::format("its metadata has '{}' for {}", text, key), kTakeAnother);
  return number;
}

void SavedFile::fail(const std::string& what, const char* fix) const {
  throw DataError("[gt.load] {}: {}; {}", file_.path(), what, fix);
}

bool SavedFile::is_state(const std::string& name) const {
  return header_.metadata.contains(kState) && name.starts_with(kOptimizerPrefix);
}

void SavedFile::check_names(const Entries& entries, bool with_state) const {
  std::vector<std::string> missing, more;
  for (const auto& [name, entry] : entries) {
    if (!entry.is_optional && !header_.tensors.contains(name)) missing.push_back(name);
  }
  for (const auto& [name, entry] : header_.tensors) {
    if (!entries.contains(name) && (with_state || !is_state(name))) more.push_back(name);
  }
  if (!missing.empty())
    fail(fmt::format("it lacks {} tensors of the program, the first is '{}'", missing.size(), missing[0]),
         kSameModel);
  if (!more.empty())
    fail(fmt::format("the program lacks {} of its tensors, the first is '{}'", more.size(), more[0]),
         kSameModel);
}

void SavedFile::check_type(const std::string& name, const Entry& entry) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) return;
  const HeaderEntry& there = found->second;
  if (there.dtype == stored_name(entry.type.dtype) && there.shape == entry.type.shape) return;
  fail(fmt::format("'{}' is {} ({}) there, and {} in the program", name, there.dtype,
                   fmt::join(there.shape, ", "), to_text(entry.type)),
       kSameModel);
}

void SavedFile::read(const Entries& entries) {
  for (const auto& [name, there] : header_.tensors) {
    if (!entries.contains(name)) continue;
    std::string bytes(static_cast<size_t>(there.end - there.begin), '\0');
    file_.read(name, 0, bytes.data(), std::ssize(bytes));
    const bool is_bool = entries.at(name).type.dtype == TensorDtype::kBool;
    if (is_bool && std::ranges::any_of(bytes, [](char one) { return one != 0 && one != 1; }))
      fail(fmt::format("'{}' of BOOL has a byte other than 0 and 1", name), kTakeAnother);
    values_[name] = std::move(bytes);
  }
}

/// Files of other programs have none.
void SavedFile::check_digest() const {
  const auto there = header_.metadata.find(kDigest);
  if (there == header_.metadata.end()) return;
  const std::string found = trireme::hex64(digest());
  if (found != there->second)
    fail(fmt::format("the digest of its bytes is {}, not {} as it says", found, there->second), kTakeAnother);
}

uint64_t SavedFile::digest() const {
  SafetensorsHeader written = header_;
  written.metadata[kDigest] = kNoDigest;
  const std::string preamble = safetensors_preamble(written);
  StreamingHash hash;
  hash.update(preamble.data(), preamble.size());
  std::map<int64_t, std::string> by_offset;
  for (const auto& [name, there] : header_.tensors) {
    if (there.end > there.begin) by_offset[there.begin] = name;
  }
  for (const auto& [begin, name] : by_offset) hash_values(hash, name);
  return hash.digest();
}

/// Tensors that are passed over are hashed, too.
void SavedFile::hash_values(StreamingHash& hash, const std::string& name) const {
  const auto kept = values_.find(name);
  if (kept != values_.end()) return hash.update(kept->second.data(), kept->second.size());
  constexpr int64_t kAtOnce = int64_t{4} << 20;
  const HeaderEntry& there = header_.tensors.at(name);
  std::string part;
  for (int64_t at = 0; at < there.end - there.begin; at += std::ssize(part)) {
    part.resize(static_cast<size_t>(std::min(kAtOnce, there.end - there.begin - at)));
    file_.read(name, at, part.data(), std::ssize(part));
    hash.update(part.data(), part.size());
  }
}

}  // namespace gt
