#include <ft2build.h>
#include FT_FREETYPE_H
#include FT_OUTLINE_H
#include FT_BBOX_H

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/data/images/digits.h"

namespace trireme::data {
namespace {

constexpr FT_UInt kFontPixels = 64;  // outlines are taken at this size and scaled from there
constexpr double kUnits = 64.0;      // of FreeType's coordinates in a pixel

class FontLibrary {
 public:
  FontLibrary() {
    if (FT_Init_FreeType(&handle) != 0)
      throw EnvironmentError("[data.digits] FreeType cannot be initialized");
  }
  ~FontLibrary() { FT_Done_FreeType(handle); }
  FontLibrary(const FontLibrary&) = delete;
  FontLibrary& operator=(const FontLibrary&) = delete;
  FT_Library handle = nullptr;
};

struct CloseFace {
  void operator()(FT_Face face) const { FT_Done_Face(face); }
};
using Face = std::unique_ptr<FT_FaceRec, CloseFace>;

/// A glyph's outline that may be changed.
class Outline {
 public:
  Outline(FT_Library library, const FT_Outline& of) : library_(library) {
    const auto points = static_cast<FT_UInt>(of.n_points);
    if (FT_Outline_New(library, points, of.n_contours, &handle) != 0)
      throw OutOfMemory("[data.digits] not enough memory for an outline of {} points", points);
    FT_Outline_Copy(&of, &handle);
  }
  ~Outline() { FT_Outline_Done(library_, &handle); }
  Outline(const Outline&) = delete;
  Outline& operator=(const Outline&) = delete;

  FT_BBox box() {
    FT_BBox found;
    FT_Outline_Get_BBox(&handle, &found);
    return found;
  }
  void centre() {
    const FT_BBox found = box();
    FT_Outline_Translate(&handle, -(found.xMin + found.xMax) / 2, -(found.yMin + found.yMax) / 2);
  }

  FT_Outline handle = {};

 private:
  FT_Library library_;
};

bool load_digit(FT_Face face, int64_t digit) {
  const FT_UInt glyph = FT_Get_Char_Index(face, static_cast<FT_ULong>('0' + digit));
  return glyph != 0 && FT_Load_Glyph(face, glyph, FT_LOAD_NO_HINTING | FT_LOAD_NO_BITMAP) == 0 &&
         face->glyph->format == FT_GLYPH_FORMAT_OUTLINE && face->glyph->outline.n_points > 0;
}

bool has_digits(FT_Face face) {
  if (!FT_IS_SCALABLE(face) || FT_Select_Charmap(face, FT_ENCODING_UNICODE) != 0 ||
      FT_Set_Pixel_Sizes(face, 0, kFontPixels) != 0)
    return false;
  for (int64_t digit = 0; digit < 10; ++digit) {
    if (!load_digit(face, digit)) return false;
  }
  return true;
}

FT_Fixed fixed(double value) {
  return std::lround(value * 0x1.0p16);
}

/// Turned, slanted, narrowed and sized at random.
FT_Matrix drawn_form(const FT_BBox& box, double height, SampleDraws& draws) {
  constexpr double kMostTurn = 0.26;  // radians: 15 degrees
  const double turn = draws.uniform(-kMostTurn, kMostTurn), slant = draws.uniform(-0.25, 0.25);
  const double size = height * kUnits / static_cast<double>(std::max<FT_Pos>(1, box.yMax - box.yMin));
  const double wide = size * draws.uniform(0.8, 1.15);
  const double c = std::cos(turn), s = std::sin(turn);
  return {.xx = fixed(c * wide),
          .xy = fixed((c * slant - s) * size),
          .yx = fixed(s * wide),
          .yy = fixed((s * slant + c) * size)};
}

using Colour = std::array<double, 3>;

double brightness(const Colour& colour) {
  return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2];
}

Colour drawn_colour(SampleDraws& draws) {
  return {draws.uniform(0, 255), draws.uniform(0, 255), draws.uniform(0, 255)};
}

/// A colour that differs from both in brightness, so that the digit can be seen.
Colour drawn_ink(const Colour& a, const Colour& b, SampleDraws& draws) {
  constexpr double kLeastContrast = 60.0;
  const double low = std::min(brightness(a), brightness(b)), high = std::max(brightness(a), brightness(b));
  for (int i = 0; i < 100; ++i) {
    const Colour ink = drawn_colour(draws);
    if (brightness(ink) < low - kLeastContrast || brightness(ink) > high + kLeastContrast) return ink;
  }
  return low > 255.0 - high ? Colour{0, 0, 0} : Colour{255, 255, 255};
}

/// The sum of four bytes around 0: near enough to a normal distribution, with deviation 147.8.
int64_t noise(SampleDraws& draws) {
  const uint64_t bits = draws.bits();
  int64_t sum = -510;
  for (int byte = 0; byte < 4; ++byte) sum += static_cast<int64_t>(bits >> (8 * byte) & 0xff);
  return sum;
}

uint8_t to_byte(double value) {
  return static_cast<uint8_t>(std::clamp<int64_t>(std::lround(value), 0, 255));
}

void add_noise(Image& image, double deviation, SampleDraws& draws) {
  constexpr double kDeviation = 147.8;
  for (uint8_t& pixel : image.pixels)
    pixel = to_byte(pixel + deviation / kDeviation * static_cast<double>(noise(draws)));
}

/// White on black, as much as `cover` says.
Image paint_grey(const std::vector<uint8_t>& cover, int64_t side, SampleDraws& draws) {
  const double ink = draws.uniform(0.75, 1.0);
  Image image{.shape = {.channels = 1, .height = side, .width = side}, .pixels = {}};
  for (const uint8_t covered : cover) image.pixels.push_back(to_byte(ink * covered));
  add_noise(image, draws.uniform(0.0, 12.0), draws);
  return image;
}

/// One colour on a background that goes from one colour to another.
Image paint_coloured(const std::vector<uint8_t>& cover, int64_t side, SampleDraws& draws) {
  const Colour from = drawn_colour(draws);
  Colour to = drawn_colour(draws);
  for (size_t i = 0; i < 3; ++i) to[i] = from[i] + 0.4 * (to[i] - from[i]);
  const Colour ink = drawn_ink(from, to, draws);
  const double angle = draws.uniform(0.0, 6.283185307179586);
  const double right = std::cos(angle) / static_cast<double>(side),
               down = std::sin(angle) / static_cast<double>(side);
  Image image{.shape = {.channels = 3, .height = side, .width = side}, .pixels = {}};
  image.pixels.reserve(3 * cover.size());
  for (size_t at = 0; at < cover.size(); ++at) {
    const double x = static_cast<double>(static_cast<int64_t>(at) % side) - 0.5 * static_cast<double>(side);
    const double y = static_cast<double>(static_cast<int64_t>(at) / side) - 0.5 * static_cast<double>(side);
    const double way = std::clamp(0.5 + x * right + y * down, 0.0, 1.0), covered = cover[at] / 255.0;
    for (size_t i = 0; i < 3; ++i) {
      const double behind = from[i] + way * (to[i] - from[i]);
      image.pixels.push_back(to_byte(behind + covered * (ink[i] - behind)));
    }
  }
  add_noise(image, draws.uniform(0.0, 14.0), draws);
  return image;
}

}  // namespace

class DigitPainter::Impl {
 public:
  explicit Impl(const std::vector<std::string>& files) {
    for (const std::string& file : files) {
      FT_Face opened = nullptr;
      if (FT_New_Face(library_.handle, file.c_str(), 0, &opened) != 0) continue;
      Face face(opened);
      if (!has_digits(face.get())) continue;
      names_.push_back(fmt::format("{} {}", face->family_name != nullptr ? face->family_name : "?",
                                   face->style_name != nullptr ? face->style_name : "?"));
      files_.push_back(file);
      faces_.push_back(std::move(face));
    }
    if (faces_.empty()) {
      throw ConfigError(
          "[data.digits] none of {} font files has all ten digits as outlines; install fonts-dejavu-core, or "
          "pass a folder of TrueType or OpenType fonts with --fonts",
          files.size());
    }
  }

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::string>& files() const { return files_; }

  Image draw(int64_t digit, DigitFormat format, SampleDraws& draws) {
    const bool grey = format == DigitFormat::kMnist;
    const int64_t side = grey ? 28 : 32;
    const double usual = grey ? 20.0 : 23.0;
    const auto font = static_cast<size_t>(draws.below(static_cast<int64_t>(faces_.size())));
    TRIREME_CHECK(load_digit(faces_[font].get(), digit), "[data.digits] {} no longer has the digit {}",
                  files_[font], digit);
    const std::vector<uint8_t> cover =
        render(faces_[font]->glyph->outline, side, usual * draws.uniform(0.75, 1.1), draws);
    return grey ? paint_grey(cover, side, draws) : paint_coloured(cover, side, draws);
  }

 private:
  /// How much of each pixel the digit covers, 0 to 255.
  std::vector<uint8_t> render(const FT_Outline& glyph, int64_t side, double height, SampleDraws& draws) {
    Outline outline(library_.handle, glyph);
    FT_Outline_Embolden(&outline.handle, std::lround(draws.uniform(-1.5, 4.5) * kUnits));
    outline.centre();
    const FT_Matrix form = drawn_form(outline.box(), height, draws);
    FT_Outline_Transform(&outline.handle, &form);
    outline.centre();
    const FT_BBox box = outline.box();
    const auto place = [&](FT_Pos low, FT_Pos high) {
      const double spare =
          std::max(0.0, static_cast<double>(side) * kUnits - static_cast<double>(high - low));
      return static_cast<FT_Pos>(
          std::lround(static_cast<double>(side) * kUnits / 2.0 + spare * draws.uniform(-0.35, 0.35)));
    };
    const FT_Pos right = place(box.xMin, box.xMax);
    FT_Outline_Translate(&outline.handle, right, place(box.yMin, box.yMax));
    std::vector<uint8_t> cover(static_cast<size_t>(side * side), 0);
    FT_Bitmap bitmap = {};
    bitmap.rows = bitmap.width = static_cast<unsigned>(side);
    bitmap.pitch = static_cast<int>(side);
    bitmap.buffer = cover.data();
    bitmap.num_grays = 256;
    bitmap.pixel_mode = FT_PIXEL_MODE_GRAY;
    const FT_Error error = FT_Outline_Get_Bitmap(library_.handle, &outline.handle, &bitmap);
    TRIREME_CHECK(error == 0, "[data.digits] FreeType failed to render: error {}", error);
    return cover;
  }

  FontLibrary library_;
  std::vector<Face> faces_;  // go before the library
  std::vector<std::string> names_, files_;
};

DigitPainter::DigitPainter(const std::vector<std::string>& files) : impl_(std::make_unique<Impl>(files)) {}

DigitPainter::~DigitPainter() = default;

const std::vector<std::string>& DigitPainter::fonts() const {
  return impl_->names();
}

const std::vector<std::string>& DigitPainter::files() const {
  return impl_->files();
}

Image DigitPainter::draw(int64_t digit, DigitFormat format, SampleDraws& draws) {
  return impl_->draw(digit, format, draws);
}

}  // namespace trireme::data
