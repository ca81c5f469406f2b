#include "trireme/base/env.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>

#include "trireme/base/error.h"

namespace trireme {

Environment Environment::process() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos) {
      variables.emplace(text.substr(0, equals), text.substr(equals + 1));
    }
  }
  return Environment(std::move(variables));
}

std::optional<std::string> Environment::get(std::string_view name) const {
  const auto found = variables_.find(std::string(name));
  if (found == variables_.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

std::optional<int64_t> Environment::get_int(std::string_view name) const {
  const auto text = get(name);
  if (!text) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size()) {
    throw ConfigError("[base.env] {}='{}' is not a whole number; unset it or give it a number", name, *text);
  }
  return value;
}

void set_process_default(const std::string& name, const std::string& value) {
  if (::getenv(name.c_str()) == nullptr) ::setenv(name.c_str(), value.c_str(), 0);
}

void set_process_environment(const Environment& environment) {
  ::clearenv();
  for (const auto& [name, value] : environment.variables()) ::setenv(name.c_str(), value.c_str(), 1);
}

std::string cache_dir(const Environment& environment) {
  if (const auto cache = environment.get("XDG_CACHE_HOME")) return *cache + "/trireme";
  if (const auto home = environment.get("HOME")) return *home + "/.cache/trireme";
  throw EnvironmentError(
      "[base.env] neither XDG_CACHE_HOME nor HOME is set; set one of them to a writable folder");
}

}  // namespace trireme
