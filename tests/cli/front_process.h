#pragma once
// The real front command as a child process, in an environment that holds nothing but what a test puts there.
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/report/temporary_folder.h"

namespace trireme::cli {

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

  Outcome run(const std::vector<std::string>& args) const;

  /// A shell script that stands for trireme-worker; without one the front finds none.
  void set_worker(const std::string& script);
  void set(const std::string& name, const std::string& value) { environment_[name] = value; }

  std::string file(const std::string& name) const { return folder_.file(name); }

 private:
  TemporaryFolder folder_;
  std::map<std::string, std::string> environment_;
};

bool contains(const std::string& text, const std::string& part);

}  // namespace trireme::cli
