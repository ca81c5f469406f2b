#include "trireme/comm/cause.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace trireme::comm {

std::string cause_of(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  std::string text = from_torch != nullptr ? from_torch->what_without_backtrace() : error.what();
  text.resize(std::min(text.size(), text.find('\n')));
  // Gloo opens with the place in its sources.
  const size_t place_end = text.starts_with("[/") ? text.find("] ") : std::string::npos;
  return place_end == std::string::npos ? text : text.substr(place_end + 2);
}

bool is_timeout(const std::string& cause) {
  return cause.find("imed out") != std::string::npos || cause.find("imeout") != std::string::npos;
}

}  // namespace trireme::comm
