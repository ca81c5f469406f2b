#pragma once
// The images that data.path=builtin stands for: digits drawn once, and kept in the cache.
#include <cstdint>
#include <string>

#include "trireme/data/images/digits.h"
#include "trireme/data/progress.h"

namespace trireme::data {

struct BuiltinDigits {
  DigitFormat format = DigitFormat::kCifar10;
  std::string cache_dir = {};
  int64_t train = 50000, test = 10000;
  int64_t threads = 1;
  OnProgress on_progress = {};  ///< counts images
};

/// The folder of digits drawn from this system's fonts, drawn if it is not there. Safe against two processes
/// doing so at once: one waits as long as the other shows signs of life. What was given up leaves nothing.
/// Throws EnvironmentError when there are no fonts, and as make_digits().
std::string prepare_builtin_digits(const BuiltinDigits& wanted);

}  // namespace trireme::data
