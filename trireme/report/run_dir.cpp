#include "trireme/report/run_dir.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "trireme/base/build_info.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/report/machine.h"

namespace trireme::report {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::string_view kSchema = "trireme.manifest/1";

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
  if (::symlink(folder.c_str(), temporary.c_str()) != 0) fail("create link", temporary, errno);
  if (::rename(temporary.c_str(), link.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  fail("replace link", link, error);
}

Json started_manifest(const Manifest& manifest) {
  const Machine machine = describe_machine();
  Json json;
  json["schema"] = kSchema;
  json["version"] = kVersion;
  json["torch"] = kTorchVersion;
  json["command"] = manifest.command;
  json["hostname"] = machine.hostname;
  json["cpu"] = machine.cpu;
  json["cores"] = machine.cores;
  json["memory_bytes"] = machine.memory_bytes;
  json["kernel"] = machine.kernel;
  json["device"] = manifest.device;
  json["ranks"] = manifest.ranks;
  json["mesh"] = manifest.mesh;
  json["started"] = utc_timestamp();
  json["ended"] = nullptr;
  json["exit_code"] = nullptr;
  return json;
}

void write_manifest(const std::string& run, const Json& json) {
  write_file_atomic(run + "/manifest.json", json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

/// Throws DataError unless `run` holds a manifest of ours.
Json read_manifest(const std::string& run) {
  const std::string path = run + "/manifest.json";
  if (!fs::exists(path)) {
    throw DataError(
        "[report.run_dir] {} is not a run directory: it has no manifest.json; name a folder below "
        "runs/ or 'latest'",
        run);
  }
  const Json json = Json::parse(read_file(path), nullptr, false);
  if (!json.is_object() || !json.contains("schema") || json["schema"] != kSchema) {
    throw DataError(
        "[report.run_dir] {} is damaged or of another version: no JSON object with schema '{}'; "
        "restore it, or choose another run",
        path, kSchema);
  }
  return json;
}

}  // namespace

RunDirectory RunDirectory::create(const std::string& root, const std::string& name,
                                  const Manifest& manifest) {
  make_directories(root);
  RunDirectory run(make_unique_folder(root, name));
  for (const char* folder : {"logs", "tensorboard", "checkpoints"}) make_directories(run.file(folder));
  write_file_atomic(run.file("config.yaml"), manifest.config_yaml);
  write_manifest(run.path_, started_manifest(manifest));
  point_latest(root, fs::path(run.path_).filename().string());
  return run;
}

RunDirectory RunDirectory::open(const std::string& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);  // follows `latest`, which may move while we read
  if (error) {
    throw DataError("[report.run_dir] there is no run at {}: {}; 'ls runs' shows what there is", path,
                    error.message());
  }
  read_manifest(real.string());
  return RunDirectory(real.string());
}

void RunDirectory::finish(int exit_code) const {
  Json json = read_manifest(path_);
  json["ended"] = utc_timestamp();
  json["exit_code"] = exit_code;
  write_manifest(path_, json);
}

}  // namespace trireme::report
