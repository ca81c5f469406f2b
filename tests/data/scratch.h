#pragma once
// A folder of its own for each test, and plain file helpers that do not use the code under test.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace trireme::testing {

/// A new folder below the system's temporary one, or another one, gone at the end of the scope.
class Scratch {
 public:
  explicit Scratch(const std::filesystem::path& below = std::filesystem::temp_directory_path()) {
    std::string name = (below / "trireme-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "no temporary folder " << name;
    root_ = std::filesystem::canonical(name);
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// Of something inside; of the folder itself when `name` is empty.
  std::string path(const std::string& name) const { return (name.empty() ? root_ : root_ / name).string(); }

  /// Writes a file, with the folders it needs; returns its path.
  std::string write(const std::string& name, std::string_view content) const {
    const std::filesystem::path file = root_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
    return file.string();
  }

 private:
  std::filesystem::path root_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Runs `action`, which must throw an Error of type E; returns its message.
template <typename E, typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace trireme::testing
