#include "trireme/data/images/transform.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "trireme/base/error.h"

namespace trireme::data {
namespace {

/// The largest part from the middle whose width is between these multiples of its height.
ImagePart middle(const ImageShape& shape, double least_ratio, double most_ratio) {
  const auto height = static_cast<double>(shape.height), width = static_cast<double>(shape.width);
  ImagePart part{.top = 0, .left = 0, .height = shape.height, .width = shape.width};
  if (width / height < least_ratio) part.height = std::max<int64_t>(1, std::llround(width / least_ratio));
  if (width / height > most_ratio) part.width = std::max<int64_t>(1, std::llround(height * most_ratio));
  part.top = (shape.height - part.height) / 2;
  part.left = (shape.width - part.width) / 2;
  return part;
}

/// A part of random area, ratio and place (Szegedy et al. 2015); the middle where ten draws do not fit.
ImagePart drawn_part(const ImageShape& shape, double least_area, SampleDraws& draws) {
  constexpr double kLeastRatio = 3.0 / 4.0, kMostRatio = 4.0 / 3.0;
  constexpr int kTries = 10;
  const auto area = static_cast<double>(shape.height * shape.width);
  for (int i = 0; i < kTries; ++i) {
    const double wanted = area * draws.uniform(least_area, 1.0);
    const double ratio = std::exp(draws.uniform(std::log(kLeastRatio), std::log(kMostRatio)));
    const int64_t width = std::llround(std::sqrt(wanted * ratio));
    const int64_t height = std::llround(std::sqrt(wanted / ratio));
    if (width < 1 || height < 1 || width > shape.width || height > shape.height) continue;
    const int64_t top = draws.below(shape.height - height + 1);
    return {.top = top, .left = draws.below(shape.width - width + 1), .height = height, .width = width};
  }
  return middle(shape, kLeastRatio, kMostRatio);
}

/// The part of the centre that has the form of `out`, smaller by `share`.
ImagePart centre_part(const ImageShape& shape, const ImageShape& out, double share) {
  const double ratio = static_cast<double>(out.width) / static_cast<double>(out.height);
  const ImagePart whole = middle(shape, ratio, ratio);
  ImagePart part;
  part.height = std::max<int64_t>(1, std::llround(share * static_cast<double>(whole.height)));
  part.width = std::max<int64_t>(1, std::llround(share * static_cast<double>(whole.width)));
  part.top = (shape.height - part.height) / 2;
  part.left = (shape.width - part.width) / 2;
  return part;
}

/// Which inputs make up each output, and how much each counts. All outputs have as many taps, the last of
/// them zeros where there is less to take, which may stand for inputs behind the end.
struct Taps {
  int64_t count = 0;
  std::vector<int64_t> first;  ///< input of each output
  std::vector<float> weights;  ///< `count` of each output

  const float* weights_of(int64_t output) const { return weights.data() + output * count; }
};

/// Bilinear where it enlarges; where it shrinks the triangle is as wide as what it stands for, so that no
/// input is passed over.
Taps taps(int64_t from, int64_t to) {
  const double scale = static_cast<double>(from) / static_cast<double>(to);
  const double reach = std::max(scale, 1.0);
  struct Span {
    double centre;
    int64_t first, last;
  };
  const auto span_of = [&](int64_t output) {
    const double centre = (static_cast<double>(output) + 0.5) * scale;
    return Span{.centre = centre,
                .first = std::max<int64_t>(0, static_cast<int64_t>(centre - reach + 0.5)),
                .last = std::min<int64_t>(from, static_cast<int64_t>(centre + reach + 0.5))};
  };
  Taps all;
  for (int64_t i = 0; i < to; ++i) all.count = std::max(all.count, span_of(i).last - span_of(i).first);
  all.first.reserve(static_cast<size_t>(to));
  all.weights.assign(static_cast<size_t>(to * all.count), 0.0F);
  for (int64_t i = 0; i < to; ++i) {
    const auto [centre, first, last] = span_of(i);
    float* const weights = all.weights.data() + i * all.count;
    double sum = 0.0;
    for (int64_t at = first; at < last; ++at) {
      const double distance = std::abs((static_cast<double>(at) + 0.5 - centre) / reach);
      const double weight = std::max(0.0, 1.0 - distance);
      weights[at - first] = static_cast<float>(weight);
      sum += weight;
    }
    for (int64_t at = 0; at < last - first; ++at) weights[at] = static_cast<float>(weights[at] / sum);
    all.first.push_back(first);
  }
  return all;
}

/// (pixel - mean) / deviation of pixels in [0, 255] as one product and one sum, by channel.
struct Scale {
  std::vector<float> factor, offset;

  explicit Scale(const ImageTransform& transform) {
    for (size_t channel = 0; channel < transform.mean.size(); ++channel) {
      const double deviation = transform.deviation[channel];
      factor.push_back(static_cast<float>(1.0 / (255.0 * deviation)));
      offset.push_back(static_cast<float>(-transform.mean[channel] / deviation));
    }
  }
};

constexpr int kMostTaps = 4;  ///< that one pass over a row takes

/// body(constant) with `taps`, 1 to kMostTaps, as a constant.
template <typename Body>
void with_constant(int64_t taps, const Body& body) {
  switch (taps) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    default:
      return body(std::integral_constant<int, kMostTaps>());
  }
}

/// row = weights[0] pixels + weights[1] (pixels of the next row) + ..., or added to what `row` has.
template <int kTaps, bool kAdds>
void add_rows(float* __restrict row, const uint8_t* __restrict pixels, int64_t columns,
              const float* __restrict weights) {
  for (int64_t i = 0; i < columns; ++i) {
    float sum = weights[0] * static_cast<float>(pixels[i]);
    if constexpr (kAdds) sum += row[i];
    for (int tap = 1; tap < kTaps; ++tap) sum += weights[tap] * static_cast<float>(pixels[i + tap * columns]);
    row[i] = sum;
  }
}

/// The rows of one output row, summed up column by column.
void sum_rows(float* row, const Image& image, const Taps& down, int64_t y) {
  const int64_t columns = image.shape.width * image.shape.channels, top = down.first[static_cast<size_t>(y)];
  const int64_t count = std::min(down.count, image.shape.height - top);
  for (int64_t tap = 0; tap < count; tap += kMostTaps) {
    const uint8_t* const pixels = image.pixels.data() + (top + tap) * columns;
    const float* const weights = down.weights_of(y) + tap;
    with_constant(std::min<int64_t>(count - tap, kMostTaps), [&](auto taps) {
      tap == 0 ? add_rows<taps(), false>(row, pixels, columns, weights)
               : add_rows<taps(), true>(row, pixels, columns, weights);
    });
  }
}

/// Three channels and one of the neighbour, in one register.
using Lanes = float __attribute__((vector_size(16)));

/// A row of three channels resized to `width` pixels at `out`, three values each, one pixel after the other.
/// kTaps 0: any number.
template <int kTaps>
void resize_row(const float* row, const Taps& across, int64_t width, bool mirrored, const Lanes& factor,
                const Lanes& offset, float* out) {
  const int64_t taps = kTaps == 0 ? across.count : kTaps;
  const auto pixel = [&](int64_t place) {
    const int64_t x = mirrored ? width - 1 - place : place;
    const float* const from = row + across.first[static_cast<size_t>(x)] * 3;
    const float* const weights = across.weights.data() + x * taps;
    Lanes sum = {};
    for (int64_t tap = 0; tap < taps; ++tap) {
      Lanes values;
      std::memcpy(&values, from + tap * 3, sizeof(values));
      sum += weights[tap] * values;
    }
    return sum * factor + offset;
  };
  // One store takes four lanes: the fourth is the first value of the next pixel, which is written after it.
  for (int64_t place = 0; place + 1 < width; ++place) {
    const Lanes sum = pixel(place);
    std::memcpy(out + place * 3, &sum, sizeof(sum));
  }
  const Lanes sum = pixel(width - 1);
  std::memcpy(out + (width - 1) * 3, &sum, 3 * sizeof(float));
}

/// Row by row first, where neighbours lie beside each other.
void resize(const Image& image, bool mirrored, const ImageShape& shape, const Scale& scale,
            const PixelRoom& out) {
  const Taps down = taps(image.shape.height, shape.height), across = taps(image.shape.width, shape.width);
  const int64_t channels = shape.channels;
  const bool in_lanes = channels == 3 && out.channel == 1 && out.column == 3;
  Lanes factor = {}, offset = {};
  for (int64_t channel = 0; in_lanes && channel < channels; ++channel) {
    factor[channel] = scale.factor[static_cast<size_t>(channel)];
    offset[channel] = scale.offset[static_cast<size_t>(channel)];
  }
  std::vector<float> row(static_cast<size_t>((image.shape.width + across.count) * channels + 1), 0.0F);
  for (int64_t y = 0; y < shape.height; ++y) {
    sum_rows(row.data(), image, down, y);
    float* const first = out.values + y * out.row;
    if (in_lanes && across.count <= kMostTaps) {
      with_constant(across.count, [&](auto taps) {
        resize_row<taps()>(row.data(), across, shape.width, mirrored, factor, offset, first);
      });
      continue;
    }
    if (in_lanes) {
      resize_row<0>(row.data(), across, shape.width, mirrored, factor, offset, first);
      continue;
    }
    for (int64_t x = 0; x < shape.width; ++x) {
      const float* const from = row.data() + across.first[static_cast<size_t>(x)] * channels;
      const float* const weights = across.weights_of(x);
      float* const to = first + (mirrored ? shape.width - 1 - x : x) * out.column;
      for (int64_t channel = 0; channel < channels; ++channel) {
        float sum = 0.0F;
        for (int64_t tap = 0; tap < across.count; ++tap) sum += weights[tap] * from[tap * channels + channel];
        const auto c = static_cast<size_t>(channel);
        to[channel * out.channel] = sum * scale.factor[c] + scale.offset[c];
      }
    }
  }
}

/// Pixels as they are, moved by (down, right) with black where there are none.
void copy_moved(const Image& image, int64_t down, int64_t right, bool mirrored, const Scale& scale,
                const PixelRoom& out) {
  const auto [channels, height, width] = image.shape;
  for (int64_t y = 0; y < height; ++y) {
    const int64_t from_y = y - down;
    for (int64_t x = 0; x < width; ++x) {
      const int64_t from_x = x - right;
      const bool inside = from_y >= 0 && from_y < height && from_x >= 0 && from_x < width;
      const int64_t place = mirrored ? width - 1 - x : x;
      for (int64_t channel = 0; channel < channels; ++channel) {
        const auto at = static_cast<size_t>((from_y * width + from_x) * channels + channel);
        const auto c = static_cast<size_t>(channel);
        const float pixel = inside ? static_cast<float>(image.pixels[at]) : 0.0F;
        out.values[channel * out.channel + y * out.row + place * out.column] =
            pixel * scale.factor[c] + scale.offset[c];
      }
    }
  }
}

void check_channels(const Image& image, const ImageTransform& transform) {
  const auto channels = static_cast<size_t>(transform.shape.channels);
  TRIREME_CHECK(image.shape.channels == transform.shape.channels && transform.mean.size() == channels &&
                    transform.deviation.size() == channels,
                "[data.transform] an image of {} does not match a transform for {} with means of {} and "
                "deviations of {} channels",
                image.shape.to_string(), transform.shape.to_string(), transform.mean.size(),
                transform.deviation.size());
}

}  // namespace

ImageTransform ImageTransform::fixed() const {
  ImageTransform same = *this;
  same.pad = 0;
  same.flip = same.resized_crop = false;
  return same;
}

int64_t ImageTransform::least_side() const {
  const auto longer = static_cast<double>(std::max(shape.height, shape.width));
  // A crop draws a part of the picture: half as many pixels more than it needs when it draws all of it.
  return std::llround(longer / (resized_crop ? 0.75 : centre));
}

ImageView draw_view(const ImageTransform& transform, const ImageShape& shape, SampleDraws& draws) {
  ImageView view{.part = all_of(shape), .mirrored = transform.flip && draws.uniform() < 0.5};
  if (transform.resized_crop) {
    view.part = drawn_part(shape, transform.least_area, draws);
    return view;
  }
  const int64_t pad = transform.pad;
  const int64_t down = pad > 0 ? draws.below(2 * pad + 1) - pad : 0;
  const int64_t right = pad > 0 ? draws.below(2 * pad + 1) - pad : 0;
  if (shape.height == transform.shape.height && shape.width == transform.shape.width) {
    view.keeps_size = true;
    view.down = down, view.right = right;
    return view;
  }
  view.part = centre_part(shape, transform.shape, transform.centre);
  // Around the centre there is more picture: the crop moves within it.
  view.part.top = std::clamp<int64_t>(view.part.top - down * view.part.height / transform.shape.height, 0,
                                      shape.height - view.part.height);
  view.part.left = std::clamp<int64_t>(view.part.left - right * view.part.width / transform.shape.width, 0,
                                       shape.width - view.part.width);
  return view;
}

void write_view(const Image& part, const ImageView& view, const ImageTransform& transform,
                const PixelRoom& out) {
  check_channels(part, transform);
  const Scale scale(transform);
  if (view.keeps_size) {
    copy_moved(part, view.down, view.right, view.mirrored, scale, out);
  } else {
    resize(part, view.mirrored, transform.shape, scale, out);
  }
}

void transform_image(const Image& image, const ImageTransform& transform, SampleDraws& draws,
                     const PixelRoom& out) {
  const ImageView view = draw_view(transform, image.shape, draws);
  write_view(cut(image, view.part), view, transform, out);
}

/// Jöhnk's way (1964), in logarithms so that a small alpha does not end at 0 / 0.
double mixing_share(double alpha, SampleDraws& draws) {
  TRIREME_CHECK(alpha > 0.0 && alpha <= 1.0, "[data.transform] mixup={} is outside (0, 1]", alpha);
  for (;;) {
    const double first = std::log(1.0 - draws.uniform()) / alpha;
    const double second = std::log(1.0 - draws.uniform()) / alpha;
    const double larger = std::max(first, second);
    const double sum = larger + std::log(std::exp(first - larger) + std::exp(second - larger));
    if (sum <= 0.0) return std::exp(first - sum);
  }
}

}  // namespace trireme::data
