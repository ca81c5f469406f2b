#include "trireme/data/images/builtin.h"

#include <filesystem>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/data/lock.h"
#include "trireme/data/posix.h"

namespace trireme::data {
namespace {

namespace fs = std::filesystem;

constexpr double kDigitsLockTimeout_s = 300.0;  // without a sign of life of the process that draws

/// Other fonts, or another version of one, draw other digits.
std::string name_of(const BuiltinDigits& wanted, const std::vector<std::string>& fonts) {
  StreamingHash hash;
  const auto add = [&hash](const std::string& text) { hash.update(text.data(), text.size() + 1); };
  for (const std::string& font : fonts) {
    add(font);
    add(std::to_string(fs::file_size(font)));
  }
  return fmt::format("digits-{}-{}-{}-{}", wanted.format == DigitFormat::kMnist ? "mnist" : "cifar10",
                     wanted.train, wanted.test, hex64(hash.digest()));
}

/// Holds the lock of `folder`.
void draw_digits(const BuiltinDigits& wanted, std::vector<std::string> fonts, const std::string& folder,
                 FileLock& lock) {
  TemporaryFolder unfinished(folder + ".tmp");
  ProgressMeter meter(wanted.on_progress);
  meter.expect(wanted.train + wanted.test);
  int64_t drawn = 0;
  make_digits({.folder = unfinished.path(),
               .format = wanted.format,
               .train = wanted.train,
               .test = wanted.test,
               .threads = wanted.threads,
               .fonts = std::move(fonts),
               .on_progress = [&](int64_t done, int64_t) {
                 lock.show_life();
                 meter.add(done - std::exchange(drawn, done));
               }});
  unfinished.commit(folder);
}

}  // namespace

std::string prepare_builtin_digits(const BuiltinDigits& wanted) {
  std::vector<std::string> fonts = system_fonts();
  if (fonts.empty()) {
    throw EnvironmentError(
        "[data.digits] data.path=builtin means digits drawn from this system's fonts, but there are none; "
        "install fonts-dejavu-core, or set data.path to a folder of images (trireme data get cifar10)");
  }
  const std::string folder = wanted.cache_dir + "/data/" + name_of(wanted, fonts);
  if (fs::exists(folder)) return folder;
  make_directories(wanted.cache_dir + "/data");
  ProgressMeter waiting(wanted.on_progress);
  FileLock lock(folder + ".lock", kDigitsLockTimeout_s,
                [&](bool alive) { alive ? waiting.beat() : waiting.tell(); });
  if (!fs::exists(folder)) draw_digits(wanted, std::move(fonts), folder, lock);
  return folder;
}

}  // namespace trireme::data
