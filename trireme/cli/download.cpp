#include "trireme/cli/download.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/words.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

constexpr double kMostSeconds = 86400.0;
// curl's exit codes (man curl).
constexpr int kNoRanges = 33, kHttpError = 22;

std::string find_program(const std::string& name, const std::string& package,
                         const Environment& environment) {
  for (const std::string& folder : split(environment.get("PATH").value_or("/usr/bin:/bin"), ':')) {
    const std::string path = folder + "/" + name;
    if (!folder.empty() && ::access(path.c_str(), X_OK) == 0) return path;
  }
  throw EnvironmentError("[cli.data] the program '{}' is not on PATH; apt install {}", name, package);
}

/// -1: there is none.
int64_t size_of(const std::string& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  return error ? -1 : static_cast<int64_t>(size);
}

/// SHA-256 in hex digits, by GNU coreutils. With --zero it leaves strange file names as they are.
std::string sum_of(const std::string& path, const Environment& environment) {
  const ChildOutput output = run_child(find_program("sha256sum", "coreutils", environment),
                                       {"--zero", "--", path}, environment, kMostSeconds);
  if (output.exit_code != 0) {
    throw EnvironmentError("[cli.data] the checksum of {} cannot be computed ({})", path,
                           last_line(output.err, "sha256sum printed nothing"));
  }
  return output.out.substr(0, output.out.find(' '));
}

bool is_right(const Remote& remote, const std::string& path, const Environment& environment) {
  return size_of(path) == remote.bytes && sum_of(path, environment) == remote.sha256;
}

ChildOutput run_curl(const std::string& curl, const Remote& remote, const std::string& part,
                     const Environment& environment) {
  // A server that has not sent a kilobyte in a minute will not send the rest.
  return run_child(curl,
                   {"--fail", "--location", "--silent", "--show-error", "--retry", "3", "--connect-timeout",
                    "20", "--speed-limit", "1024", "--speed-time", "60", "--max-filesize",
                    std::to_string(remote.bytes), "--continue-at", "-", "--output", part, remote.url},
                   environment, kMostSeconds);
}

}  // namespace

void download(const Remote& remote, const std::string& path, const Environment& environment) {
  if (is_right(remote, path, environment)) return;
  make_directories(fs::absolute(path).parent_path().string());
  const std::string curl = find_program("curl", "curl", environment);
  const std::string part = path + ".part";
  if (size_of(part) > remote.bytes) fs::remove(part);
  if (size_of(part) < remote.bytes) {
    ChildOutput output = run_curl(curl, remote, part, environment);
    const bool begun = size_of(part) > 0;
    if ((output.exit_code == kNoRanges || output.exit_code == kHttpError) && begun) {
      fs::remove(part);
      output = run_curl(curl, remote, part, environment);
    }
    if (output.exit_code != 0) {
      throw EnvironmentError(
          "[cli.data] {} could not be downloaded ({}); try again, which continues where this stopped, or put "
          "the file at {} yourself ({} bytes, SHA-256 {})",
          remote.url, last_line(output.err, "curl printed nothing"), path, remote.bytes, remote.sha256);
    }
  }
  if (!is_right(remote, part, environment)) {
    const std::string found =
        fmt::format("{} bytes with SHA-256 {}", size_of(part), sum_of(part, environment));
    fs::remove(part);
    throw DataError("[cli.data] {} is not the expected file: got {} instead of {} bytes with SHA-256 {}",
                    remote.url, found, remote.bytes, remote.sha256);
  }
  fs::rename(part, path);
}

void unpack(const std::string& archive, const std::string& folder, const std::string& parent,
            const Environment& environment) {
  const fs::path target = fs::path(parent) / folder;
  std::string name = (fs::path(parent) / ".unpacking-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr)
    throw EnvironmentError("[cli.data] cannot create a folder in {}: {}", parent, errno_text(errno));
  const ChildOutput output =
      run_child(find_program("tar", "tar", environment), {"-xzf", archive, "-C", name, "--no-same-owner"},
                environment, kMostSeconds);
  std::error_code error;
  if (output.exit_code == 0) fs::rename(fs::path(name) / folder, target, error);
  const std::string why =
      output.exit_code != 0 ? last_line(output.err, "tar printed nothing") : error.message();
  const bool failed = output.exit_code != 0 || error;
  fs::remove_all(name, error);
  if (failed)
    throw EnvironmentError("[cli.data] {} cannot be unpacked to {}: {}", archive, target.string(), why);
}

}  // namespace trireme::cli
