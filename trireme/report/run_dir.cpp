#include "trireme/report/run_dir.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <set>
#include <tuple>

#include "trireme/base/build_info.h"
#include "trireme/base/clock.h"
#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/report/config_entries.h"
#include "trireme/report/machine.h"
#include "trireme/report/recorded_number.h"

namespace trireme::report {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kSchema = "trireme.manifest/1";
constexpr const char* kLockFile = "LOCK";
constexpr std::string_view kTemporaryLink = ".latest-";

[[noreturn]] void fail(std::string_view action, const std::string& path, int error) {
  throw EnvironmentError("[report.run_dir] cannot {} {}: {}; choose another folder with --run-dir", action,
                         path, errno_text(error));
}

/// `name` as part of a folder name: anything but letters, digits, '.', '_' and '-' becomes '-'.
std::string folder_safe(std::string name) {
  for (char& letter : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(letter)) != 0;
    if (!plain && letter != '.' && letter != '_' && letter != '-') letter = '-';
  }
  if (name.empty() || name.front() == '.' || name.front() == '-') name.insert(0, "run");
  return name;
}

/// The name in "name-20261122-123411Z-h5fh", and all of a folder that is called otherwise.
std::string name_part(const std::string& folder) {
  constexpr std::string_view kSuffix = "-00000000-000000Z-aaaa";
  if (folder.size() <= kSuffix.size()) return folder;
  const std::string suffix = folder.substr(folder.size() - kSuffix.size());
  for (size_t i = 0; i < kSuffix.size(); ++i) {
    const auto letter = static_cast<unsigned char>(suffix[i]);
    const bool fits = kSuffix[i] == '0'   ? std::isdigit(letter) != 0
                      : kSuffix[i] == 'a' ? std::isalnum(letter) != 0
                                          : suffix[i] == kSuffix[i];
    if (!fits) return folder;
  }
  return folder.substr(0, folder.size() - kSuffix.size());
}

std::string random_id() {
  constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyz";
  std::random_device entropy;
  std::uniform_int_distribution<size_t> pick(0, kLetters.size() - 1);
  std::string id;
  for (int i = 0; i < 4; ++i) id += kLetters[pick(entropy)];
  return id;
}

/// Makes a folder that did not exist before; mkdir is what decides between two runs that picked the same
/// name.
std::string make_unique_folder(const std::string& root, const std::string& name) {
  // NAME_MAX, which the link that becomes `latest` must keep as well.
  constexpr size_t kLongest = 255 - std::string_view("-00000000-000000Z-aaaa").size() - kTemporaryLink.size();
  if (const size_t length = folder_safe(name).size(); length > kLongest) {
    throw ConfigError(
        "[report.run_dir] the name of the run has {} bytes, but its folder can have a name of at most {}; "
        "choose a shorter name",
        length, kLongest);
  }
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string path = fmt::format("{}/{}-{}-{}", root, folder_safe(name), utc_compact(), random_id());
    if (::mkdir(path.c_str(), 0755) == 0) {
      sync_folder(root);
      return path;
    }
    if (errno != EEXIST) fail("create folder", path, errno);
  }
  throw EnvironmentError("[report.run_dir] found no free folder name in {} in {} attempts; clean it up", root,
                         kAttempts);
}

/// Points <root>/latest at `folder`: a link under another name is renamed over the old one, so that there is
/// always one to follow.
void point_latest(const std::string& root, const std::string& folder) {
  const std::string link = root + "/latest";
  const std::string temporary = fmt::format("{}/{}{}", root, kTemporaryLink, folder);
  ::unlink(temporary.c_str());  // of a process that died here
  if (::symlink(folder.c_str(), temporary.c_str()) != 0) fail("create link", temporary, errno);
  if (::rename(temporary.c_str(), link.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  fail("replace link", link, error);
}

OrderedJson started_attempt(const OrderedJson& started) {
  return {{"started", started},   {"ended", nullptr},        {"exit_code", nullptr},
          {"cause", nullptr},     {"error", nullptr},        {"rank", nullptr},
          {"last_step", nullptr}, {"resumed_from", nullptr}, {"steps_lost", nullptr}};
}

/// The device and how many ranks of it, in which layout.
void put_layout(OrderedJson& json, const Manifest& manifest) {
  json["device"] = manifest.device;
  json["ranks"] = manifest.ranks;
  json["mesh"] = manifest.mesh;
}

OrderedJson started_attempt(const OrderedJson& started, const Manifest& manifest) {
  OrderedJson attempt = started_attempt(started);
  attempt["command"] = manifest.command;
  put_layout(attempt, manifest);
  return attempt;
}

OrderedJson started_manifest(const std::string& name, const Manifest& manifest, int64_t sequence) {
  const Machine machine = describe_machine();
  OrderedJson json;
  json["schema"] = kSchema;
  json["version"] = kVersion;
  json["torch"] = kTorchVersion;
  json["name"] = name;
  json["sequence"] = sequence;
  json["command"] = manifest.command;
  if (!manifest.program.empty()) json["program"] = manifest.program;
  json["hostname"] = machine.hostname;
  json["cpu"] = machine.cpu;
  json["cores"] = machine.cores;
  json["memory_bytes"] = machine.memory_bytes;
  json["kernel"] = machine.kernel;
  put_layout(json, manifest);
  json["started"] = utc_timestamp();
  json["ended"] = nullptr;
  json["exit_code"] = nullptr;
  json["attempts"] = OrderedJson::array({started_attempt(json["started"], manifest)});
  return json;
}

void write_manifest(const std::string& run, const OrderedJson& json) {
  write_file_atomic(run + "/manifest.json",
                    json.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n");
}

/// Throws ConfigError where `run` has no manifest, DataError where it is none of ours.
OrderedJson read_manifest(const std::string& run) {
  const std::string path = run + "/manifest.json";
  if (!fs::exists(path)) {
    throw ConfigError(
        "[report.run_dir] {} is not a run directory: it has no manifest.json; give a folder below runs/ or "
        "'latest'",
        run);
  }
  if (!fs::is_regular_file(path))  // a pipe would keep the reader waiting
    throw DataError("[report.run_dir] {} is not a regular file; remove it, or choose another run", path);
  const OrderedJson json = OrderedJson::parse(read_file(path), nullptr, false);
  if (!json.is_object() || !json.contains("schema") || json["schema"] != kSchema) {
    throw DataError(
        "[report.run_dir] {} is damaged or from another version: it has no JSON object with schema '{}'; "
        "restore it, or choose another run",
        path, kSchema);
  }
  return json;
}

/// The one that goes on, or was the last. A manifest without attempts gets that of the whole run.
OrderedJson& last_attempt(OrderedJson& manifest) {
  OrderedJson& attempts = manifest["attempts"];
  if (!attempts.is_array() || attempts.empty() || !attempts.back().is_object()) {
    OrderedJson only = started_attempt(manifest.value("started", OrderedJson()));
    only["ended"] = manifest.value("ended", OrderedJson());
    only["exit_code"] = manifest.value("exit_code", OrderedJson());
    attempts = OrderedJson::array({std::move(only)});
  }
  return attempts.back();
}

/// How many there were before the one that goes on.
int64_t attempts_before(const OrderedJson& manifest) {
  const auto attempts = manifest.find("attempts");
  return attempts == manifest.end() ? 0 : std::max<int64_t>(0, static_cast<int64_t>(attempts->size()) - 1);
}

template <typename Value>
std::optional<Value> value_if_any(const OrderedJson& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number_integer()) return std::nullopt;
  return found->get<Value>();
}

std::string text_if_any(const OrderedJson& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
}

Attempt to_attempt(const OrderedJson& json) {
  return {.started = text_if_any(json, "started"),
          .ended = text_if_any(json, "ended"),
          .exit_code = value_if_any<int>(json, "exit_code"),
          .cause = text_if_any(json, "cause"),
          .error = text_if_any(json, "error"),
          .rank = value_if_any<int64_t>(json, "rank"),
          .last_step = value_if_any<int64_t>(json, "last_step"),
          .resumed_from = value_if_any<int64_t>(json, "resumed_from"),
          .steps_lost = value_if_any<int64_t>(json, "steps_lost"),
          .command = text_if_any(json, "command"),
          .device = text_if_any(json, "device"),
          .mesh = text_if_any(json, "mesh"),
          .ranks = value_if_any<int64_t>(json, "ranks").value_or(0)};
}

template <typename Value>
OrderedJson or_null(const std::optional<Value>& value) {
  return value ? OrderedJson(*value) : OrderedJson();
}

/// "config.attempt-2.yaml" of "config.yaml".
std::string of_attempt(const fs::path& path, int64_t attempt) {
  const std::string name =
      fmt::format("{}.attempt-{}{}", path.stem().string(), attempt, path.extension().string());
  return (path.parent_path() / name).string();
}

/// When the run began, or last went on.
std::string last_start(const OrderedJson& manifest) {
  const auto attempts = manifest.find("attempts");
  std::string resumed;
  if (attempts != manifest.end() && attempts->is_array() && !attempts->empty() &&
      attempts->back().is_object())
    resumed = text_if_any(attempts->back(), "started");
  return std::max(text_if_any(manifest, "started"), resumed);
}

/// Names that make one folder name are not one: only manifests of old, which have none, are told apart by it.
bool is_called(const OrderedJson& manifest, const std::string& folder, const std::string& name) {
  if (const std::string noted = text_if_any(manifest, "name"); !noted.empty()) return noted == name;
  return name_part(folder) == folder_safe(name);
}

fs::path target_of(const fs::path& link) {
  return (link.parent_path() / fs::read_symlink(link)).lexically_normal();
}

bool lie_together(const fs::path& a, const fs::path& b) {
  return fs::weakly_canonical(a.parent_path()) == fs::weakly_canonical(b.parent_path());
}

/// Where the run at `path` lies: what `latest` stands for beside it, but a link to another disk itself.
std::string place_of(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the kernel
  fs::path place = fs::absolute(path);
  const bool goes_up = std::ranges::find(place, fs::path("..")) != place.end();
  place = goes_up ? fs::canonical(place) : place.lexically_normal();
  if (!place.has_filename()) place = place.parent_path();
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(place, error); ++i) {
    const fs::path target = target_of(place);
    if (!lie_together(place, target)) break;
    place = target;
  }
  return (fs::canonical(place.parent_path()) / place.filename()).string();
}

/// Syncs a folder: files made and renamed in it are on the disk when this returns, as far as the file system
/// can say so.
void sync_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder) ::fsync(folder.get());
}

struct Neighbour {
  std::string path;
  OrderedJson manifest;
};

/// The runs below `root`, in any order; `tells`: of those that cannot be read, which keep nobody from the
/// rest.
std::vector<Neighbour> read_neighbours(const std::string& root, bool tells) {
  std::vector<Neighbour> found;
  std::set<fs::path> seen;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root, ignored)) {
    try {
      // `latest`, or another name of a run that is here as well.
      if (entry.is_symlink(ignored) && lie_together(entry.path(), target_of(entry.path()))) continue;
      if (!fs::exists(entry.path() / "manifest.json") || !seen.insert(fs::canonical(entry.path())).second)
        continue;
      found.push_back({entry.path().string(), read_manifest(entry.path().string())});
    } catch (const std::exception& error) {
      if (tells) log_warning("skipped {}: {}", entry.path().string(), error.what());
    }
  }
  return found;
}

int64_t sequence_of(const OrderedJson& manifest) {
  return value_if_any<int64_t>(manifest, "sequence").value_or(0);  // 0: of an old version
}

int64_t next_sequence(const std::string& root) {
  int64_t last = 0;
  for (const Neighbour& run : read_neighbours(root, false)) last = std::max(last, sequence_of(run.manifest));
  return last + 1;
}

/// Removes what a process left that was killed while it replaced a file: "manifest.json.4711-0.tmp".
void sweep_unfinished(const std::string& run) {
  static const std::regex kUnfinished(R"(.+\.\d+-\d+\.tmp)");
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run, ignored)) {
    if (entry.is_regular_file(ignored) && std::regex_match(entry.path().filename().string(), kUnfinished))
      fs::remove(entry.path(), ignored);
  }
}

}  // namespace

/// The manifest as this process last read or wrote it, and the folder that it is in.
class RunDirectory::Known {
 public:
  explicit Known(const std::string& run)
      : run_(run), folder_(::open(run.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {}

  void check_there() const {
    struct stat opened {
    }, there{};
    if (!folder_ || ::fstat(folder_.get(), &opened) != 0) return;
    if (::stat(run_.c_str(), &there) == 0 && opened.st_dev == there.st_dev && opened.st_ino == there.st_ino)
      return;
    throw EnvironmentError(
        "[report.run_dir] {} was moved or removed while it was in use, so its records are not complete; "
        "leave "
        "a run directory where it is until the run has ended",
        run_);
  }

  OrderedJson read() {
    check_there();
    try {
      manifest_ = read_manifest(run_);
      lost_ = false;
    } catch (const Error&) {
      if (manifest_.is_null()) throw;
      if (!std::exchange(lost_, true))
        log_warning("{}/manifest.json has gone or is damaged; it is made again from memory", run_);
    }
    return manifest_;
  }

  void write(const OrderedJson& manifest) {
    check_there();
    manifest_ = manifest;
    write_manifest(run_, manifest_);
    lost_ = false;
  }

 private:
  std::string run_;
  Descriptor folder_;
  OrderedJson manifest_;
  bool lost_ = false;  ///< and that was said
};

RunDirectory::RunDirectory(std::string path)
    : path_(std::move(path)), known_(std::make_shared<Known>(path_)) {}

void RunDirectory::check_there() const {
  known_->check_there();
}

RunDirectory RunDirectory::create(const std::string& root, const std::string& name,
                                  const Manifest& manifest) {
  make_directories(root);
  const int64_t sequence = next_sequence(root);
  RunDirectory run(make_unique_folder(root, name));
  for (const char* folder : {"logs", "tensorboard", "checkpoints"}) make_directories(run.file(folder));
  write_file_atomic(run.file("config.yaml"), manifest.config_yaml);
  for (const auto& [name, text] : manifest.files) write_file_atomic(run.file(name), text);
  run.known_->write(started_manifest(name, manifest, sequence));
  sync_folder(run.path_);
  point_latest(root, fs::path(run.path_).filename().string());
  sync_folder(root);
  return run;
}

RunDirectory RunDirectory::move_to(const std::string& root) const {
  const std::string folder = fs::path(path_).filename().string();
  const RunDirectory moved(root + "/" + folder);
  if (::rename(path_.c_str(), moved.path_.c_str()) != 0) fail("move a run to", moved.path_, errno);
  sync_folder(root);
  point_latest(root, folder);
  return moved;
}

RunDirectory RunDirectory::open(const std::string& path) {
  std::error_code error;
  std::string place;
  try {
    place = place_of(path);  // follows `latest`, which may move while we read
    if (!fs::exists(place)) error = std::make_error_code(std::errc::no_such_file_or_directory);
  } catch (const fs::filesystem_error& failed) {
    error = failed.code();
  }
  if (error) {
    throw ConfigError(
        "[report.run_dir] no run was found at {}: {}; give a run directory made by 'trireme train'",
        fs::absolute(path).lexically_normal().string(), error.message());
  }
  RunDirectory run(place);
  run.known_->read();
  return run;
}

std::optional<int> RunDirectory::exit_code() const {
  const OrderedJson json = known_->read();
  const auto code = json.find("exit_code");
  if (code == json.end() || !code->is_number_integer()) return std::nullopt;
  return code->get<int>();
}

std::string as_typed(const std::string& path) {
  std::error_code error;
  const fs::path relative = fs::relative(path, error);
  const bool below = !error && !relative.empty() && *relative.begin() != "..";
  return below ? relative.string() : path;
}

namespace {

std::string ranks_option(int64_t ranks) {
  return ranks > 0 ? fmt::format(" -n {}", ranks) : "";
}

/// The first words of a command that trains as `run` was trained.
std::string trainer_of(const std::string& run) {
  std::error_code absent;
  const std::string path = run + "/manifest.json";
  if (!fs::is_regular_file(path, absent)) return "trireme train";
  const OrderedJson json = OrderedJson::parse(read_file(path), nullptr, false);
  const auto program = json.is_object() ? json.find("program") : json.end();
  if (program == json.end() || !program->is_string()) return "trireme train";
  const std::string typed = as_typed(program->get<std::string>());
  return typed.find('/') == std::string::npos ? "./" + typed : typed;
}

}  // namespace

std::string resume_command(const std::string& run, int64_t ranks) {
  return fmt::format("{} --resume {}{}", trainer_of(run), run, ranks_option(ranks));
}

std::string again_command(const std::string& run, int64_t ranks) {
  return fmt::format("{} {}/config.yaml{}", trainer_of(run), run, ranks_option(ranks));
}

std::vector<std::string> list_runs(const std::string& root, const std::string& name) {
  using Order = std::tuple<int64_t, std::string, std::string>;  // runs of old versions have their start alone
  std::vector<Order> found;
  for (const auto& [path, manifest] : read_neighbours(root, true)) {
    if (name.empty() || is_called(manifest, fs::path(path).filename().string(), name))
      found.emplace_back(sequence_of(manifest), last_start(manifest), path);
  }
  std::ranges::sort(found, std::greater<>());
  std::vector<std::string> paths;
  for (auto& [sequence, started, path] : found) paths.push_back(std::move(path));
  return paths;
}

bool RunDirectory::has_finished() const {
  const std::vector<Attempt> all = attempts();
  if (all.back().exit_code == 0) return true;
  const auto end =
      std::find_if(all.rbegin(), all.rend(), [](const Attempt& attempt) { return attempt.exit_code == 0; });
  return end != all.rend() && end->last_step == last_step();
}

void RunDirectory::begin_attempt(int64_t number, const Manifest& manifest) const {
  if (std::ssize(attempts()) >= number) return;
  set_summary_aside(number - 1);
  note_attempt(manifest);
}

void RunDirectory::set_summary_aside(int64_t attempt) const {
  const std::string summary = file("summary.json");
  if (fs::exists(summary) && ::rename(summary.c_str(), of_attempt(summary, attempt).c_str()) != 0)
    fail("rename", summary, errno);
}

void RunDirectory::note_attempt(const Manifest& manifest) const {
  OrderedJson json = known_->read();
  last_attempt(json);
  json["attempts"].push_back(started_attempt(utc_timestamp(), manifest));
  put_layout(json, manifest);
  const fs::path path = path_;
  json["sequence"] = next_sequence(path.parent_path().string());
  json["ended"] = nullptr;
  json["exit_code"] = nullptr;
  sweep_unfinished(path_);
  known_->write(json);
  if (fs::is_symlink(path.parent_path() / "latest"))
    point_latest(path.parent_path().string(), path.filename().string());
}

void RunDirectory::replace_config(const std::string& yaml,
                                  const std::map<std::string, std::string>& files) const {
  for (const auto& [name, text] : files) {
    const std::string copy = file(name), kept = fs::exists(copy) ? read_file(copy) : std::string();
    if (text == kept) continue;
    if (!kept.empty()) write_file_atomic(of_attempt(copy, attempts_before(known_->read())), kept);
    write_file_atomic(copy, text);
  }
  const std::string config = file("config.yaml");
  const std::string before = fs::exists(config) ? read_file(config) : yaml;
  if (same_values(before, yaml)) return;
  write_file_atomic(of_attempt(config, attempts_before(known_->read())), before);
  write_file_atomic(config, with_origins_of(before, yaml));
}

std::optional<LockFile> RunDirectory::hold() const {
  return LockFile::take(file(kLockFile));
}

std::optional<std::string> RunDirectory::holder() const {
  const auto launcher = LockFile::holder(file(kLockFile));
  return launcher ? launcher : writer();
}

std::optional<std::string> RunDirectory::writer() const {
  return LockFile::holder(file("checkpoints/LOCK"));
}

std::optional<std::string> RunDirectory::orphan() const {
  const std::string lock = file(kLockFile);
  if (LockFile::number_in(lock).empty() || LockFile::holder(lock)) return std::nullopt;
  return writer();
}

void RunDirectory::note_resumed(int64_t step) const {
  OrderedJson json = known_->read();
  OrderedJson& attempt = last_attempt(json);
  attempt["resumed_from"] = step;
  attempt["steps_lost"] = std::max<int64_t>(0, last_step().value_or(step) - step);
  known_->write(json);
}

std::vector<Attempt> RunDirectory::attempts() const {
  OrderedJson json = known_->read();
  last_attempt(json);
  std::vector<Attempt> all;
  for (const OrderedJson& attempt : json["attempts"]) all.push_back(to_attempt(attempt));
  return all;
}

std::optional<int64_t> RunDirectory::last_step() const {
  const std::string path = file("metrics.jsonl");
  if (!fs::exists(path)) return std::nullopt;
  const std::string text = read_file(path);
  // A process that was killed may have left a line that is not whole.
  for (size_t end = text.rfind('\n'); end != std::string::npos;) {
    const size_t begin = end == 0 ? std::string::npos : text.rfind('\n', end - 1);
    const size_t first = begin == std::string::npos ? 0 : begin + 1;
    if (const auto step = step_of_line(text.substr(first, end - first))) return step;
    end = begin;
  }
  return std::nullopt;
}

void RunDirectory::finish(const AttemptEnd& end) const {
  OrderedJson json = known_->read();
  OrderedJson& attempt = last_attempt(json);
  attempt["ended"] = json["ended"] = utc_timestamp();
  attempt["exit_code"] = json["exit_code"] = end.exit_code;
  if (!end.cause.empty()) attempt["cause"] = end.cause;
  if (!end.error.empty()) attempt["error"] = end.error;
  attempt["rank"] = or_null(end.rank);
  attempt["last_step"] = or_null(last_step());
  known_->write(json);
}

}  // namespace trireme::report
