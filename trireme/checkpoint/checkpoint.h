#pragma once
// A committed checkpoint, read: any region of any tensor, from whatever pieces it was written in, with every
// byte that is used verified.
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/index.h"

namespace trireme::checkpoint {

/// A checkpoint is gone: a run that keeps its newest ones has removed it. It is not damaged.
class Removed : public EnvironmentError {
 public:
  explicit Removed(const std::string& path)
      : EnvironmentError(
            "[checkpoint.read] {} was removed meanwhile, as by a run that keeps its newest checkpoints; use "
            "a newer one",
            path) {}
};

/// Every function throws Removed in place of other errors once the folder is no longer at its path.
class Checkpoint {
 public:
  /// Reads commit and index, and proves that the pieces cover every tensor once. Throws DataError when they
  /// are not as they were written. Files are looked at when they are read.
  explicit Checkpoint(Folder folder);
  /// Throws Removed when there is nothing at `path`.
  explicit Checkpoint(const std::string& path);
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  /// Throws DataError when a file is missing or of another size than was written.
  void check_files() const;

  const std::string& path() const { return folder_.path(); }
  const Commit& commit() const { return commit_; }
  const Index& index() const { return index_; }
  /// The stored tensor `name`; throws DataError when there is none of that name.
  const StoredTensor& tensor(const std::string& name) const;
  /// The run's own JSON. Throws DataError when it is damaged.
  std::string state() const;

  /// The elements of a region, one after the other, to `out`. Reads chunks of the pieces that have some of
  /// them, and no others. Throws DataError naming file and tensor when a chunk is not what was written.
  /// Thread-safe.
  void read(const std::string& name, const plan::Region& region, void* out) const;

  /// Reads every byte; returns what is wrong, one message a file or piece. Once `cancelled` it reads no
  /// further.
  std::vector<std::string> verify(const std::function<bool()>& cancelled = {}) const;

 private:
  std::shared_ptr<const InputFile> open(size_t file) const;
  void check_size(size_t file, const InputFile& input) const;
  void check_header(size_t file, const InputFile& input) const;
  void read_piece(const std::string& name, const StoredTensor& tensor, const StoredPiece& piece,
                  const plan::Region& region, char* out) const;

  Folder folder_;
  Commit commit_;
  Index index_;
  /// An entry of a file: a tensor of the index, and one of its pieces.
  using Held = std::pair<const std::pair<const std::string, StoredTensor>*, const StoredPiece*>;
  std::vector<std::vector<Held>> held_;
  mutable std::mutex mutex_;
  mutable std::vector<bool> checked_;  ///< files whose headers have been compared
  mutable std::pair<size_t, std::shared_ptr<const InputFile>> last_;  ///< the file that was read last
};

/// The newest checkpoint of `folder` whose files are all there, and why newer ones are not, one line each;
/// null: none is.
struct Newest {
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<std::string> passed_over;
  int64_t damaged = 0;  ///< of passed_over: damaged; the others are saves that did not complete
};
/// The newest one older than `older_than`, a name of list_checkpoints(); empty: of all.
Newest newest_checkpoint(const Folder& folder, const std::string& older_than = {});

}  // namespace trireme::checkpoint
