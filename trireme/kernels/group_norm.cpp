#include "trireme/kernels/group_norm.h"

#include <c10/util/BFloat16.h>

#include <cmath>
#include <vector>

#include "trireme/kernels/channel_sums.h"
#include "trireme/kernels/parallel.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

size_t place(int64_t index) {
  return static_cast<size_t>(index);
}

/// Mean and rstd of each group of an image, from sums by channel of deviations from its first position.
template <typename Scalar>
void statistics_of_image(float* mean, float* rstd, const Scalar* x, const float* sums, const float* squares,
                         const GroupNormShape& shape, double eps) {
  const int64_t width = shape.channels / shape.groups;
  const auto rows = static_cast<double>(shape.positions);
  for (int64_t group = 0; group < shape.groups; ++group) {
    const auto mean_of = [&](int64_t c) {
      return static_cast<double>(static_cast<float>(x[c])) + sums[c] / rows;
    };
    double whole = 0.0, deviations = 0.0;
    for (int64_t c = group * width; c < (group + 1) * width; ++c) whole += mean_of(c);
    whole /= static_cast<double>(width);
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      const double off = mean_of(c) - whole, sum = sums[c];
      deviations += positive_part(squares[c] - sum * sum / rows) + rows * off * off;
    }
    mean[group] = static_cast<float>(whole);
    rstd[group] = static_cast<float>(1.0 / std::sqrt(deviations / (rows * static_cast<double>(width)) + eps));
  }
}

}  // namespace

template <typename Scalar>
void group_norm_forward(const GroupNormForward<Scalar>& call) {
  const GroupNormShape& shape = call.shape;
  const int64_t channels = shape.channels, width = channels / shape.groups, size = shape.positions * channels;
  for_rows(shape.images, size, [&](int64_t first, int64_t last) {
    std::vector<float> numbers(place(4 * channels));
    float *const sums = numbers.data(), *const squares = sums + channels;
    float *const scale = squares + channels, *const shift = scale + channels;
    for (int64_t image = first; image < last; ++image) {
      const Scalar* const x = call.x + image * size;
      float *const mean = call.statistics + image * 2 * shape.groups, *const rstd = mean + shape.groups;
      sum_channels(sums, squares, 0, shape.positions, channels, [&](int64_t row, int64_t c) {
        const float value = static_cast<float>(x[row * channels + c]) - static_cast<float>(x[c]);
        return ChannelTerms{value, value * value};
      });
      statistics_of_image(mean, rstd, x, sums, squares, shape, static_cast<double>(call.eps));
      for (int64_t c = 0; c < channels; ++c) {
        scale[c] = static_cast<float>(call.weight[c]) * rstd[c / width];
        shift[c] = static_cast<float>(call.bias[c]) - mean[c / width] * scale[c];
      }
      const Scalar* const residual = call.residual == nullptr ? nullptr : call.residual + image * size;
      write_normalised(call.y + image * size, x, residual, scale, shift, 0, shape.positions, channels,
                       call.relu);
    }
  });
}

template <typename Scalar>
void group_norm_backward(const GroupNormBackward<Scalar>& call) {
  const GroupNormShape& shape = call.shape;
  const int64_t channels = shape.channels, width = channels / shape.groups, size = shape.positions * channels;
  std::vector<float> by_image(place(shape.images * 2 * channels));  // sums of dz, and of dz * (x - mean)
  with_constant(call.y != nullptr, [&](auto relu) {
    for_rows(shape.images, size, [&](int64_t first, int64_t last) {
      std::vector<float> numbers(place(3 * channels + 2 * channels));
      float *const scale = numbers.data(), *const slope = scale + channels, *const shift = slope + channels;
      float* const means = shift + channels;
      for (int64_t image = first; image < last; ++image) {
        const Scalar *const x = call.x + image * size, *const dy = call.dy + image * size;
        const Scalar* const y = decltype(relu)::value ? call.y + image * size : dy;
        const float *const mean = call.statistics + image * 2 * shape.groups, *const rstd =
                                                                                  mean + shape.groups;
        float *const sums = by_image.data() + image * 2 * channels, *const products = sums + channels;
        const auto gradient_at = [&](int64_t at) {
          const auto gradient = static_cast<float>(dy[at]);
          if constexpr (decltype(relu)::value) return static_cast<float>(y[at]) <= 0.0f ? 0.0f : gradient;
          return gradient;
        };
        for (int64_t c = 0; c < channels; ++c) means[c] = mean[c / width];
        sum_channels(sums, products, 0, shape.positions, channels, [&](int64_t row, int64_t c) {
          const int64_t at = row * channels + c;
          const float dz = gradient_at(at);
          return ChannelTerms{dz, dz * (static_cast<float>(x[at]) - means[c])};
        });
        // dx = scale * dz + slope * x + shift.
        const auto count = static_cast<double>(shape.positions * width);
        for (int64_t group = 0; group < shape.groups; ++group) {
          double sum = 0.0, product = 0.0;
          for (int64_t c = group * width; c < (group + 1) * width; ++c) {
            const auto weight = static_cast<double>(static_cast<float>(call.weight[c]));
            sum += weight * sums[c];
            product += weight * products[c];
          }
          const double r = rstd[group], tilt = -r * r * r * product / count;
          for (int64_t c = group * width; c < (group + 1) * width; ++c) {
            scale[c] = static_cast<float>(call.weight[c]) * rstd[group];
            slope[c] = static_cast<float>(tilt);
            shift[c] = static_cast<float>(-r * sum / count - tilt * mean[group]);
            products[c] *= rstd[group];
          }
        }
        with_constant(call.d_residual != nullptr, [&](auto residual) {
          for (int64_t row = 0; row < shape.positions; ++row) {
            Scalar* const dx = call.dx + image * size + row * channels;
            Scalar* const d_residual =
                decltype(residual)::value ? call.d_residual + image * size + row * channels : dx;
#pragma omp simd
            for (int64_t c = 0; c < channels; ++c) {
              const float dz = gradient_at(row * channels + c);
              store(dx[c], scale[c] * dz + (slope[c] * static_cast<float>(x[row * channels + c]) + shift[c]));
              if constexpr (decltype(residual)::value) store(d_residual[c], dz);
            }
          }
        });
      }
    });
  });
  for (int64_t c = 0; c < channels; ++c) {
    double bias = 0.0, weight = 0.0;
    for (int64_t image = 0; image < shape.images; ++image) {
      bias += by_image[place(image * 2 * channels + c)];
      weight += by_image[place((image * 2 + 1) * channels + c)];
    }
    store(call.d_bias[c], static_cast<float>(call.d_bias[c]) + static_cast<float>(bias));
    store(call.d_weight[c], static_cast<float>(call.d_weight[c]) + static_cast<float>(weight));
  }
}

template void group_norm_forward(const GroupNormForward<float>&);
template void group_norm_forward(const GroupNormForward<c10::BFloat16>&);
template void group_norm_backward(const GroupNormBackward<float>&);
template void group_norm_backward(const GroupNormBackward<c10::BFloat16>&);

}  // namespace trireme::kernels
