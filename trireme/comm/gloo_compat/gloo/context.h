#pragma once
// Stand-in, declarations only; the class lives in libtorch_cpu.
#include <chrono>

namespace gloo {

namespace transport {
class UnboundBuffer;
}

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
