#include "trireme/report/step_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "trireme/base/text.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

std::string non_finite(double value) {
  if (std::isnan(value)) return "NaN";
  return value > 0 ? "Inf" : "-Inf";
}

std::string signal_name(int number) {
  const char* name = ::sigabbrev_np(number);
  return name == nullptr ? fmt::format("signal {}", number) : fmt::format("SIG{}", name);
}

/// Six characters up to 9999: 3.1207, 10.825, 123.46.
std::string loss_text(double loss) {
  if (!std::isfinite(loss)) return non_finite(loss);
  const double size = std::fabs(loss);
  return fmt::format("{:.{}f}", loss, size < 9.99995 ? 4 : size < 99.9995 ? 3 : size < 999.995 ? 2 : 1);
}

/// At most three digits in at most five characters: 0.006, 0.06, 1.92, 48.1, 350, 2e+06, 3e-04.
std::string short_number(double value) {
  if (!std::isfinite(value)) return non_finite(value);
  const double size = std::fabs(value);
  if (size != 0.0 && (size < 0.00095 || size >= 99999.5)) return fmt::format("{:.0e}", value);
  const bool tiny = size != 0.0 && size < 0.00995;
  return fmt::format("{:.{}f}", value, tiny ? 3 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

std::string rate_text(double tokens_per_s) {
  return std::isfinite(tokens_per_s) ? format_count(tokens_per_s) : non_finite(tokens_per_s);
}

const char* rate_unit(bool reads_images) {
  return reads_images ? "img/s" : "tok/s";
}

/// "  val 0.0512 (98.6%)": the loss, and of images the share that was right.
std::string validation_text(const std::optional<double>& loss, const std::optional<double>& top1,
                            const std::map<std::string, double>& metrics) {
  if (!loss) return {};
  std::string text = "  val " + loss_text(*loss);
  if (top1) text += fmt::format(" ({:.1f}%)", 100.0 * *top1);
  for (const auto& [name, value] : metrics) text += fmt::format(" {} {}", name, loss_text(value));
  return text;
}

std::string step_text(int64_t step, int64_t total) {
  const std::string of = std::to_string(total);
  return fmt::format("{:>{}}/{}", step, of.size(), of);
}

/// TFLOP/s of one rank, and its share of the device's peak where that is known.
std::string flops_text(double tflops_per_rank, const ConsoleOptions& options) {
  if (tflops_per_rank <= 0.0) return "";
  std::string text = fmt::format("  {:>5} TFLOP/s/rank", short_number(tflops_per_rank));
  if (options.peak_flops > 0.0)
    text += fmt::format("  mfu {:>4.1f}%", 100.0 * 1e12 * tflops_per_rank / options.peak_flops);
  return text;
}

/// The allocator's active and reserved bytes, printed beside the peak; empty without one.
std::string memory_detail(const StepRecord& record) {
  if (record.reserved_bytes == 0) return {};
  return fmt::format(" ({} active, {} reserved)", format_bytes(static_cast<double>(record.active_bytes)),
                     format_bytes(static_cast<double>(record.reserved_bytes)));
}

/// Steps that this attempt has made.
std::string done_text(const RunSummary& summary) {
  const int64_t made = summary.steps - summary.resumed_at;
  if (summary.resumed_at == 0) return fmt::format("done {} step{}", made, made == 1 ? "" : "s");
  if (made == 0) return fmt::format("done 0 steps ({} was the last)", summary.steps);
  return made == 1 ? fmt::format("done 1 step ({})", summary.steps)
                   : fmt::format("done {} steps ({} to {})", made, summary.resumed_at + 1, summary.steps);
}

}  // namespace

std::string format_eta(double seconds) {
  return seconds < 99.5 ? fmt::format("{:.0f} s", seconds) : format_duration(seconds);
}

std::string step_line(const StepRecord& record, const ConsoleOptions& options, std::optional<double> eta_s,
                      int64_t detail) {
  std::string line;
  const auto add = [&](int64_t from_detail, const std::string& text) {
    if (detail >= from_detail) line += text;
  };
  add(0, fmt::format("step {}  loss {:>6}", step_text(record.step, options.total_steps),
                     loss_text(record.loss)));
  add(5, fmt::format("  gnorm {:>5}", short_number(record.grad_norm)));
  add(6, fmt::format("  lr {:.1e}", record.lr));
  add(1, fmt::format("  {:>5} {}", rate_text(record.tokens_per_s), rate_unit(options.reads_images)));
  const double per_rank = record.tokens_per_s / static_cast<double>(std::max<int64_t>(options.ranks, 1));
  add(9, fmt::format(" ({:>5}/rank)", rate_text(per_rank)));
  add(7, flops_text(record.tflops_per_rank, options));
  add(3, fmt::format("  {:>5} ms", short_number(record.step_ms)));
  add(8, fmt::format("  {:>5} steps/s", short_number(record.steps_per_s())));
  add(4, "  peak " + format_bytes(static_cast<double>(record.peak_bytes)));
  add(10, memory_detail(record));
  if (eta_s && *eta_s > 0.0) add(2, "  eta " + format_eta(*eta_s));
  if (record.loss_scale) add(5, fmt::format("  scale {:g}", *record.loss_scale));
  if (record.skipped) add(0, " (skipped)");
  return line + validation_text(record.val_loss, record.val_top1, record.val_metrics);
}

std::string early_end_text(const EarlyEnd& end) {
  if (!end.reason.empty()) return fmt::format("ended after step {}: {}", end.step, end.reason);
  const std::string what =
      end.best_value
          ? fmt::format("the validation {} was {} after step {}, and no {} in the", end.metric,
                        loss_text(*end.best_value), end.best_step, end.higher_is_better ? "higher" : "lower")
          : fmt::format("the validation {} was not finite in the", end.metric);
  return fmt::format("ended after step {}: {} {} validation{} since (train.early_stop)", end.step, what,
                     end.validations, end.validations == 1 ? "" : "s");
}

std::string done_line(const RunSummary& summary, int64_t total_steps, bool reads_images) {
  const std::string time = format_duration(summary.wall_s);
  std::string line = summary.stop_signal == 0
                         ? fmt::format("{} in {}", done_text(summary), time)
                         : fmt::format("interrupted by {} after step {} of {}, in {}",
                                       signal_name(summary.stop_signal), summary.steps, total_steps, time);
  line += "  loss " + loss_text(summary.final_loss);
  line += validation_text(summary.final_val_loss, summary.final_val_top1, summary.final_val_metrics);
  line += fmt::format("  {} {}  peak {}", rate_text(summary.tokens_per_s), rate_unit(reads_images),
                      format_bytes(static_cast<double>(summary.peak_bytes)));
  if (!summary.weights_digest.empty()) {
    line += "  weights " + summary.weights_digest;
    if (!summary.why_bits_vary.empty()) line += " (bits may vary)";
  }
  return line;
}

std::string whereabouts(const RunSummary& summary, const std::string& run, bool reads_images, int64_t ranks) {
  const bool kept = !summary.weights_path.empty();
  std::string text = kept ? "weights " + summary.weights_path
                          : fmt::format("run     {}, without weights (checkpoint.final_weights=false)", run);
  if (!summary.best_weights_path.empty())
    text += fmt::format("\nbest    {} (step {})", summary.best_weights_path, summary.best_step);
  if (summary.early_end) text += "\nearly   " + early_end_text(*summary.early_end);
  if (summary.stop_signal == 0) return text;
  text += "\nnext    ";
  if (kept && !reads_images)
    text += fmt::format("'trireme generate {}' continues a text with these weights; ", run);
  if (summary.checkpoints > 0 || summary.resumed_at > 0)
    return text + fmt::format("'{}' continues from its last checkpoint", resume_command(run, ranks));
  return text + fmt::format("'{}' trains again, from step 1", again_command(run, ranks));
}

std::string progress_bar(const StepRecord& record, int64_t total_steps, std::optional<double> eta_s,
                         int64_t columns, bool reads_images) {
  constexpr int64_t kWidth = 20;
  const int64_t filled =
      total_steps > 0 ? std::clamp<int64_t>(record.step * kWidth / total_steps, 0, kWidth) : 0;
  std::string bar = fmt::format("[{:.<{}}] {}  loss {}  {} {}", std::string(static_cast<size_t>(filled), '#'),
                                kWidth, step_text(record.step, total_steps), loss_text(record.loss),
                                rate_text(record.tokens_per_s), rate_unit(reads_images));
  if (eta_s && *eta_s > 0.0) bar += "  eta " + format_eta(*eta_s);
  if (static_cast<int64_t>(bar.size()) > columns)
    bar.resize(static_cast<size_t>(std::max<int64_t>(columns, 0)));
  return bar;
}

}  // namespace trireme::report
