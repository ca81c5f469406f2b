#include "trireme/launch/tee.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::launch {
namespace {

std::unique_ptr<RankLog> open_log(const std::string& dir, int64_t rank) {
  if (dir.empty()) return nullptr;
  return std::make_unique<RankLog>(fmt::format("{}/rank-{}.log", dir, rank));
}

LineSplitter splitter_of(int64_t rank, Stream stream) {
  const bool is_result = rank == 0 && stream == Stream::kOut;
  return LineSplitter(is_result ? LineSplitter::Returns::kKeep : LineSplitter::Returns::kCollapse);
}

}  // namespace

void RankLog::append(std::string_view line) {
  const std::string text = without_escapes(line);
  if (file_ == nullptr || (text.empty() && !line.empty())) return;  // a bar that was wiped away is no line
  try {
    file_->append(text);
  } catch (const EnvironmentError& error) {
    file_.reset();
    log_warning("{}; the job continues without {}", error.what(), path_);
  }
}

Tee::Tee(const TeeOptions& options)
    : options_(options),
      out_(STDOUT_FILENO, "standard output"),
      err_(STDERR_FILENO, "standard error"),
      merger_(options.ranks > 1 ? options.merge_window_s : 0.0) {
  if (!options.log_dir.empty()) make_directories(options.log_dir);
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    streams_.push_back({.out = splitter_of(rank, Stream::kOut),
                        .err = splitter_of(rank, Stream::kErr),
                        .log = open_log(options.log_dir, rank)});
  }
}

void Tee::feed(int64_t rank, Stream stream, std::string_view bytes, double now) {
  RankStreams& of = streams_[static_cast<size_t>(rank)];
  if (rank == 0 && stream == Stream::kOut && !held_) show_before_results();
  if (passes_raw(rank, stream)) stream == Stream::kOut ? out_.write(bytes) : show_raw_err(bytes);
  LineSplitter& splitter = stream == Stream::kOut ? of.out : of.err;
  splitter.push(bytes, [&](std::string_view line) { take_line(rank, stream, line, now); });
}

void Tee::end(int64_t rank, Stream stream, double now) {
  RankStreams& of = streams_[static_cast<size_t>(rank)];
  LineSplitter& splitter = stream == Stream::kOut ? of.out : of.err;
  splitter.finish([&](std::string_view line) { take_line(rank, stream, line, now); });
}

void Tee::tick(double now) {
  if (!held_) merger_.take_due(now, [this](std::string_view line) { show_line(line); });
}

void Tee::show_only(std::vector<int64_t> ranks) {
  merger_.drop_others(ranks);
  only_ = std::move(ranks);
}

void Tee::settle() {
  merger_.take_all([this](std::string_view line) { show_line(line); });
  leave_open_line();
}

bool Tee::passes_raw(int64_t rank, Stream stream) const {
  return rank == 0 && (stream == Stream::kOut || options_.terminal);
}

void Tee::take_line(int64_t rank, Stream stream, std::string_view line, double now) {
  if (const auto& log = streams_[static_cast<size_t>(rank)].log) log->append(line);
  const bool heard = !only_ || std::ranges::count(*only_, rank) > 0;
  if (passes_raw(rank, stream) || !heard) return;
  merger_.add(rank, line, now);
  tick(now);
}

void Tee::show_raw_err(std::string_view bytes) {
  if (bytes.empty()) return;
  const size_t line_start = bytes.rfind('\n') + 1;  // npos + 1 is 0
  const bool returns = bytes.substr(line_start).find('\r') != std::string_view::npos;
  line_is_bar_ = returns || (line_start == 0 && line_open_ && line_is_bar_);
  line_open_ = bytes.back() != '\n';
  err_.write(bytes);
}

void Tee::show_line(std::string_view line) {
  leave_open_line();
  err_.write((options_.terminal ? std::string(line) : without_escapes(line)) + '\n');
}

/// Shows the lines that rank 0 wrote to stderr before a result of its own.
void Tee::show_before_results() {
  merger_.take_through(0, [this](std::string_view line) { show_line(line); });
}

void Tee::leave_open_line() {
  if (!line_open_) return;
  constexpr std::string_view kClearLine = "\r\x1b[K";
  err_.write(line_is_bar_ ? kClearLine : "\n");  // a bar is drawn anew; other text would be lost
  line_open_ = false;
}

}  // namespace trireme::launch
