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

/// One image of a backward pass; `kRelu`: a ReLU followed.
template <typename Scalar, bool kRelu>
struct BackwardImage {
  const Scalar *x, *dy, *y;
  const float *mean, *rstd;  ///< by group
  float *sums, *products;    ///< by channel, of dz and of dz * (x - mean)

  BackwardImage(const GroupNormBackward<Scalar>& call, std::vector<float>& by_image, int64_t image) {
    const GroupNormShape& shape = call.shape;
    const int64_t begin = image * shape.positions * shape.channels;
    x = call.x + begin;
    dy = call.dy + begin;
    y = kRelu ? call.y + begin : dy;
    mean = call.statistics + image * 2 * shape.groups;
    rstd = mean + shape.groups;
    sums = by_image.data() + image * 2 * shape.channels;
    products = sums + shape.channels;
  }
  /// dz, the gradient of what the norm gave.
  float gradient_at(int64_t at) const {
    const auto gradient = static_cast<float>(dy[at]);
    if constexpr (kRelu) return static_cast<float>(y[at]) <= 0.0f ? 0.0f : gradient;
    return gradient;
  }
};

/// `means` (channels) is written over.
template <typename Scalar, bool kRelu>
void sums_of_image(const BackwardImage<Scalar, kRelu>& image, float* means, const GroupNormShape& shape) {
  const int64_t channels = shape.channels, width = channels / shape.groups;
  for (int64_t c = 0; c < channels; ++c) means[c] = image.mean[c / width];
  sum_channels(image.sums, image.products, 0, shape.positions, channels, [&](int64_t row, int64_t c) {
    const int64_t at = row * channels + c;
    const float dz = image.gradient_at(at);
    return ChannelTerms{dz, dz * (static_cast<float>(image.x[at]) - means[c])};
  });
}

/// By channel, dx = scale * dz + slope * x + shift.
struct Coefficients {
  float *scale, *slope, *shift;
};

/// Computes the coefficients from the sums of the image, whose products become those of the weight's
/// gradient.
template <typename Scalar, bool kRelu>
void coefficients(const Coefficients& of_dx, const BackwardImage<Scalar, kRelu>& image, const Scalar* weights,
                  const GroupNormShape& shape) {
  const int64_t width = shape.channels / shape.groups;
  const auto count = static_cast<double>(shape.positions * width);
  for (int64_t group = 0; group < shape.groups; ++group) {
    double sum = 0.0, product = 0.0;
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      const auto weight = static_cast<double>(static_cast<float>(weights[c]));
      sum += weight * image.sums[c];
      product += weight * image.products[c];
    }
    const double r = image.rstd[group], tilt = -r * r * r * product / count;
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      of_dx.scale[c] = static_cast<float>(weights[c]) * image.rstd[group];
      of_dx.slope[c] = static_cast<float>(tilt);
      of_dx.shift[c] = static_cast<float>(-r * sum / count - tilt * image.mean[group]);
      image.products[c] *= image.rstd[group];
    }
  }
}

/// dx of image `index`, and dz as the gradient of what was added, where that is wanted.
template <typename Scalar, bool kRelu>
void write_dx(const GroupNormBackward<Scalar>& call, int64_t index, const BackwardImage<Scalar, kRelu>& image,
              const Coefficients& of_dx) {
  const int64_t channels = call.shape.channels, begin = index * call.shape.positions * channels;
  with_constant(call.d_residual != nullptr, [&](auto residual) {
    for (int64_t row = 0; row < call.shape.positions; ++row) {
      Scalar* const dx = call.dx + begin + row * channels;
      Scalar* const d_residual = decltype(residual)::value ? call.d_residual + begin + row * channels : dx;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = row * channels + c;
        const float dz = image.gradient_at(at);
        store(dx[c],
              of_dx.scale[c] * dz + (of_dx.slope[c] * static_cast<float>(image.x[at]) + of_dx.shift[c]));
        if constexpr (decltype(residual)::value) store(d_residual[c], dz);
      }
    }
  });
}

/// Sums over images in their order.
template <typename Scalar>
void add_parameter_gradients(const GroupNormBackward<Scalar>& call, const std::vector<float>& by_image) {
  const int64_t channels = call.shape.channels;
  for (int64_t c = 0; c < channels; ++c) {
    double bias = 0.0, weight = 0.0;
    for (int64_t image = 0; image < call.shape.images; ++image) {
      bias += by_image[place(image * 2 * channels + c)];
      weight += by_image[place((image * 2 + 1) * channels + c)];
    }
    store(call.d_bias[c], static_cast<float>(call.d_bias[c]) + static_cast<float>(bias));
    store(call.d_weight[c], static_cast<float>(call.d_weight[c]) + static_cast<float>(weight));
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
  const int64_t channels = shape.channels, size = shape.positions * channels;
  std::vector<float> by_image(place(shape.images * 2 * channels));
  with_constant(call.y != nullptr, [&](auto relu) {
    for_rows(shape.images, size, [&](int64_t first, int64_t last) {
      std::vector<float> numbers(place(4 * channels));
      float* const means = numbers.data();
      const Coefficients of_dx{means + channels, means + 2 * channels, means + 3 * channels};
      for (int64_t i = first; i < last; ++i) {
        const BackwardImage<Scalar, decltype(relu)::value> image(call, by_image, i);
        sums_of_image(image, means, shape);
        coefficients(of_dx, image, call.weight, shape);
        write_dx(call, i, image, of_dx);
      }
    });
  });
  add_parameter_gradients(call, by_image);
}

template void group_norm_forward(const GroupNormForward<float>&);
template void group_norm_forward(const GroupNormForward<c10::BFloat16>&);
template void group_norm_backward(const GroupNormBackward<float>&);
template void group_norm_backward(const GroupNormBackward<c10::BFloat16>&);

}  // namespace trireme::kernels
