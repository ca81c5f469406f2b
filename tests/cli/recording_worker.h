#pragma once
// A script in the worker's place that leaves behind what it was given.
#include <string>

namespace trireme::cli {

/// A worker that leaves its request and its environment behind and ends with code `code`.
inline std::string recorder(int code) {
  return "printf %s \"$TRIREME_REQUEST\" > request-${RANK:-none}\n"
         "env > env-${RANK:-none}\n"
         "echo verb $1\n"
         "exit " +
         std::to_string(code);
}

}  // namespace trireme::cli
