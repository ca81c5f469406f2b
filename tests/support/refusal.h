#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::test {

/// Expects a message to hold all of `words`.
inline void expect_mentions(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
}

/// The message of the error of type `Expected` that `call` throws; empty: it throws nothing.
template <typename Expected = Error, typename Call>
std::string failure_of(const Call& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  return {};
}

/// Expects `call` to throw one of our errors, whose text holds all of `words`.
template <typename Call>
void expect_refusal(const Call& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    expect_mentions(error.what(), words);
  }
}

}  // namespace trireme::test
