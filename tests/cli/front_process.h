#pragma once
// The real front command as a child process, in an environment that holds nothing but what a test puts there.
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/report/temporary_folder.h"

namespace trireme::cli {

/// Of a command line.
using Words = std::vector<std::string>;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

struct Outcome {
  int code = -1;  ///< 128+N for signal N
  std::string out;
  std::string err;
  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

/// A folder to run in, with a copy of the front command: what lies beside it is the test's choice.
class FrontProcess {
 public:
  FrontProcess();

  Outcome run(const Words& args) const;

  /// A command that is under way; killed at the end of the scope if it still is.
  class Running {
   public:
    Running(const FrontProcess& front, pid_t pid) : front_(front), pid_(pid) {}
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running();
    void signal(int number) const;
    /// Once it has ended. Throws std::runtime_error when that takes more than `seconds`.
    Outcome wait(double seconds);

   private:
    const FrontProcess& front_;
    pid_t pid_;
    bool over_ = false;
  };
  /// One at a time.
  Running start(const Words& args) const;
  /// What the last command has printed until now.
  std::string said() const;

  /// The worker of this build stands beside the front command.
  void use_real_worker(const std::string& path);
  /// Another program is run instead of the front command; empty: the front command again.
  void run_instead(std::string path) { instead_ = std::move(path); }
  /// Most virtual memory of the command and of what it starts.
  void limit_memory(int64_t bytes) { memory_limit_ = bytes; }

  /// A shell script that stands for trireme-worker; without one the front finds none.
  void set_worker(const std::string& script);
  void set(const std::string& name, const std::string& value) { environment_[name] = value; }

  std::string file(const std::string& name) const { return folder_.file(name); }
  /// That of the newest run.
  nlohmann::json manifest() const;

 private:
  TemporaryFolder folder_;
  std::map<std::string, std::string> environment_;
  std::string instead_;
  int64_t memory_limit_ = 0;  ///< 0: none
};

bool contains(const std::string& text, const std::string& part);

}  // namespace trireme::cli
