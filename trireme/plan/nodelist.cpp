// Slurm's compact host lists. Only the first host is ever needed: it is where rank 0 runs.
#include <algorithm>
#include <cctype>

#include "trireme/base/error.h"
#include "trireme/plan/world.h"

namespace trireme::plan {
namespace {

bool is_digits(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

bool is_host_character(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '.' || c == '_';
}

[[noreturn]] void throw_malformed(const std::string& nodelist, std::string_view reason) {
  throw ConfigError(
      "[plan.world] host list '{}' is malformed: {}; it should look like node[01-03,07],gpu5 (or set "
      "MASTER_ADDR to the host of rank 0 yourself)",
      nodelist, reason);
}

/// "01-03,07" -> "01".
std::string first_index(const std::string& nodelist, std::string_view ranges) {
  const std::string_view range = ranges.substr(0, ranges.find(','));
  const size_t dash = range.find('-');
  const std::string_view first = range.substr(0, dash);
  if (!is_digits(first)) throw_malformed(nodelist, "a range does not start with a number");
  if (dash != std::string_view::npos && !is_digits(range.substr(dash + 1))) {
    throw_malformed(nodelist, "a range does not end with a number");
  }
  return std::string(first);
}

}  // namespace

std::string first_host_of_nodelist(const std::string& nodelist) {
  std::string host;
  for (size_t at = 0; at < nodelist.size() && nodelist[at] != ','; ++at) {
    if (nodelist[at] == '[') {
      const size_t close = nodelist.find(']', at);
      if (close == std::string::npos) throw_malformed(nodelist, "'[' without ']'");
      host += first_index(nodelist, std::string_view(nodelist).substr(at + 1, close - at - 1));
      at = close;
    } else if (is_host_character(nodelist[at])) {
      host += nodelist[at];
    } else {
      throw_malformed(nodelist, fmt::format("'{}' cannot be part of a host name", nodelist[at]));
    }
  }
  if (host.empty()) throw_malformed(nodelist, "it has no host");
  return host;
}

}  // namespace trireme::plan
