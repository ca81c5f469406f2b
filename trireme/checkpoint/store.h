#pragma once
// The folder that a run keeps its checkpoints in: one folder for each that never changes after its commit, a
// lock for the run that writes, and rules for which one counts.
//
//   checkpoints/step-00000100/{COMMIT.json, index.json, state.json, shard-00000.safetensors, ...}
//   checkpoints/tmp-...        being written, or left by a run that died: swept by the next one
//   checkpoints/LOCK           held while a run writes; GENERATION: of the last run that did
//   checkpoints/step-00000200.undone   set aside, because a run has gone back to an earlier one
//   checkpoints/ROLLBACK       the one that a run goes back to, while later ones get those names
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/lock_file.h"
#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/index.h"
#include "trireme/checkpoint/shard.h"

namespace trireme::checkpoint {

inline constexpr const char* kCommitName = "COMMIT.json";
inline constexpr const char* kIndexName = "index.json";
inline constexpr const char* kStateName = "state.json";

/// Whether that folder is one checkpoint, whole or not: it has an index.json or a COMMIT.json.
bool is_checkpoint(const std::string& path);

/// A folder that looks like a checkpoint.
struct Listed {
  std::string name;
  int64_t step = 0;              ///< as its name says
  std::optional<Commit> commit;  ///< none: there is none, or it cannot be read
  std::string problem;           ///< why; empty where there is a commit
  bool unfinished = false;       ///< it has no COMMIT.json at all
};

/// All checkpoints in `folder` that count, oldest first: by the generation of the run that wrote them, then
/// by step. Those without a commit come first. One that is removed meanwhile is left out.
std::vector<Listed> list_checkpoints(const Folder& folder);
/// Checkpoints that were set aside when a run went back to an earlier one, in the same order.
std::vector<Listed> list_undone(const Folder& folder);

/// Whether a save to the folder `path`, which may not be there, was ever committed, be it damaged since. That
/// a run has begun to write there proves no checkpoint.
bool has_checkpoint(const std::string& path);

/// Store::prune() of the folder `path` of a run that does not write: takes its lock, and removes what runs
/// that died have left half written, but begins no generation. Throws EnvironmentError when another process
/// holds the lock.
std::vector<std::string> prune_checkpoints(const std::string& path, int64_t keep);

/// Where a run's ranks write step `step` until it is committed. `attempt` counts saves of a run, so that no
/// name comes twice.
std::string temporary_name(int64_t step, int64_t generation, int64_t attempt);

/// The lock of a folder of checkpoints, before anything in the folder changes: a run looks first whether it
/// can go on from what is there.
class Claim {
 public:
  /// Makes the folder and takes its lock. Throws EnvironmentError when another process holds it, naming it.
  explicit Claim(const std::string& path);

  /// The number that Store::generation() will return.
  int64_t generation() const { return generation_; }

 private:
  friend class Store;

  Folder folder_;
  LockFile lock_;
  int64_t generation_;
};

/// The folder of checkpoints of a run that writes, on the rank that commits.
class Store {
 public:
  /// Begins the next generation, ends a rollback that a run has died in, and removes what runs that died have
  /// left half written.
  explicit Store(Claim claim);
  explicit Store(const std::string& path) : Store(Claim(path)) {}

  const Folder& folder() const { return claim_.folder_; }
  int64_t generation() const { return claim_.generation_; }

  /// A checkpoint that was set aside, under the name that it got.
  struct SetAside {
    std::string name, aside;
  };
  /// Makes checkpoint `name` the newest: all that come after it are set aside under names that end in
  /// ".undone", and one that had such a name itself gets its own back. For everybody who lists checkpoints it
  /// happens at once, and on the disk before this returns. Returns what was set aside.
  std::vector<SetAside> go_back_to(const std::string& name);

  /// Makes the folder for a save; ranks may write to it when this has returned.
  Folder begin(const std::string& temporary);

  struct Work {
    std::string temporary;
    int64_t step = 0;
    int64_t ranks = 1;
    std::string state;     ///< JSON of the run
    double seconds = 600;  ///< to wait for the slowest rank
    std::function<bool()> cancelled = {};
  };
  /// Waits for all ranks, proves that their pieces are the whole state, and gives the folder its name and its
  /// commit. Returns the name. Throws EnvironmentError or DataError; then nothing has changed but the
  /// temporary folder, which abandon() removes.
  std::string commit(const Work& work);
  void abandon(const std::string& temporary) noexcept;

  /// Removes checkpoints older than the `keep` newest whose bytes are as they were written, and those without
  /// a COMMIT.json; those with a damaged one stay. One that was set aside goes when `keep` of later
  /// generations are intact. 0 keeps all. Where anything can go, every byte of those
  /// that are kept is read first, once in the life of this store, and the log names the damaged ones. Once
  /// `cancelled`, it reads no further and removes nothing. Returns the names of the removed ones.
  std::vector<std::string> prune(int64_t keep, const std::function<bool()>& cancelled = {});

 private:
  void check_generation() const;

  Claim claim_;
  std::map<std::string, std::string> read_;  ///< what was found wrong in those that were read; empty: nothing
};

}  // namespace trireme::checkpoint
