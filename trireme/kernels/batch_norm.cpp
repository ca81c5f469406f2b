#include "trireme/kernels/batch_norm.h"

#include <c10/util/BFloat16.h>

#include <cmath>
#include <vector>

#include "trireme/kernels/channel_sums.h"
#include "trireme/kernels/parallel.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

/// Sums over rows of two terms by channel: (2, channels) fp32. `terms(row, c)` gives them.
template <typename Terms>
std::vector<float> sums_by_channel(int64_t rows, int64_t channels, const Terms& terms) {
  const auto width = static_cast<size_t>(2 * channels);
  std::vector<float> partial(static_cast<size_t>(kCuts) * width, 0.0f);
  for_cuts(rows, [&](int64_t cut, int64_t first, int64_t last) {
    float* const ones = partial.data() + static_cast<size_t>(cut) * width;
    sum_channels(ones, ones + channels, first, last, channels, terms);
  });
  std::vector<float> sums(width, 0.0f);
  for (size_t i = 0; i < width; ++i) {
    double sum = 0.0;
    for (size_t cut = 0; cut < static_cast<size_t>(kCuts); ++cut) sum += partial[cut * width + i];
    sums[i] = static_cast<float>(sum);
  }
  return sums;
}

}  // namespace

template <typename Scalar>
void batch_norm_forward(const BatchNormForward<Scalar>& call) {
  const int64_t channels = call.channels;
  const Scalar* const x = call.x;
  // Deviations from the first row, which is near the mean, so that little cancels.
  const std::vector<float> sums = sums_by_channel(call.rows, channels, [&](int64_t row, int64_t c) {
    const float value = static_cast<float>(x[row * channels + c]) - static_cast<float>(x[c]);
    return ChannelTerms{value, value * value};
  });
  const auto rows = static_cast<double>(call.rows);
  std::vector<float> scales(static_cast<size_t>(channels)), shifts(static_cast<size_t>(channels));
  for (int64_t c = 0; c < channels; ++c) {
    const double shifted = sums[static_cast<size_t>(c)] / rows;
    const double mean = static_cast<double>(static_cast<float>(x[c])) + shifted;
    const double variance = positive_part(sums[static_cast<size_t>(channels + c)] / rows - shifted * shifted);
    const double rstd = 1.0 / std::sqrt(variance + static_cast<double>(call.eps));
    call.statistics[c] = static_cast<float>(mean);
    call.statistics[channels + c] = static_cast<float>(rstd);
    const double scale = static_cast<double>(static_cast<float>(call.weight[c])) * rstd;
    scales[static_cast<size_t>(c)] = static_cast<float>(scale);
    shifts[static_cast<size_t>(c)] =
        static_cast<float>(static_cast<double>(static_cast<float>(call.bias[c])) - mean * scale);
    if (call.running_mean == nullptr) continue;
    const auto mix = [&](float& running, double value) {
      running += call.momentum * (static_cast<float>(value) - running);
    };
    mix(call.running_mean[c], mean);
    mix(call.running_var[c], variance * rows / (rows - 1.0));
  }
  const float *const scale = scales.data(), *const shift = shifts.data();
  for_rows(call.rows, channels, [&](int64_t first, int64_t last) {
    write_normalised(call.y, x, call.residual, scale, shift, first, last, channels, call.relu);
  });
}

template <typename Scalar>
void batch_norm_backward(const BatchNormBackward<Scalar>& call) {
  const int64_t channels = call.channels;
  const float *const mean = call.statistics, *const rstd = call.statistics + channels;
  with_constant(call.y != nullptr, [&](auto relu) {
    const auto gradient_at = [&](int64_t at) {
      const auto dy = static_cast<float>(call.dy[at]);
      if constexpr (decltype(relu)::value) return static_cast<float>(call.y[at]) <= 0.0f ? 0.0f : dy;
      return dy;
    };
    const std::vector<float> sums = sums_by_channel(call.rows, channels, [&](int64_t row, int64_t c) {
      const int64_t at = row * channels + c;
      const float dz = gradient_at(at);
      return ChannelTerms{dz, dz * (static_cast<float>(call.x[at]) - mean[c])};
    });
    // dx = scale * dz + slope * x + shift.
    std::vector<float> scales(static_cast<size_t>(channels)), slopes(scales), shifts(scales);
    for (int64_t c = 0; c < channels; ++c) {
      const auto i = static_cast<size_t>(c);
      const float sum = sums[i], product = sums[i + static_cast<size_t>(channels)];
      const auto rows = static_cast<float>(call.rows);
      store(call.d_weight[c], static_cast<float>(call.d_weight[c]) + product * rstd[c]);
      store(call.d_bias[c], static_cast<float>(call.d_bias[c]) + sum);
      scales[i] = static_cast<float>(call.weight[c]) * rstd[c];
      slopes[i] = -scales[i] * rstd[c] * rstd[c] * (product / rows);
      shifts[i] = -scales[i] * (sum / rows) - slopes[i] * mean[c];
    }
    const float *const scale = scales.data(), *const slope = slopes.data(), *const shift = shifts.data();
    with_constant(call.d_residual != nullptr, [&](auto residual) {
      for_rows(call.rows, channels, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const int64_t begin = row * channels;
#pragma omp simd
          for (int64_t c = 0; c < channels; ++c) {
            const float dz = gradient_at(begin + c);
            store(call.dx[begin + c],
                  scale[c] * dz + (slope[c] * static_cast<float>(call.x[begin + c]) + shift[c]));
            if constexpr (decltype(residual)::value) store(call.d_residual[begin + c], dz);
          }
        }
      });
    });
  });
}

template void batch_norm_forward(const BatchNormForward<float>&);
template void batch_norm_forward(const BatchNormForward<c10::BFloat16>&);
template void batch_norm_backward(const BatchNormBackward<float>&);
template void batch_norm_backward(const BatchNormBackward<c10::BFloat16>&);

}  // namespace trireme::kernels
