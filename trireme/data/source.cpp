#include "trireme/data/source.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/data/json_lines.h"

namespace trireme::data {
namespace {

using Folder = std::unique_ptr<DIR, decltype([](DIR* folder) { ::closedir(folder); })>;

/// Whether `error` says that a path is not what it should be, rather than that a disk has failed.
bool is_about_the_path(int error) {
  constexpr int kErrors[] = {ENOENT, EACCES, EPERM, ENOTDIR, ELOOP, ENAMETOOLONG};
  return std::ranges::find(kErrors, error) != std::end(kErrors);
}

[[noreturn]] void unreadable(const std::string& path, int error) {
  if (!is_about_the_path(error)) {
    throw DataError("[data.source] cannot read {}: {}; check its disk or network file system", path,
                    errno_text(error));
  }
  throw ConfigError(
      "[data.source] cannot read {}: {}; set data.path to a text file or folder that this user may read, "
      "or to 'builtin'",
      path, errno_text(error));
}

std::string canonical(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> resolved(::realpath(path.c_str(), nullptr), &std::free);
  if (!resolved) unreadable("'" + path + "'", errno);
  return resolved.get();
}

int64_t mtime_ns(const struct stat& info) {
  return static_cast<int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec;
}

/// Walks the folders of one root; entries are looked up relative to their open folder, which halves the cost.
class Walk {
 public:
  Walk(Source& source, const OnProgress& on_progress) : source_(source), meter_(on_progress) {}

  void run() {
    pending_.push_back("");
    while (!pending_.empty()) {
      const std::string prefix = std::move(pending_.back());
      pending_.pop_back();
      list(prefix);
      meter_.beat();
    }
  }

  int64_t links() const { return links_; }

 private:
  void list(const std::string& prefix) {
    const std::string path = source_.root + "/" + prefix;
    const Folder folder(::opendir(path.c_str()));
    if (!folder) unreadable(path, errno);
    for (errno = 0; const dirent* entry = ::readdir(folder.get()); errno = 0) {
      if (entry->d_name[0] != '.') add(::dirfd(folder.get()), prefix, entry->d_name);
    }
    if (errno != 0) unreadable(path, errno);
  }

  void add(int folder, const std::string& prefix, const char* name) {
    struct stat info {};
    if (::fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) return;  // removed since it was listed
      unreadable(source_.root + "/" + prefix + name, errno);
    }
    if (S_ISDIR(info.st_mode)) pending_.push_back(prefix + name + "/");
    if (S_ISREG(info.st_mode) && info.st_size > 0) {
      source_.files.push_back({prefix + name, info.st_size, mtime_ns(info)});
    }
    if (S_ISLNK(info.st_mode)) ++links_;
  }

  Source& source_;
  ProgressMeter meter_;
  std::vector<std::string> pending_;
  int64_t links_ = 0;
};

void list_folder(Source& source, const OnProgress& on_progress) {
  source.root = source.path;
  Walk walk(source, on_progress);
  walk.run();
  if (source.files.empty()) {
    throw ConfigError(
        "[data.source] folder {} has no text (hidden and empty files do not count; {} symbolic links were "
        "not followed); set data.path to a text file or a folder of them",
        source.path, walk.links());
  }
  std::ranges::sort(source.files, {}, &SourceFile::name);
}

void list_file(Source& source, const struct stat& info) {
  if (info.st_size == 0)
    throw ConfigError("[data.source] {} is empty (0 bytes); set data.path to a text", source.path);
  const size_t slash = source.path.rfind('/');
  source.root = source.path.substr(0, slash);
  source.files.push_back({source.path.substr(slash + 1), info.st_size, mtime_ns(info)});
}

constexpr std::string_view kParquet = ".parquet";

/// Ends of names of packed files, and what unpacks them.
constexpr struct {
  std::string_view end, command;
} kPackings[] = {{".gz", "gzip -d"},  {".zst", "zstd -d"}, {".xz", "xz -d"}, {".bz2", "bzip2 -d"},
                 {".lz4", "lz4 -d"},  {".zip", "unzip"},   {".7z", "7z x"},  {".tar", "tar -xf"},
                 {".tgz", "tar -xf"}, {".lzma", "xz -d"},  {".Z", "gzip -d"}};

/// The command that unpacks a file that is not read as it is; empty: it is read.
std::string_view unpacker_of(std::string_view name) {
  if (is_json_lines(name)) return {};
  const auto ends_name = [name](const auto& packing) { return name.ends_with(packing.end); };
  const auto* const found = std::ranges::find_if(kPackings, ends_name);
  return found == std::end(kPackings) ? std::string_view() : found->command;
}

/// Its bytes would be taken for text.
void refuse_packed(const Source& source) {
  const auto found = std::ranges::find_if(
      source.files, [](const SourceFile& file) { return !unpacker_of(file.name).empty(); });
  if (found == source.files.end()) return;
  const std::string path = source.path_of(*found);
  throw ConfigError(
      "[data.source] {} is packed, and only JSON Lines are read so (*.jsonl.gz, *.jsonl.zst); unpack it with "
      "{} '{}'{}",
      path, unpacker_of(path), path,
      path.find(".json.") != std::string::npos
          ? ", or, if each line of it is a JSON object, give it a name with .jsonl in place of .json"
          : "");
}

/// Parquet is a format of columns that takes a library of its own to read.
void refuse_parquet(const Source& source) {
  const auto is_parquet = [](const SourceFile& file) { return file.name.ends_with(kParquet); };
  const auto found = std::ranges::find_if(source.files, is_parquet);
  if (found == source.files.end()) return;
  const std::string path = source.path_of(*found);
  throw ConfigError(
      "[data.source] {} is Parquet, which is not read; write it as JSON Lines, for example with Python's "
      "pandas: pandas.read_parquet('{}').to_json('{}.jsonl', orient='records', lines=True)",
      path, path, path.substr(0, path.size() - kParquet.size()));
}

void check_field(const Source& source) {
  const auto has_fields = [](const SourceFile& file) { return is_json_lines(file.name); };
  if (source.field.empty() || std::ranges::any_of(source.files, has_fields)) return;
  throw ConfigError(
      "[data.source] '#{}' names a field of JSON Lines, but {} holds none (*.jsonl, *.jsonl.gz, "
      "*.jsonl.zst); set data.path to such a file, or leave the field out",
      source.field, source.path);
}

}  // namespace

TextPath parse_text_path(const std::string& text) {
  const size_t mark = text.rfind('#');
  std::error_code ignored;
  if (mark == std::string::npos || std::filesystem::exists(text, ignored)) return {text, ""};
  return {text.substr(0, mark), text.substr(mark + 1)};
}

MappedFile map_source_file(const std::string& path) {
  try {
    return MappedFile(path);
  } catch (const EnvironmentError& error) {
    throw DataError("[data.corpus] {}; make the file readable, or remove it from the folder", error.what());
  }
}

Source list_source(const std::string& path, const OnProgress& on_progress) {
  const TextPath asked = parse_text_path(path);
  Source source{.root = {}, .path = canonical(asked.path), .field = asked.field, .files = {}};
  struct stat info {};
  if (::stat(source.path.c_str(), &info) != 0) unreadable(source.path, errno);
  if (S_ISDIR(info.st_mode)) {
    list_folder(source, on_progress);
  } else if (S_ISREG(info.st_mode)) {
    list_file(source, info);
  } else {
    throw ConfigError(
        "[data.source] {} is neither a file nor a folder; set data.path to a text file or a folder of them",
        source.path);
  }
  refuse_parquet(source);
  refuse_packed(source);
  check_field(source);
  for (const SourceFile& file : source.files) source.bytes += file.bytes;
  return source;
}

}  // namespace trireme::data
