#pragma once
// Stand-in, declarations only; the class lives in libtorch_cpu.

namespace gloo::transport {
class Device;
}
