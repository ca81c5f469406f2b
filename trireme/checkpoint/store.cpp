#include "trireme/checkpoint/store.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::checkpoint {
namespace {

constexpr const char* kLockName = "LOCK";
constexpr const char* kGenerationName = "GENERATION";
constexpr const char* kRollbackName = "ROLLBACK";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kUndone = ".undone";
constexpr std::string_view kTemporaryPrefix = "tmp-";
constexpr int64_t kMaxSmallFile = 4096;

Folder make_folder(const std::string& path) {
  make_directories(path);
  return Folder(path);
}

LockFile take_lock(const Folder& folder) {
  const std::string path = folder.path_of(kLockName);
  if (std::optional<LockFile> lock = LockFile::take(path)) return std::move(*lock);
  throw EnvironmentError(
      "[checkpoint.store] another run (process {}) is writing checkpoints to {}; stop it first, or give "
      "this run its own folder",
      LockFile::number_in(path), folder.path());
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

/// `name`, or where that is taken the first of `name`.2, `name`.3 and so on that is free.
std::string free_name(const Folder& folder, const std::string& name) {
  if (!folder.has(name)) return name;
  int64_t more = 2;
  while (folder.has(fmt::format("{}.{}", name, more))) ++more;
  return fmt::format("{}.{}", name, more);
}

/// A step that was saved before, by a run that went on from an earlier one, keeps its folder.
std::string free_name(const Folder& folder, int64_t step) {
  return free_name(folder, fmt::format("{}{:08}", kPrefix, step));
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

/// The step in the name of a checkpoint.
int64_t step_of(const std::string& name) {
  const std::string_view digits = std::string_view(name).substr(kPrefix.size());
  int64_t step = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), step);
  return step;
}

/// The entry of a checkpoint; none: it was removed meanwhile.
std::optional<Listed> listed(const Folder& folder, const std::string& name) {
  Listed entry{.name = name, .step = step_of(name), .commit = {}, .problem = {}};
  try {
    const Folder inside = folder.open_folder(name);
    entry.unfinished = !inside.has(kCommitName);
    if (entry.unfinished) throw DataError("[checkpoint.store] {}: this save was not finished", inside.path());
    const InputFile file = inside.open_file(kCommitName);
    entry.commit = parse_commit(file.text(kMaxSmallFile), file.path());
  } catch (const Error& error) {
    entry.problem = error.what();
    if (!folder.has(name)) return std::nullopt;
  }
  return entry;
}

}  // namespace

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path + "/" + kIndexName, error) ||
         std::filesystem::exists(path + "/" + kCommitName, error);
}

namespace {

bool is_undone(const std::string& name) {
  return name.find(kUndone) != std::string::npos;
}

std::vector<Listed> all_folders(const Folder& folder) {
  std::vector<Listed> all;
  const auto look = [&] {
    bool settled = true;
    all.clear();
    for (const std::string& name : folder.names()) {
      if (!name.starts_with(kPrefix) || !is_file_name(name)) continue;
      std::optional<Listed> entry = listed(folder, name);
      settled &= entry.has_value();
      if (entry) all.push_back(std::move(*entry));
    }
    return settled;
  };
  // A run removes one only when it has written another, which the list of names may not have had.
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts && !look();) ++attempt;
  std::ranges::stable_sort(all, {}, [](const Listed& entry) {
    const Commit commit = entry.commit.value_or(Commit{.step = -1, .generation = -1});
    // "step-8.10" is newer than "step-8.9".
    return std::tuple(commit.generation, commit.step, entry.step, entry.name.size(), entry.name);
  });
  return all;
}

/// The checkpoint that a run goes back to; empty: no run does.
std::string noted_rollback(const Folder& folder) {
  if (!folder.has(kRollbackName)) return {};
  try {
    const std::string text = folder.open_file(kRollbackName).text(kMaxSmallFile);
    return text.substr(0, text.find('\n'));
  } catch (const DataError&) {
    return {};
  }
}

struct Branches {
  std::vector<Listed> counting, undone;
};

/// Names alone tell what was set aside, but between the first and the last of these renames: until ROLLBACK
/// has gone, what comes after the checkpoint that it names is set aside whatever it is called.
Branches branches_with(const Folder& folder, const std::string& rollback) {
  const std::vector<Listed> all = all_folders(folder);
  const auto target = std::ranges::find(all, rollback, &Listed::name);
  Branches found;
  for (auto entry = all.begin(); entry != all.end(); ++entry) {
    const bool later =
        target != all.end() && (entry > target || (!entry->commit && entry->step > target->step));
    const bool undone = entry != target && (later || is_undone(entry->name));
    (undone ? found.undone : found.counting).push_back(*entry);
  }
  return found;
}

Branches branches(const Folder& folder) {
  return branches_with(folder, noted_rollback(folder));
}

int64_t last_generation(const Folder& folder) {
  int64_t last = noted_generation(folder);
  for (const Listed& listed : all_folders(folder)) {
    if (listed.commit) last = std::max(last, listed.commit->generation);
  }
  return last;
}

/// Gives the names that ROLLBACK asks for, if it is there.
std::vector<Store::SetAside> finish_rollback(const Folder& folder) {
  std::vector<Store::SetAside> done;
  if (!folder.has(kRollbackName)) return done;
  const std::string target = noted_rollback(folder);
  for (const Listed& entry : branches_with(folder, target).undone) {
    if (is_undone(entry.name)) continue;
    done.push_back({.name = entry.name, .aside = free_name(folder, entry.name + std::string(kUndone))});
    folder.rename(done.back().name, done.back().aside);
  }
  if (is_undone(target) && folder.has(target)) folder.rename(target, free_name(folder, step_of(target)));
  folder.sync();
  // A power cut may bring it back: it then asks for what has been done, until the next name here is synced.
  folder.remove(kRollbackName);
  return done;
}

}  // namespace

std::vector<Listed> list_checkpoints(const Folder& folder) {
  return branches(folder).counting;
}

std::vector<Listed> list_undone(const Folder& folder) {
  return branches(folder).undone;
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

/// Reads every byte of a checkpoint and returns the first problem; empty: none.
std::string damage_of(const Folder& folder, const std::string& name, const std::function<bool()>& cancelled) {
  try {
    const std::vector<std::string> problems = Checkpoint(folder.open_folder(name)).verify(cancelled);
    return problems.empty() ? std::string() : problems.front();
  } catch (const Error& error) {
    return error.what();
  }
}

/// Whether there is anything that would be removed if all were intact.
bool can_remove(const std::vector<Listed>& all, int64_t keep) {
  const auto committed = std::ranges::count_if(all, [](const Listed& entry) { return !!entry.commit; });
  return committed > keep || std::ranges::any_of(all, &Listed::unfinished);
}

/// `read`: as Store has it.
std::vector<std::string> prune_locked(const Folder& folder, int64_t keep,
                                      const std::function<bool()>& cancelled,
                                      std::map<std::string, std::string>& read) {
  std::vector<std::string> removed;
  const auto remove = [&](const std::string& name) {
    remove_checkpoint(folder, name);
    removed.push_back(name);
  };
  auto [all, undone] = branches(folder);
  if (keep <= 0 || (undone.empty() && !can_remove(all, keep))) return removed;
  std::ranges::reverse(all);
  std::vector<int64_t> kept;  // their generations
  const auto enough = [&] { return std::ssize(kept) >= keep; };
  for (const Listed& entry : all) {
    // Older ones go only when `keep` newer ones have been read back; damaged ones stay for people to look at.
    if (entry.commit && !enough()) {
      auto found = read.find(entry.name);
      if (found == read.end()) {
        std::string damage = damage_of(folder, entry.name, cancelled);
        if (cancelled && cancelled()) return removed;
        if (!damage.empty()) log_warning("{} does not count as kept: {}", folder.path_of(entry.name), damage);
        found = read.emplace(entry.name, std::move(damage)).first;
      }
      if (found->second.empty()) kept.push_back(entry.commit->generation);
      continue;
    }
    if (!enough() || (!entry.commit && !entry.unfinished)) continue;
    remove(entry.name);
  }
  for (const Listed& entry : undone) {
    if (!enough() || (!entry.commit && !entry.unfinished)) continue;
    const int64_t generation = entry.commit ? entry.commit->generation : 0;
    if (std::ranges::all_of(kept, [&](int64_t one) { return one > generation; })) remove(entry.name);
  }
  return removed;
}

}  // namespace

std::vector<std::string> prune_checkpoints(const std::string& path, int64_t keep) {
  const Folder folder(path);
  const LockFile lock = take_lock(folder);
  finish_rollback(folder);
  sweep(folder);
  std::map<std::string, std::string> read;
  return prune_locked(folder, keep, {}, read);
}

Claim::Claim(const std::string& path)
    : folder_(make_folder(path)), lock_(take_lock(folder_)), generation_(last_generation(folder_) + 1) {}

Store::Store(Claim claim) : claim_(std::move(claim)) {
  folder().write_file(kGenerationName, std::to_string(generation()) + "\n");
  finish_rollback(folder());
  sweep(folder());
}

std::vector<Store::SetAside> Store::go_back_to(const std::string& name) {
  const Branches then = branches_with(folder(), name);
  if (!is_undone(name) && std::ranges::all_of(then.undone, is_undone, &Listed::name)) return {};
  folder().write_file(kRollbackName, name + "\n");
  return finish_rollback(folder());
}

Folder Store::begin(const std::string& temporary) {
  return folder().create_folder(temporary);
}

/// A run that was wrongly taken for dead must not commit after its successor has begun.
void Store::check_generation() const {
  if (const int64_t noted = noted_generation(folder()); noted > generation()) {
    throw EnvironmentError(
        "[checkpoint.store] a later run (generation {}) has taken over {} from this one ({}), which no "
        "longer saves; stop this run",
        noted, folder().path(), generation());
  }
}

std::string Store::commit(const Work& work) {
  const Folder inside = folder().open_folder(work.temporary);
  Reports reports =
      collect_reports(inside, work.step, generation(), work.ranks, work.seconds, work.cancelled);
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
  inside.write_file(kCommitName, format_commit({.step = work.step,
                                                .generation = generation(),
                                                .index_bytes = static_cast<int64_t>(index.size()),
                                                .index_digest = xxh3(index)}));
  check_generation();
  const std::string name = free_name(folder(), work.step);
  read_.erase(name);  // one of that name was removed
  // All is in it: who lists checkpoints meanwhile takes none for damaged because it is being written.
  folder().rename(work.temporary, name);
  try {
    folder().sync();
  } catch (...) {
    folder().rename(name, work.temporary);  // to be abandoned, where a full disk may need the place
    throw;
  }
  return name;
}

void Store::abandon(const std::string& temporary) noexcept {
  try {
    if (folder().has(temporary)) folder().remove(temporary);
  } catch (const std::exception&) {  // the next run sweeps it
  }
}

std::vector<std::string> Store::prune(int64_t keep, const std::function<bool()>& cancelled) {
  return prune_locked(folder(), keep, cancelled, read_);
}

}  // namespace trireme::checkpoint
