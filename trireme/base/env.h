#pragma once
// The environment as a value: the one place that reads environment variables, and a fake one for tests.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace trireme {

class Environment {
 public:
  Environment() = default;
  explicit Environment(std::map<std::string, std::string> variables) : variables_(std::move(variables)) {}

  /// A snapshot of this process's variables.
  static Environment process();

  /// The value, or nothing when unset. A variable set to the empty string counts as unset.
  std::optional<std::string> get(std::string_view name) const;

  /// The value as a whole number. Throws ConfigError naming the variable and its value when it is not one.
  std::optional<int64_t> get_int(std::string_view name) const;

  void set(std::string name, std::string value) { variables_[std::move(name)] = std::move(value); }
  void unset(const std::string& name) { variables_.erase(name); }
  const std::map<std::string, std::string>& variables() const { return variables_; }

 private:
  std::map<std::string, std::string> variables_;
};

/// Sets an environment variable of this process unless it is set already, for a library that can be
/// configured in no other way. No other thread may read the environment meanwhile: call it before the
/// library's first use.
void set_process_default(const std::string& name, const std::string& value);

/// The variables of this process are these from now on, also for libraries that have not read them yet. No
/// other thread may run.
void set_process_environment(const Environment& environment);

/// `${XDG_CACHE_HOME:-~/.cache}/trireme`, where tokenised data lives. Throws EnvironmentError without a home.
std::string cache_dir(const Environment& environment);

}  // namespace trireme
