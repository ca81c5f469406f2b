#include "trireme/checkpoint/store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::checkpoint {
namespace {

constexpr const char* kLockName = "LOCK";
constexpr const char* kGenerationName = "GENERATION";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporaryPrefix = "tmp-";
constexpr int64_t kMaxSmallFile = 4096;

Folder make_folder(const std::string& path) {
  make_directories(path);
  return Folder(path);
}

Descriptor take_lock(const Folder& folder) {
  const std::string path = folder.path_of(kLockName);
  Descriptor lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!lock)
    throw EnvironmentError("[checkpoint.store] cannot open {}: {}; choose a writable folder", path,
                           errno_text(errno));
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    char holder[64] = {};
    [[maybe_unused]] const ssize_t got = ::pread(lock.get(), holder, sizeof holder - 1, 0);
    throw EnvironmentError(
        "[checkpoint.store] another run (process {}) is writing checkpoints to {}; stop it first, or give "
        "this run its own folder",
        holder, folder.path());
  }
  const std::string mine = std::to_string(::getpid());
  [[maybe_unused]] const int cut = ::ftruncate(lock.get(), 0);  // for people only
  [[maybe_unused]] const ssize_t put = ::pwrite(lock.get(), mine.data(), mine.size(), 0);
  return lock;
}

/// 0 when there is none, or nothing that can be read.
int64_t noted_generation(const Folder& folder) {
  if (!folder.has(kGenerationName)) return 0;
  int64_t generation = 0;
  try {
    const std::string text = folder.open_file(kGenerationName).text(kMaxSmallFile);
    std::from_chars(text.data(), text.data() + text.size(), generation);
  } catch (const DataError&) {
  }
  return generation;
}

int64_t last_generation(const Folder& folder) {
  int64_t last = noted_generation(folder);
  for (const Listed& listed : list_checkpoints(folder)) {
    if (listed.commit) last = std::max(last, listed.commit->generation);
  }
  return last;
}

/// A step that was saved before, by a run that went on from an earlier one, keeps its folder.
std::string free_name(const Folder& folder, int64_t step) {
  const std::string name = fmt::format("{}{:08}", kPrefix, step);
  if (!folder.has(name)) return name;
  int64_t more = 2;
  while (folder.has(fmt::format("{}.{}", name, more))) ++more;
  return fmt::format("{}.{}", name, more);
}

std::string compose_state(const std::string& run, const std::map<int64_t, std::string>& ranks) {
  nlohmann::ordered_json state{{"run", nlohmann::ordered_json::parse(run)}};
  nlohmann::ordered_json& by_rank = state["ranks"] = nlohmann::ordered_json::object();
  for (const auto& [rank, text] : ranks) by_rank[std::to_string(rank)] = nlohmann::ordered_json::parse(text);
  return state.dump(1) + "\n";
}

void check_readable(const char* name, const std::string& content) {
  if (static_cast<int64_t>(content.size()) <= kMaxJsonBytes) return;
  throw EnvironmentError(
      "[checkpoint.store] {} would have {} bytes, but the limit is {}; save from fewer ranks, or convert to "
      "fewer files",
      name, content.size(), kMaxJsonBytes);
}

StoredFile stored(const std::string& name, std::string_view content) {
  const auto bytes = static_cast<int64_t>(content.size());
  return {.name = name, .bytes = bytes, .header_bytes = bytes, .header_digest = xxh3(content)};
}

Listed listed(const Folder& folder, const std::string& name) {
  Listed entry{.name = name, .commit = {}, .problem = {}};
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), entry.step);
  try {
    const Folder inside = folder.open_folder(name);
    entry.unfinished = !inside.has(kCommitName);
    if (entry.unfinished) throw DataError("[checkpoint.store] {}: this save was not finished", inside.path());
    const InputFile file = inside.open_file(kCommitName);
    entry.commit = parse_commit(file.text(kMaxSmallFile), file.path());
  } catch (const Error& error) {
    entry.problem = error.what();
  }
  return entry;
}

}  // namespace

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path + "/" + kIndexName, error);
}

std::vector<Listed> list_checkpoints(const Folder& folder) {
  std::vector<Listed> all;
  for (const std::string& name : folder.names()) {
    if (name.starts_with(kPrefix) && is_file_name(name)) all.push_back(listed(folder, name));
  }
  std::ranges::stable_sort(all, {}, [](const Listed& entry) {
    const Commit commit = entry.commit.value_or(Commit{.step = -1, .generation = -1});
    // "step-8.10" is newer than "step-8.9".
    return std::tuple(commit.generation, commit.step, entry.step, entry.name.size(), entry.name);
  });
  return all;
}

bool has_checkpoint(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return false;
  return !std::ranges::all_of(list_checkpoints(Folder(path)), &Listed::unfinished);
}

std::string temporary_name(int64_t step, int64_t generation, int64_t attempt) {
  return fmt::format("{}{:08}-g{}-a{}", kTemporaryPrefix, step, generation, attempt);
}

namespace {

/// A folder that cannot be removed, because somebody has put other things into it, stays and keeps no run
/// from starting.
void sweep(const Folder& folder) {
  for (const std::string& name : folder.names()) {
    if (!name.starts_with(kTemporaryPrefix) || !is_file_name(name)) continue;
    try {
      folder.remove(name);
    } catch (const Error&) {
      // A later run tries again.
    }
  }
}

/// The rename takes away its name at once, so no reader ever finds half of a checkpoint.
void remove_checkpoint(const Folder& folder, const std::string& name) {
  const std::string doomed = fmt::format("{}removed-{}", kTemporaryPrefix, name);
  folder.remove(doomed);
  folder.rename(name, doomed);
  folder.sync();
  folder.remove(doomed);
}

std::vector<std::string> prune_locked(const Folder& folder, int64_t keep) {
  std::vector<std::string> removed;
  if (keep <= 0) return removed;
  std::vector<Listed> all = list_checkpoints(folder);
  std::ranges::reverse(all);
  int64_t kept = 0;
  for (const Listed& entry : all) {
    // Older ones go only when `keep` newer ones have been read back; damaged ones stay for people to look at.
    if (entry.commit && kept < keep) {
      kept += is_complete(folder, entry.name) ? 1 : 0;
      continue;
    }
    if (kept < keep || (!entry.commit && !entry.unfinished)) continue;
    remove_checkpoint(folder, entry.name);
    removed.push_back(entry.name);
  }
  return removed;
}

}  // namespace

std::vector<std::string> prune_checkpoints(const std::string& path, int64_t keep) {
  const Folder folder(path);
  const Descriptor lock = take_lock(folder);
  sweep(folder);
  return prune_locked(folder, keep);
}

Store::Store(const std::string& path) : folder_(make_folder(path)), lock_(take_lock(folder_)) {
  generation_ = last_generation(folder_) + 1;
  folder_.write_file(kGenerationName, std::to_string(generation_) + "\n");
  sweep(folder_);
}

Folder Store::begin(const std::string& temporary) {
  return folder_.create_folder(temporary);
}

/// A run that was wrongly taken for dead must not commit after its successor has begun.
void Store::check_generation() const {
  if (const int64_t noted = noted_generation(folder_); noted > generation_) {
    throw EnvironmentError(
        "[checkpoint.store] a later run (generation {}) has taken over {} from this one ({}), which no "
        "longer saves; stop this run",
        noted, folder_.path(), generation_);
  }
}

std::string Store::commit(const Work& work) {
  const Folder inside = folder_.open_folder(work.temporary);
  Reports reports = collect_reports(inside, work.step, generation_, work.ranks, work.seconds, work.cancelled);
  check_coverage(reports.index, inside.path());
  const std::string state = compose_state(work.state, reports.states);
  reports.index.state = stored(kStateName, state);
  const std::string index = format_index(reports.index);
  check_readable(kStateName, state);
  check_readable(kIndexName, index);
  parse_index(index, inside.path_of(kIndexName));
  inside.write_file(kStateName, state);
  inside.write_file(kIndexName, index);
  remove_reports(inside, work.ranks);
  inside.sync();
  check_generation();
  const std::string name = free_name(folder_, work.step);
  folder_.rename(work.temporary, name);
  folder_.sync();
  try {
    inside.write_file(kCommitName, format_commit({.step = work.step,
                                                  .generation = generation_,
                                                  .index_bytes = static_cast<int64_t>(index.size()),
                                                  .index_digest = xxh3(index)}));
  } catch (...) {
    folder_.rename(name, work.temporary);  // to be abandoned, where a full disk may need the place
    throw;
  }
  return name;
}

void Store::abandon(const std::string& temporary) noexcept {
  try {
    if (folder_.has(temporary)) folder_.remove(temporary);
  } catch (const std::exception&) {  // the next run sweeps it
  }
}

std::vector<std::string> Store::prune(int64_t keep) {
  return prune_locked(folder_, keep);
}

}  // namespace trireme::checkpoint
