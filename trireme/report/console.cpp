#include "trireme/report/console.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/streams.h"
#include "trireme/base/utf8.h"
#include "trireme/report/run_dir.h"
#include "trireme/report/step_line.h"

namespace trireme::report {
namespace {

/// Whoever takes lines, else standard output, until it fails: whoever has left off reading it (`| head -1`)
/// has not broken the run, whose records are in its directory.
class Lines {
 public:
  explicit Lines(const ConsoleOptions& options) : write_(options.write), on_lost_(options.on_lost) {}

  void print(std::string line) {
    if (lost_) return;
    line += '\n';
    if (write_) return write_(line);
    try {
      write_all(STDOUT_FILENO, line.data(), line.size(), "standard output");
    } catch (const EnvironmentError& error) {
      lost_ = true;
      log_warning("step lines can no longer be printed: {}; the run continues", error.what());
      if (on_lost_ && !reader_left(STDOUT_FILENO)) on_lost_();
    }
  }

 private:
  std::function<void(const std::string&)> write_;
  std::function<void()> on_lost_;
  bool lost_ = false;
};

/// Time to go, from the median of the latest steps: one slow step (a checkpoint, a validation) does not move
/// it.
class EtaEstimator {
 public:
  void add(double step_ms) {
    recent_.push_back(step_ms);
    if (recent_.size() > kWindow) recent_.pop_front();
  }

  std::optional<double> seconds(int64_t steps_left) const {
    if (recent_.empty() || steps_left <= 0) return std::nullopt;
    std::vector<double> sorted(recent_.begin(), recent_.end());
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle * 1e-3 * static_cast<double>(steps_left);
  }

 private:
  static constexpr size_t kWindow = 33;
  std::deque<double> recent_;
};

/// A line of the terminal that is redrawn in place, with the cursor left at its start: a step line that
/// overtakes the bar's removal on its way through another pipe then overwrites it. Losing the terminal is no
/// reason to end a run: errors are ignored.
class ProgressBar {
 public:
  ProgressBar() = default;
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  bool due() const { return monotonic_seconds() - drawn_at_ >= kPeriod; }

  void draw(const std::string& text) {
    send("\r" + text + "\x1b[K\r");
    visible_ = true;
    drawn_at_ = monotonic_seconds();
  }

  void clear() {
    if (visible_) send("\r\x1b[K");
    visible_ = false;
  }

 private:
  static constexpr double kPeriod = 0.1;  ///< seconds; faster than this nobody reads

  static void send(const std::string& text) {
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  }

  bool visible_ = false;
  double drawn_at_ = -kPeriod;
};

class JsonConsole final : public Sink {
 public:
  explicit JsonConsole(const ConsoleOptions& options) : run_(options.run), lines_(options) {}

  void record(const StepRecord& step) override { print(to_json_line(step), "step"); }
  void finish(const RunSummary& summary) override {
    print(to_json_line(summary), "summary",
          run_.empty() ? "" : fmt::format(R"(,"run":{})", nlohmann::json(run_).dump()));
  }

 private:
  /// The members of an object, and behind them what it is.
  void print(std::string object, std::string_view type, std::string_view more = "") {
    object.pop_back();
    lines_.print(fmt::format(R"({}{},"schema":"trireme.train/1","type":"{}"}})", object, more, type));
  }

  std::string run_;
  Lines lines_;
};

class TextConsole final : public Sink {
 public:
  explicit TextConsole(const ConsoleOptions& options) : options_(options), lines_(options) {
    if (width(options.bar_columns) > 0 && !options.quiet) bar_.emplace();
  }

  void begin(int64_t steps) override { options_.total_steps = steps; }

  void record(const StepRecord& step) override {
    eta_.add(step.step_ms);
    const auto eta_s = eta_.seconds(options_.total_steps - step.step);
    if (deserves_line(step)) {
      print(fitting_line(step, eta_s));
    } else if (bar_ && bar_->due()) {
      bar_->draw(progress_bar(step, options_.total_steps, eta_s, width(options_.bar_columns) - 1,
                              options_.reads_images));
    }
  }

  void finish(const RunSummary& summary) override {
    print(done_line(summary, options_.total_steps, options_.reads_images));
    if (!options_.run.empty()) {
      RunSummary typed = summary;
      if (!typed.weights_path.empty()) typed.weights_path = as_typed(typed.weights_path);
      if (!typed.best_weights_path.empty()) typed.best_weights_path = as_typed(typed.best_weights_path);
      lines_.print(whereabouts(typed, as_typed(options_.run), options_.reads_images, options_.ranks_asked));
    }
    if (!summary.sample.empty()) lines_.print("sample:\n" + printable(summary.sample));
  }

 private:
  static int64_t width(const std::function<int64_t()>& columns) { return columns ? columns() : 0; }

  /// A line that does not wrap. What one line had no room for, later ones leave out as well, so that columns
  /// stay where they are, until the terminal has another width.
  std::string fitting_line(const StepRecord& step, std::optional<double> eta_s) {
    const int64_t columns = width(options_.line_columns);
    if (columns != columns_) detail_ = kFullDetail;
    columns_ = columns;
    std::string line = step_line(step, options_, eta_s, detail_);
    while (columns > 0 && std::ssize(line) > columns && detail_ > 0)
      line = step_line(step, options_, eta_s, --detail_);
    return line;
  }

  bool deserves_line(const StepRecord& step) const {
    if (step.step == 1 || step.step == options_.total_steps || step.val_loss) return true;
    return options_.log_every > 0 && step.step % options_.log_every == 0;
  }

  void print(std::string line) {
    if (bar_) bar_->clear();
    lines_.print(std::move(line));
  }

  ConsoleOptions options_;
  Lines lines_;
  EtaEstimator eta_;
  std::optional<ProgressBar> bar_;
  int64_t columns_ = 0;  ///< of the terminal at the last line; 0: there is none
  int64_t detail_ = kFullDetail;
};

}  // namespace

std::unique_ptr<Sink> make_console_sink(const ConsoleOptions& options) {
  if (options.json) return std::make_unique<JsonConsole>(options);
  return std::make_unique<TextConsole>(options);
}

}  // namespace trireme::report
