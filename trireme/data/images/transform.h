#pragma once
// From a picture to the numbers that a model reads: crop, size, flip and scale. What is random is a pure
// function of (seed, epoch, sample).
#include <cstdint>
#include <vector>

#include "trireme/data/images/image.h"

namespace trireme::data {

struct ImageTransform {
  ImageShape shape;  ///< of the output; the input has the same number of channels
  /// By channel, for pixels in [0, 1]: the output is (pixel - mean) / deviation.
  std::vector<double> mean, deviation;
  /// Without a random resized crop, pictures of another size are resized so that this part of their shorter
  /// side remains when their centre is cut out.
  double centre = 0.875;
  // Random changes in training; validation leaves them out.
  int64_t pad = 0;    ///< black pixels at each side, out of which a crop of the old size is drawn
  bool flip = false;  ///< mirror half of the pictures, drawn at random
  /// Crop a part at a random place, with a share of the area in [least_area, 1] and a ratio of width to
  /// height in [3/4, 4/3], and resize it.
  bool resized_crop = false;
  double least_area = 0.08;

  /// A copy without the random parts.
  ImageTransform fixed() const;
  /// How long both sides of a decoded picture must be so that the output loses nothing; 0: full size. For
  /// ImageSet::read().
  int64_t least_side() const;
};

/// Where values of one picture go: element (c, y, x) at `values[c * channel + y * row + x * column]`.
struct PixelRoom {
  float* values = nullptr;
  int64_t channel = 0, row = 0, column = 0;
};

/// Which part of a picture becomes the output, and how.
struct ImageView {
  ImagePart part;
  bool mirrored = false;
  bool keeps_size = false;  ///< the whole picture as it is, moved by (down, right); else `part` resized
  int64_t down = 0, right = 0;
};
/// Draws the view of a picture of this shape.
ImageView draw_view(const ImageTransform& transform, const ImageShape& shape, SampleDraws& draws);
/// Writes the output; `part` holds the view's part of the picture. Throws LogicError when the channels
/// differ.
void write_view(const Image& part, const ImageView& view, const ImageTransform& transform,
                const PixelRoom& out);

/// draw_view() and write_view() for a whole picture.
void transform_image(const Image& image, const ImageTransform& transform, SampleDraws& draws,
                     const PixelRoom& out);

/// The share of the first of two pictures in their mixture, from a Beta(alpha, alpha) distribution (mixup:
/// Zhang et al. 2018). `alpha` in (0, 1].
double mixing_share(double alpha, SampleDraws& draws);

}  // namespace trireme::data
