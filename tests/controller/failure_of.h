#pragma once
// The message of a mistake.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme {

/// The message of what `body` throws; empty: nothing.
template <typename Body>
std::string failure_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

inline void expect_says(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_TRUE(message.find(part) != std::string::npos) << part << ": " << message;
}

}  // namespace trireme
