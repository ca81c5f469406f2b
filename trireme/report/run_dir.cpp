#include "trireme/report/run_dir.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "trireme/base/build_info.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/report/config_entries.h"
#include "trireme/report/machine.h"

namespace trireme::report {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kSchema = "trireme.manifest/1";
constexpr const char* kLockFile = "LOCK";

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
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string path = fmt::format("{}/{}-{}-{}", root, folder_safe(name), utc_compact(), random_id());
    if (::mkdir(path.c_str(), 0755) == 0) return path;
    if (errno != EEXIST) fail("create folder", path, errno);
  }
  throw EnvironmentError("[report.run_dir] found no free folder name in {} in {} attempts; clean it up", root,
                         kAttempts);
}

/// Points <root>/latest at `folder`: a link under another name is renamed over the old one, so that there is
/// always one to follow.
void point_latest(const std::string& root, const std::string& folder) {
  const std::string link = root + "/latest";
  const std::string temporary = root + "/.latest-" + folder;
  ::unlink(temporary.c_str());  // of a process that died here
  if (::symlink(folder.c_str(), temporary.c_str()) != 0) fail("create link", temporary, errno);
  if (::rename(temporary.c_str(), link.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  fail("replace link", link, error);
}

OrderedJson started_attempt(const OrderedJson& started) {
  return {{"started", started}, {"ended", nullptr},     {"exit_code", nullptr},    {"cause", nullptr},
          {"rank", nullptr},    {"last_step", nullptr}, {"resumed_from", nullptr}, {"steps_lost", nullptr}};
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

OrderedJson started_manifest(const std::string& name, const Manifest& manifest) {
  const Machine machine = describe_machine();
  OrderedJson json;
  json["schema"] = kSchema;
  json["version"] = kVersion;
  json["torch"] = kTorchVersion;
  json["name"] = name;
  json["command"] = manifest.command;
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

}  // namespace

RunDirectory RunDirectory::create(const std::string& root, const std::string& name,
                                  const Manifest& manifest) {
  make_directories(root);
  RunDirectory run(make_unique_folder(root, name));
  for (const char* folder : {"logs", "tensorboard", "checkpoints"}) make_directories(run.file(folder));
  write_file_atomic(run.file("config.yaml"), manifest.config_yaml);
  if (!manifest.schedule.empty()) write_file_atomic(run.file(kScheduleFile), manifest.schedule);
  write_manifest(run.path_, started_manifest(name, manifest));
  point_latest(root, fs::path(run.path_).filename().string());
  return run;
}

RunDirectory RunDirectory::open(const std::string& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);  // follows `latest`, which may move while we read
  if (error) {
    throw ConfigError(
        "[report.run_dir] no run was found at {}: {}; give a run directory made by 'trireme train'",
        fs::absolute(path).lexically_normal().string(), error.message());
  }
  read_manifest(real.string());
  return RunDirectory(real.string());
}

std::optional<int> RunDirectory::exit_code() const {
  const OrderedJson json = read_manifest(path_);
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

}  // namespace

std::string resume_command(const std::string& run, int64_t ranks) {
  return fmt::format("trireme train --resume {}{}", run, ranks_option(ranks));
}

std::string again_command(const std::string& run, int64_t ranks) {
  return fmt::format("trireme train {}/config.yaml{}", run, ranks_option(ranks));
}

std::vector<std::string> list_runs(const std::string& root, const std::string& name) {
  std::vector<std::pair<std::string, std::string>> found;  // when it started, where it is
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root, ignored)) {
    const std::string manifest = (entry.path() / "manifest.json").string();
    if (entry.is_symlink(ignored) || !fs::exists(manifest, ignored)) continue;
    const OrderedJson json = OrderedJson::parse(read_file(manifest), nullptr, false);
    if (!json.is_object() || !(name.empty() || is_called(json, entry.path().filename().string(), name)))
      continue;
    found.emplace_back(last_start(json), entry.path().string());
  }
  std::ranges::sort(found, std::greater<>());
  std::vector<std::string> paths;
  for (auto& [started, path] : found) paths.push_back(std::move(path));
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
  OrderedJson json = read_manifest(path_);
  last_attempt(json);
  json["attempts"].push_back(started_attempt(utc_timestamp(), manifest));
  put_layout(json, manifest);
  json["ended"] = nullptr;
  json["exit_code"] = nullptr;
  write_manifest(path_, json);
  const fs::path path = path_;
  if (fs::is_symlink(path.parent_path() / "latest"))
    point_latest(path.parent_path().string(), path.filename().string());
}

void RunDirectory::replace_config(const std::string& yaml, const std::string& schedule) const {
  const std::string config = file("config.yaml"), schedule_file = file(kScheduleFile);
  const std::string scheduled = fs::exists(schedule_file) ? read_file(schedule_file) : std::string();
  if (!schedule.empty() && schedule != scheduled) {
    if (!scheduled.empty())
      write_file_atomic(of_attempt(schedule_file, attempts_before(read_manifest(path_))), scheduled);
    write_file_atomic(schedule_file, schedule);
  }
  const std::string before = fs::exists(config) ? read_file(config) : yaml;
  if (same_values(before, yaml)) return;
  write_file_atomic(of_attempt(config, attempts_before(read_manifest(path_))), before);
  write_file_atomic(config, with_origins_of(before, yaml));
}

std::optional<RunLock> RunDirectory::hold() const {
  return RunLock::take(file(kLockFile));
}

std::optional<std::string> RunDirectory::holder() const {
  const auto launcher = RunLock::holder(file(kLockFile));
  return launcher ? launcher : writer();
}

std::optional<std::string> RunDirectory::writer() const {
  return RunLock::holder(file("checkpoints/LOCK"));
}

void RunDirectory::note_resumed(int64_t step) const {
  OrderedJson json = read_manifest(path_);
  OrderedJson& attempt = last_attempt(json);
  attempt["resumed_from"] = step;
  attempt["steps_lost"] = std::max<int64_t>(0, last_step().value_or(step) - step);
  write_manifest(path_, json);
}

std::vector<Attempt> RunDirectory::attempts() const {
  OrderedJson json = read_manifest(path_);
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
    const OrderedJson line = OrderedJson::parse(text.substr(first, end - first), nullptr, false);
    if (line.is_object()) {
      if (const auto step = value_if_any<int64_t>(line, "step")) return step;
    }
    end = begin;
  }
  return std::nullopt;
}

void RunDirectory::finish(const AttemptEnd& end) const {
  OrderedJson json = read_manifest(path_);
  OrderedJson& attempt = last_attempt(json);
  attempt["ended"] = json["ended"] = utc_timestamp();
  attempt["exit_code"] = json["exit_code"] = end.exit_code;
  if (!end.cause.empty()) attempt["cause"] = end.cause;
  attempt["rank"] = or_null(end.rank);
  attempt["last_step"] = or_null(last_step());
  write_manifest(path_, json);
}

}  // namespace trireme::report
