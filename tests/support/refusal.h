#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::test {

/// Expects `call` to throw one of our errors, whose text holds all of `words`.
template <typename Call>
void expect_refusal(const Call& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    for (const auto& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word << " in " << error.what();
  }
}

}  // namespace trireme::test
