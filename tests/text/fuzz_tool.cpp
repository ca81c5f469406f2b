#include "tests/text/fuzz_tool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iterator>

#include "trireme/base/error.h"

namespace trireme::text::testing {
namespace {

constexpr double kMostSeconds = 10;

/// Time that the thread has run, so that a machine that is busy or stopped counts for nothing.
double seconds_of_thread() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void change_number_of(std::string& text, FuzzDraws& draws) {
  static const std::vector<std::string> numbers = {
      "0",    "1",          "-1",         "7",      "255",  "256", "2147483647", "2147483648",
      "1e99", "4294967295", "4294967296", "999999", "-0.0", "0.5", "00",         "18446744073709551616"};
  const size_t from = text.find_first_of("0123456789", draws.below(text.size()));
  if (from == std::string::npos) return;
  const size_t to = std::min(text.find_first_not_of("0123456789", from), text.size());
  text.replace(from, to - from, draws.one_of(numbers));
}

void change_once(std::string& text, const std::vector<std::string>& words,
                 const std::vector<std::string>& others, FuzzDraws& draws) {
  const size_t at = draws.below(text.size());
  const size_t count = std::min<size_t>(1 + draws.below(8), text.size() - at);
  constexpr std::string_view kBytes = "\"{}[]:,0-9.e\\u\xff\x80 ntf()|?*+%";
  switch (draws.below(12)) {
    case 0:
      text.erase(at, count);
      break;
    case 1:
      text.insert(at, text.substr(at, count));
      break;
    case 2:
      if (draws.below(20) == 0) text.resize(at);
      break;
    case 3:
      change_number_of(text, draws);
      break;
    case 4:
      if (!words.empty()) text.insert(at, draws.one_of(words));
      break;
    case 5: {
      const std::string& other = draws.one_of(others);
      if (draws.below(10) == 0) text = text.substr(0, at) + other.substr(draws.below(other.size()));
      break;
    }
    default:
      text[at] =
          draws.below(2) == 0 ? static_cast<char>(draws.below(256)) : kBytes[draws.below(kBytes.size())];
  }
}

}  // namespace

std::string damaged(std::string text, const std::vector<std::string>& words,
                    const std::vector<std::string>& others, FuzzDraws& draws) {
  for (uint64_t changes = 1 + draws.below(4); changes > 0 && !text.empty(); --changes)
    change_once(text, words, others, draws);
  return text;
}

bool fuzz_once(uint64_t execution, const std::function<void()>& body) {
  const double begin = seconds_of_thread();
  try {
    body();
  } catch (const Error& error) {
    EXPECT_TRUE(std::string_view(error.what()).starts_with("[text.")) << error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
  }
  EXPECT_LT(seconds_of_thread() - begin, kMostSeconds);
  if (!::testing::Test::HasFailure()) return true;
  ADD_FAILURE() << "in execution " << execution;
  return false;
}

std::string fuzz_seed(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::vector<std::string>& fuzz_samples() {
  static const std::vector<std::string> texts = {"Hello, wor\xcc\x81ld 12 \xe4\xb8\xad\xe6\x96\x87 <s>\xff",
                                                 "it's  a\n\n\tb"};
  return texts;
}

}  // namespace trireme::text::testing
