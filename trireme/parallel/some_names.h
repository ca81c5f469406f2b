#pragma once
// Names in an error, of which there may be thousands. Private to parallel/*.cpp.
#include <string>
#include <vector>

#include "trireme/base/text.h"

namespace trireme::parallel {

/// The first of the names, and dots where there are more.
inline std::string some_names(std::vector<std::string> names) {
  constexpr size_t kMost = 8;
  const bool all = names.size() <= kMost;
  if (!all) names.resize(kMost);
  return join(names, ", ") + (all ? "" : ", ...");
}

}  // namespace trireme::parallel
