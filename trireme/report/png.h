#pragma once
// PNG files of pixels as they are: for pictures inside pages, in builds with and without libpng.
#include <string>

#include "trireme/base/classification.h"

namespace trireme::report {

/// Without compression, so a little larger than the pixels. Throws LogicError when the picture has other than
/// 1 or 3 channels, no pixels, or not as many as its sides say.
std::string to_png(const Picture& picture);

/// A picture of at most `most` pixels each way: the mean over squares of pixels, where it is larger.
Picture shrunk(const Picture& picture, int64_t most);

}  // namespace trireme::report
