#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
// After <cstdio>, which they lean on.
#include <jpeglib.h>

#include <jerror.h>

#include "trireme/base/error.h"
#include "trireme/data/images/codec.h"

namespace trireme::data {
namespace {

/// libjpeg tells of errors by a function that must not return: it jumps over frames of C only.
struct JpegErrors : jpeg_error_mgr {
  jmp_buf out;
  std::array<char, JMSG_LENGTH_MAX> text;
  bool cut_off;
};

JpegErrors& errors_of(j_common_ptr state) {
  return *static_cast<JpegErrors*>(state->err);
}

[[noreturn]] void leave(j_common_ptr state) {
  state->err->format_message(state, errors_of(state).text.data());
  longjmp(errors_of(state).out, 1);
}

/// Most warnings are of a file that looks as it should; those of missing data are not.
void hear(j_common_ptr state, int level) {
  if (level >= 0) return;
  const int code = state->err->msg_code;
  errors_of(state).cut_off |= code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER;
}

void keep_silent(j_common_ptr) {}

void set_up(JpegErrors& errors) {
  jpeg_std_error(&errors);
  errors.error_exit = leave;
  errors.emit_message = hear;
  errors.output_message = keep_silent;
  errors.cut_off = false;
  errors.text[0] = '\0';
}

/// The denominator of 1/1, 1/2, 1/4, 1/8 that leaves both sides long enough.
unsigned scale_of(const jpeg_decompress_struct& jpeg, int64_t least_side) {
  if (least_side <= 0) return 1;
  const auto shorter = static_cast<int64_t>(std::min(jpeg.image_width, jpeg.image_height));
  unsigned scale = 1;
  while (scale < 8 && shorter / (2 * static_cast<int64_t>(scale)) >= least_side) scale *= 2;
  return scale;
}

/// Whether the mark stands at the end that says that nothing is missing.
bool has_end(std::span<const std::byte> bytes) {
  return bytes.size() >= 2 && bytes[bytes.size() - 2] == std::byte{0xff} &&
         bytes.back() == std::byte{JPEG_EOI};
}

/// The rows and columns of `part`. libjpeg gives whole blocks of columns, and takes the colours of the
/// outermost from their neighbours. What is below is read, too, where asked for: errors there are heard. No
/// object of this frame has a destructor either.
void read_part(jpeg_decompress_struct& jpeg, const ImagePart& part, bool to_the_end,
               std::vector<uint8_t>& pixels) {
  constexpr int64_t kBeside = 4;
  const auto width = static_cast<int64_t>(jpeg.output_width);
  const int64_t channels = jpeg.output_components, row = part.width * channels;
  const auto first = std::max<int64_t>(0, part.left - kBeside);
  auto left = static_cast<JDIMENSION>(first);
  auto taken = static_cast<JDIMENSION>(std::min(width, part.left + part.width + kBeside) - first);
  if (taken < jpeg.output_width) jpeg_crop_scanline(&jpeg, &left, &taken);
  jpeg_skip_scanlines(&jpeg, static_cast<JDIMENSION>(part.top));
  // A row lies where it belongs but for what stands left of it.
  const int64_t before = (part.left - static_cast<int64_t>(left)) * channels;
  const int64_t whole = static_cast<int64_t>(taken) * channels;
  pixels.resize(static_cast<size_t>(part.height * row + whole));
  for (int64_t y = 0; y < part.height; ++y) {
    JSAMPROW next = pixels.data() + y * row;
    jpeg_read_scanlines(&jpeg, &next, 1);
    if (before > 0) std::memmove(next, next + before, static_cast<size_t>(row));
  }
  JSAMPROW behind = pixels.data() + part.height * row;
  while (to_the_end && jpeg.output_scanline < jpeg.output_height) jpeg_read_scanlines(&jpeg, &behind, 1);
  pixels.resize(static_cast<size_t>(part.height * row));
}

/// The pixels as libjpeg gives them, CMYK included. False when an error has left its text in `errors`. No
/// object of this frame has a destructor, for longjmp would not call it.
bool decompress(jpeg_decompress_struct& jpeg, JpegErrors& errors, std::span<const std::byte> bytes,
                const DecodeOptions& options, Image& image) {
  if (setjmp(errors.out) != 0) return false;
  jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(bytes.data()),
               static_cast<unsigned long>(bytes.size()));
  jpeg_read_header(&jpeg, TRUE);
  if (static_cast<int64_t>(jpeg.image_width) * jpeg.image_height > kMostPixels) {
    std::snprintf(errors.text.data(), errors.text.size(), "%u x %u pixels are too many", jpeg.image_width,
                  jpeg.image_height);
    return false;
  }
  const bool inks = jpeg.jpeg_color_space == JCS_CMYK || jpeg.jpeg_color_space == JCS_YCCK;
  jpeg.out_color_space = inks ? JCS_CMYK : options.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  if (jpeg.jpeg_color_space == JCS_RGB) jpeg.out_color_space = JCS_RGB;  // it has no luma to give
  jpeg.scale_num = 1;
  jpeg.scale_denom = scale_of(jpeg, options.least_side);
  jpeg_start_decompress(&jpeg);
  image.shape = {.channels = jpeg.output_components,
                 .height = static_cast<int64_t>(jpeg.output_height),
                 .width = static_cast<int64_t>(jpeg.output_width)};
  const ImagePart part = options.part ? options.part(image.shape) : all_of(image.shape);
  // The rows below the part need not be read, unless the file may have been cut off there.
  read_part(jpeg, part, !has_end(bytes), image.pixels);
  image.shape.height = part.height;
  image.shape.width = part.width;
  if (jpeg.output_scanline == jpeg.output_height) jpeg_finish_decompress(&jpeg);
  return true;
}

/// Four inks, inverted as Adobe writes them, to RGB.
void mix_inks(Image& image) {
  for (size_t from = 0, to = 0; from < image.pixels.size(); from += 4, to += 3) {
    const int black = image.pixels[from + 3];
    for (size_t ink = 0; ink < 3; ++ink)
      image.pixels[to + ink] = static_cast<uint8_t>(image.pixels[from + ink] * black / 255);
  }
  image.shape.channels = 3;
  image.pixels.resize(image.pixels.size() / 4 * 3);
}

struct FreeMemory {
  void operator()(unsigned char* memory) const { std::free(memory); }
};

bool compress(jpeg_compress_struct& jpeg, JpegErrors& errors, const Image& image, int quality, int chroma,
              unsigned char** bytes, unsigned long* size) {
  if (setjmp(errors.out) != 0) return false;
  jpeg_mem_dest(&jpeg, bytes, size);
  jpeg.image_width = static_cast<JDIMENSION>(image.shape.width);
  jpeg.image_height = static_cast<JDIMENSION>(image.shape.height);
  jpeg.input_components = static_cast<int>(image.shape.channels);
  jpeg.in_color_space = image.shape.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&jpeg);
  jpeg_set_quality(&jpeg, quality, TRUE);
  jpeg.comp_info[0].h_samp_factor = jpeg.comp_info[0].v_samp_factor = image.shape.channels == 3 ? chroma : 1;
  jpeg_start_compress(&jpeg, TRUE);
  const size_t row = static_cast<size_t>(image.shape.width * image.shape.channels);
  while (jpeg.next_scanline < jpeg.image_height) {
    JSAMPROW next = const_cast<uint8_t*>(image.pixels.data()) + row * jpeg.next_scanline;  // only read
    jpeg_write_scanlines(&jpeg, &next, 1);
  }
  jpeg_finish_compress(&jpeg);
  return true;
}

}  // namespace

Image decode_jpeg(std::span<const std::byte> bytes, const DecodeOptions& options) {
  JpegErrors errors;
  set_up(errors);
  jpeg_decompress_struct jpeg = {};
  jpeg.err = &errors;
  jpeg_create_decompress(&jpeg);
  const std::unique_ptr<jpeg_decompress_struct, decltype(&jpeg_destroy_decompress)> end(
      &jpeg, jpeg_destroy_decompress);
  Image image;
  if (!decompress(jpeg, errors, bytes, options, image)) throw BrokenImage(errors.text.data());
  if (errors.cut_off) throw BrokenImage("its data ends before the image is complete");
  if (image.shape.channels == 4) mix_inks(image);
  if (image.shape.channels == 3 && options.channels == 1) drop_colours(image);
  return image;
}

std::string encode_jpeg(const Image& image, int quality, int chroma) {
  JpegErrors errors;
  set_up(errors);
  jpeg_compress_struct jpeg = {};
  jpeg.err = &errors;
  jpeg_create_compress(&jpeg);
  const std::unique_ptr<jpeg_compress_struct, decltype(&jpeg_destroy_compress)> end(&jpeg,
                                                                                    jpeg_destroy_compress);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  const bool done = compress(jpeg, errors, image, quality, chroma, &bytes, &size);
  const std::unique_ptr<unsigned char, FreeMemory> owned(bytes);
  TRIREME_CHECK(done, "[data.jpeg] {}", errors.text.data());
  return {reinterpret_cast<const char*>(bytes), size};
}

}  // namespace trireme::data
