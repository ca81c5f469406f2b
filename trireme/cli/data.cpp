// trireme data: image sets, got, made and looked at, and tokenizers of texts.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/download.h"
#include "trireme/cli/front.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

/// A data set that 'trireme data get' knows. Sizes and sums are those that the publishers' files have had for
/// years.
struct Published {
  const char* name;
  const char* what;
  const char* licence;
  const char* base;           ///< of the files, with a slash at the end
  const char* folder;         ///< in the archive; empty: files are taken as they are
  std::vector<Remote> files;  ///< url: relative to the base
};

const std::vector<Published>& published() {
  static const std::vector<Published> all = {
      {"cifar10",
       "CIFAR-10: 60,000 colour images of 32 x 32 pixels in 10 classes (Krizhevsky 2009)",
       "its authors name no licence; they ask to cite 'Learning Multiple Layers of Features from Tiny "
       "Images'",
       "https://www.cs.toronto.edu/~kriz/",
       "cifar-10-batches-bin",
       {{"cifar-10-binary.tar.gz", 170052171,
         "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"}}},
      {"cifar100",
       "CIFAR-100: 60,000 colour images of 32 x 32 pixels in 100 classes (Krizhevsky 2009)",
       "its authors name no licence; they ask to cite 'Learning Multiple Layers of Features from Tiny "
       "Images'",
       "https://www.cs.toronto.edu/~kriz/",
       "cifar-100-binary",
       {{"cifar-100-binary.tar.gz", 168513733,
         "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"}}},
      {"mnist",
       "MNIST: 70,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes, Burges 1998)",
       "CC BY-SA 3.0",
       "https://ossci-datasets.s3.amazonaws.com/mnist/",
       "",
       {{"train-images-idx3-ubyte.gz", 9912422,
         "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"},
        {"train-labels-idx1-ubyte.gz", 28881,
         "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"},
        {"t10k-images-idx3-ubyte.gz", 1648877,
         "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"},
        {"t10k-labels-idx1-ubyte.gz", 4542,
         "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"}}}};
  return all;
}

struct GetOptions {
  std::string name, out, from;
};

int64_t bytes_of(const Published& set) {
  int64_t bytes = 0;
  for (const Remote& file : set.files) bytes += file.bytes;
  return bytes;
}

int get(GetOptions options, const Front& front) {
  const auto& all = published();
  const auto found = std::ranges::find(all, options.name, &Published::name);
  if (found == all.end()) {
    throw UsageError(fmt::format("[cli.data] there is no data set '{}'", options.name),
                     "choose cifar10, cifar100 or mnist");
  }
  const std::string base = options.from.empty() ? found->base : options.from + "/";
  const std::string out = options.out.empty() ? "data/" + options.name : options.out;
  const bool packed = found->folder[0] != '\0';
  const fs::path unpacked = fs::path(out) / found->folder;
  log_info("{}", found->what);
  log_info("licence {}", found->licence);
  if (packed && fs::exists(unpacked)) {
    log_info("{} exists already; nothing to do", unpacked.string());
    fmt::print("{}\n", out);
    return 0;
  }
  log_info("{} from {}", format_bytes(static_cast<double>(bytes_of(*found))), base);
  for (const Remote& file : found->files) {
    const std::string path = out + "/" + file.url;
    download({.url = base + file.url, .bytes = file.bytes, .sha256 = file.sha256}, path, front.environment);
    if (!packed) continue;
    unpack(path, found->folder, out, front.environment);
    fs::remove(path);
  }
  fmt::print("{}\n", out);
  return 0;
}

void add_get(CLI::App& data, Front& front) {
  auto options = std::make_shared<GetOptions>();
  CLI::App* verb = data.add_subcommand("get", "Download a public data set and check its checksum");
  verb->add_option("NAME", options->name, "cifar10, cifar100 or mnist")->required()->option_text(" ");
  verb->add_option("--out", options->out, "Folder (default: data/NAME)")->option_text("DIR");
  verb->add_option("--from", options->from, "URL of a mirror folder with the same files")->option_text("URL");
  verb->footer(
      "Prints size and licence first. An interrupted download continues where it stopped; files that are\n"
      "complete are not downloaded again. Needs curl, tar and sha256sum.\n"
      "Example:\n"
      "  trireme data get cifar10");
  verb->callback([options, &front] { front.action = [options, &front] { return get(*options, front); }; });
}

void add_make(CLI::App& data, Front& front) {
  auto request = std::make_shared<Request>();
  DataOptions& options = request->data;
  options.threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  CLI::App* make = data.add_subcommand("make", "Make a data set without a network");
  make->require_subcommand(1);
  CLI::App* verb = make->add_subcommand("digits", "Draw digits from this system's fonts");
  verb->add_option("--out", options.path, "Folder (default: data/digits-FORMAT)")->option_text("DIR");
  verb->add_option("--format", options.format, "cifar10: 3 x 32 x 32 in colour; mnist: 1 x 28 x 28")
      ->check(CLI::IsMember({"cifar10", "mnist"}));
  CLI::Option* const train =
      verb->add_option("--train", options.train, "Training images (default: 50000; mnist: 60000)");
  train->option_text("N");
  verb->add_option("--test", options.test, "Validation images (default: 10000)")->option_text("N");
  verb->add_option("--seed", options.seed, "Seed of the drawings")
      ->option_text("N")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  verb->add_option("--fonts", options.fonts,
                   "Use the TrueType or OpenType files in this folder instead of the system's")
      ->option_text("DIR");
  verb->add_flag("--json", request->json, "Print one JSON document");
  verb->footer(
      "The files have the format of CIFAR-10's binary version or of MNIST, but none of their images. The "
      "same\n"
      "seed, fonts and FreeType give the same bytes; digits.json records what they were made from.\n"
      "Example:\n"
      "  trireme data make digits --format mnist");
  verb->callback([request, train, &front] {
    front.action = [request, train, &front]() -> int {
      DataOptions& wanted = request->data;
      // By default as many as the real set with files of this format has.
      if (train->count() == 0) wanted.train = wanted.format == "mnist" ? 60000 : 50000;
      if (wanted.path.empty()) wanted.path = "data/digits-" + wanted.format;
      request->verb = "data";
      wanted.action = "make_digits";
      exec_worker(front.environment, *request);
    };
  });
}

void add_info(CLI::App& data, Front& front) {
  auto request = std::make_shared<Request>();
  CLI::App* verb = data.add_subcommand("info", "Show what training would read from a folder of images");
  verb->add_option("PATH", request->data.path, "Folder of CIFAR, MNIST or image files")
      ->required()
      ->option_text(" ");
  verb->add_option("--sheet", request->data.sheet, "Write a PNG with the first images of each class here")
      ->option_text("FILE");
  verb->add_flag("--json", request->json, "Print one JSON document");
  verb->callback([request, &front] {
    front.action = [request, &front]() -> int {
      request->verb = "data";
      request->data.action = "info";
      exec_worker(front.environment, *request);
    };
  });
}

}  // namespace

void add_data(CLI::App& app, Front& front) {
  CLI::App* data = app.add_subcommand("data", "Download, make and inspect data sets, and train tokenizers");
  data->require_subcommand(1);
  add_get(*data, front);
  add_make(*data, front);
  add_info(*data, front);
  add_data_inspect(*data, front);
  add_data_train_tokenizer(*data, front);
}

}  // namespace trireme::cli
