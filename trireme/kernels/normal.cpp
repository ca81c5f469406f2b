#include "trireme/kernels/normal.h"

#include "trireme/kernels/parallel.h"

namespace trireme::kernels {

void fill_normal(float* out, int64_t count, uint64_t key, int64_t first, double deviation) {
  for_rows(count, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t bits = mix64(key, static_cast<uint64_t>(first + i));
      out[i] = static_cast<float>(deviation * standard_normal(bits));
    }
  });
}

}  // namespace trireme::kernels
