#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/images/digits.h"
#include "trireme/data/images/loader.h"
#include "trireme/data/images/set.h"
#include "trireme/plan/config.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMeasured = 10000;  ///< images that mean and deviation are taken over

int make_digits(const Request& request) {
  const DataOptions& options = request.data;
  const bool grey = options.format == "mnist";
  const std::string folder = options.fonts.empty() ? "this system's font folders" : options.fonts;
  std::vector<std::string> fonts =
      options.fonts.empty() ? data::system_fonts() : data::fonts_below(options.fonts);
  if (fonts.empty()) {
    throw EnvironmentError(
        "[cli.data] there are no TrueType or OpenType files in {}; install fonts-dejavu-core, or pass a "
        "folder of fonts with --fonts",
        folder);
  }
  const data::MadeDigits made =
      data::make_digits({.folder = options.path,
                         .format = grey ? data::DigitFormat::kMnist : data::DigitFormat::kCifar10,
                         .train = options.train,
                         .test = options.test,
                         .seed = static_cast<uint64_t>(options.seed),
                         .threads = options.threads,
                         .fonts = std::move(fonts)});
  if (request.json) {
    std::cout << Json{{"schema", "trireme.data.make/1"},
                      {"folder", options.path},
                      {"format", options.format},
                      {"train", made.train},
                      {"test", made.test},
                      {"seed", options.seed},
                      {"digest", made.digest},
                      {"fonts", made.fonts},
                      {"was_there", made.was_there}}
                     .dump(2)
              << "\n";
    return 0;
  }
  log_info("{} {} + {} digits from {} fonts, digest {}",
           made.was_there ? "found:" : "drawn:", with_commas(made.train), with_commas(made.test),
           made.fonts.size(), made.digest);
  std::cout << options.path << "\n";
  return 0;
}

std::vector<int64_t> class_counts(const data::ImageSet& images) {
  std::vector<int64_t> counts(images.classes().size(), 0);
  for (int64_t i = 0; i < images.size(); ++i) ++counts[static_cast<size_t>(images.label(i))];
  return counts;
}

Json describe_split(const data::ImageSet& images) {
  const data::PixelStatistics pixels = data::measure_pixels(images, kMeasured);
  Json split{{"images", images.size()}, {"by_class", class_counts(images)}};
  if (const auto& shape = images.shape()) split["shape"] = {shape->channels, shape->height, shape->width};
  split["measured"] = pixels.images;
  split["mean"] = pixels.mean;
  split["deviation"] = pixels.deviation;
  return split;
}

/// The first images of each class, a class a row.
data::Image sheet_of(const data::ImageSet& images) {
  constexpr size_t kMostRows = 40, kColumns = 20;
  constexpr int64_t kSide = 64;  // of images that differ in size
  const data::ImageShape each = images.shape().value_or(data::ImageShape{3, kSide, kSide});
  std::vector<std::vector<int64_t>> rows(std::min(kMostRows, images.classes().size()));
  for (int64_t i = 0; i < images.size(); ++i) {
    const auto label = static_cast<size_t>(images.label(i));
    if (label < rows.size() && rows[label].size() < kColumns) rows[label].push_back(i);
  }
  const auto lines = static_cast<int64_t>(rows.size());
  data::Image sheet{.shape = {each.channels, each.height * lines, each.width * int64_t{kColumns}},
                    .pixels = {}};
  const int64_t width = sheet.shape.width * each.channels;
  sheet.pixels.assign(static_cast<size_t>(sheet.shape.height * width), 0);
  const auto channels = static_cast<size_t>(each.channels);
  const data::ImageTransform resize{.shape = each,
                                    .mean = std::vector<double>(channels, 0.0),
                                    .deviation = std::vector<double>(channels, 1.0 / 255.0),
                                    .centre = 1.0};
  std::vector<float> values(static_cast<size_t>(each.height * each.width * each.channels));
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t column = 0; column < rows[row].size(); ++column) {
      data::SampleDraws none(0, 0, 0);
      try {
        data::transform_image(images.read(rows[row][column], kSide), resize, none,
                              {.values = values.data(),
                               .channel = 1,
                               .row = each.width * each.channels,
                               .column = each.channels});
      } catch (const data::BrokenImage&) {
        continue;  // its place stays black
      }
      for (int64_t y = 0; y < each.height; ++y) {
        for (int64_t x = 0; x < each.width * each.channels; ++x) {
          const int64_t line = static_cast<int64_t>(row) * each.height + y;
          const int64_t place = static_cast<int64_t>(column) * each.width * each.channels + x;
          const float value = values[static_cast<size_t>(y * each.width * each.channels + x)];
          sheet.pixels[static_cast<size_t>(line * width + place)] =
              static_cast<uint8_t>(std::clamp(value + 0.5F, 0.0F, 255.0F));
        }
      }
    }
  }
  return sheet;
}

void print_splits(const Json& document, const data::ImageSet& train) {
  fmt::print("{}: {}, {} classes\n", document["folder"].get<std::string>(),
             document["format"].get<std::string>(), train.classes().size());
  for (const char* name : {"train", "val"}) {
    if (!document.contains(name)) continue;
    const Json& split = document[name];
    fmt::print("{:<6} {} images{}, mean {:.4f}, deviation {:.4f}\n", name,
               with_commas(split["images"].get<int64_t>()),
               train.shape() ? " of " + train.shape()->to_string() : " of several sizes",
               fmt::join(split["mean"].get<std::vector<double>>(), " "),
               fmt::join(split["deviation"].get<std::vector<double>>(), " "));
  }
  const bool has_val = document.contains("val");
  report::Table table({{"label", report::Align::kRight},
                       {"class"},
                       {"train", report::Align::kRight},
                       {"val", report::Align::kRight}});
  for (size_t i = 0; i < train.classes().size(); ++i) {
    table.add_row({std::to_string(i), train.classes()[i],
                   std::to_string(document["train"]["by_class"][i].get<int64_t>()),
                   has_val ? std::to_string(document["val"]["by_class"][i].get<int64_t>()) : ""});
  }
  fmt::print("{}", table.to_string());
  for (const auto& note : document["notes"]) log_warning("{}", note.get<std::string>());
  if (const auto why = document["why_no_val"].get<std::string>(); !why.empty())
    log_warning("there are no held-out images: {}", why);
}

int data_info(const Request& request) {
  const data::ImageSplits splits =
      data::open_images({.path = request.data.path, .val_fraction = plan::DataConfig().val_fraction});
  Json document{{"schema", "trireme.data.info/1"},
                {"folder", splits.folder},
                {"format", splits.format},
                {"classes", splits.train->classes()},
                {"train", describe_split(*splits.train)},
                {"notes", splits.notes},
                {"why_no_val", splits.why_no_val}};
  if (splits.val) document["val"] = describe_split(*splits.val);
  if (!request.data.sheet.empty())
    write_file_atomic(request.data.sheet, data::encode_png(sheet_of(*splits.train)));
  if (request.json) {
    std::cout << document.dump(2) << "\n";
  } else {
    print_splits(document, *splits.train);
  }
  return 0;
}

}  // namespace

int worker_data(const Request& request) {
  if (request.data.action == "make_digits") return make_digits(request);
  if (request.data.action == "info") return data_info(request);
  if (request.data.action == "bench") return worker_bench_images(request);
  throw LogicError("[cli.data] action '{}' is unknown", request.data.action);
}

}  // namespace trireme::cli
