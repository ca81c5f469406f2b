#pragma once
// A file of a program's tensors, checked against what the program has. Private to gt/*.cpp.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "trireme/base/hash.h"
#include "trireme/checkpoint/safetensors_file.h"
#include "trireme/gt/program.h"

namespace gt {

/// An entry of a file: a tensor of the program, or bytes of the client.
struct Entry {
  trireme::plan::TensorType type = {};
  NodePtr node = {};
  std::string bytes = {};
  bool is_optional = false;  ///< a file may lack it
};
using Entries = std::map<std::string, Entry>;

/// The format's name of a dtype: "F32".
const char* stored_name(trireme::plan::TensorDtype dtype);

class SavedFile {
 public:
  static constexpr std::string_view kOptimizerPrefix = "optimizer.";
  /// Keys of the metadata: the digest, the mark of an optimizer's state, steps done, the next seed.
  static constexpr const char *kDigest = "trireme.xxh3", *kState = "trireme.state", *kStep = "note.step",
                              *kSeed = "note.next_seed";
  /// In place of the digest where the header itself is hashed.
  static constexpr const char* kNoDigest = "0000000000000000";
  /// Fixes.
  static constexpr const char *kTakeAnother = "it is damaged: take an earlier file",
                              *kSameModel = "build the model and its optimizer as the program that saved it";

  /// Reads the entries. With `with_state` what an optimizer keeps is among them; otherwise it is passed over.
  /// Throws EnvironmentError where there is no file, DataError where it is damaged, names are missing or more
  /// than the entries, and types are others.
  SavedFile(const std::string& path, const Entries& entries, bool with_state);
  SavedFile(const SavedFile&) = delete;
  SavedFile& operator=(const SavedFile&) = delete;

  bool has(const std::string& name) const { return values_.contains(name); }
  /// The bytes of an entry, once.
  std::string take(const std::string& name) { return std::move(values_.at(name)); }
  /// An int64 of one element. Throws DataError where it is negative.
  int64_t count(const std::string& name) const;
  /// A number of the metadata. Throws DataError where it is none, or less than `least`.
  int64_t note(const char* key, int64_t least) const;
  [[noreturn]] void fail(const std::string& what, const char* fix) const;

 private:
  bool is_state(const std::string& name) const;
  void check_names(const Entries& entries, bool with_state) const;
  void check_type(const std::string& name, const Entry& entry) const;
  void read(const Entries& entries);
  void check_digest() const;
  uint64_t digest() const;
  void hash_values(trireme::StreamingHash& hash, const std::string& name) const;

  trireme::checkpoint::SafetensorsFile file_;
  const trireme::checkpoint::SafetensorsHeader& header_;
  std::map<std::string, std::string> values_;
};

}  // namespace gt
