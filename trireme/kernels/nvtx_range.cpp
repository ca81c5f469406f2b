#include <nvtx3/nvToolsExt.h>

#include "trireme/kernels/range.h"

namespace trireme::kernels {

void push_range(const char* name) {
  nvtxRangePushA(name);
}

void pop_range() {
  nvtxRangePop();
}

}  // namespace trireme::kernels
