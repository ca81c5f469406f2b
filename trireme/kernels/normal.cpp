#include "trireme/kernels/normal.h"

#include <algorithm>

#include "trireme/kernels/parallel.h"

namespace trireme::kernels {
namespace {

template <typename Value, typename Draw>
void fill_runs(Value* out, int64_t count, const Counters& at, const Draw& draw) {
  for_rows(count, 1, [=](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t counter = at.of(begin), left = at.run - begin % at.run,
                    size = std::min(left, end - begin);
      for (int64_t i = 0; i < size; ++i) out[begin + i] = draw(counter + i);
      begin += size;
    }
  });
}

}  // namespace

void fill_normal(float* out, int64_t count, uint64_t key, const Counters& at, double deviation) {
  fill_runs(out, count, at, NormalDraw{key, deviation});
}

void fill_kept(bool* out, int64_t count, uint64_t key, const Counters& at, double p) {
  fill_runs(out, count, at, KeptDraw{key, p});
}

}  // namespace trireme::kernels
