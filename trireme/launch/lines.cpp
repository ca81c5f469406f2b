#include "trireme/launch/lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace trireme::launch {
namespace {

/// The length of a leading "HH:MM:SS ", or 0.
size_t time_stamp_size(std::string_view line) {
  constexpr std::string_view kShape = "00:00:00 ";
  if (line.size() < kShape.size()) return 0;
  for (size_t i = 0; i < kShape.size(); ++i) {
    const bool fits =
        kShape[i] == '0' ? std::isdigit(static_cast<unsigned char>(line[i])) != 0 : line[i] == kShape[i];
    if (!fits) return 0;
  }
  return kShape.size();
}

std::string prefix_of(int64_t rank) {
  return rank == 0 ? "" : fmt::format("[r{}] ", rank);
}

bool is_prefixed(int64_t rank, std::string_view line) {
  return line.substr(time_stamp_size(line)).starts_with(prefix_of(rank));
}

std::string_view key_of(int64_t rank, std::string_view line) {
  const std::string prefix = prefix_of(rank);
  line.remove_prefix(time_stamp_size(line));
  if (line.starts_with(prefix)) line.remove_prefix(prefix.size());
  return line;
}

/// The end of the escape sequence that begins at `start` (ECMA-48): of a control sequence after its final
/// byte, of a string such as a window's title after BEL or ESC \.
size_t escape_end(std::string_view line, size_t start) {
  const auto at = [&](size_t i) { return i < line.size() ? line[i] : '\0'; };
  const char kind = at(start + 1);
  size_t end = start + 2;
  if (kind == '[') {
    while (end < line.size() && (line[end] < '@' || line[end] > '~')) ++end;
    return std::min(end + 1, line.size());
  }
  if (std::string_view("]P_^X").find(kind) != std::string_view::npos) {
    while (end < line.size() && line[end] != '\a' && !(line[end] == '\x1b' && at(end + 1) == '\\')) ++end;
    return std::min(end + (at(end) == '\x1b' ? 2 : 1), line.size());
  }
  while (end <= line.size() && at(end - 1) >= ' ' && at(end - 1) <= '/') ++end;  // intermediate bytes
  return std::min(end, line.size());
}

}  // namespace

std::string without_escapes(std::string_view line) {
  std::string plain;
  for (size_t i = 0; i < line.size();) {
    const size_t escape = std::min(line.find('\x1b', i), line.size());
    plain += line.substr(i, escape - i);
    i = escape == line.size() ? escape : escape_end(line, escape);
  }
  return plain;
}

void LineSplitter::push(std::string_view bytes, const LineSink& sink) {
  for (size_t end; (end = bytes.find('\n')) != std::string_view::npos; bytes.remove_prefix(end + 1)) {
    line_ += bytes.substr(0, end);
    emit(sink);
  }
  line_ += bytes;
  forget_redrawn();
  if (line_.size() > kMaxLine) emit(sink);
}

void LineSplitter::finish(const LineSink& sink) {
  if (!line_.empty()) emit(sink);
}

void LineSplitter::emit(const LineSink& sink) {
  if (returns_ == Returns::kCollapse) {
    line_.resize(line_.find_last_not_of('\r') + 1);
    forget_redrawn();
  }
  sink(line_);
  line_.clear();
}

void LineSplitter::forget_redrawn() {
  if (returns_ == Returns::kKeep) return;
  // A return at the very end may belong to "\r\n": it overwrites nothing yet.
  const size_t visible_end = line_.find_last_not_of('\r');
  if (visible_end == std::string::npos) return;
  const size_t start = line_.rfind('\r', visible_end);
  if (start != std::string::npos) line_.erase(0, start + 1);
}

void LineMerger::add(int64_t rank, std::string_view line, double now) {
  const std::string_view key = key_of(rank, line);
  for (Held& held : held_) {
    if (held.key != key || std::ranges::count(held.ranks, rank) > 0) continue;
    if (rank < std::ranges::min(held.ranks)) held.text = line;
    held.ranks.push_back(rank);
    return;
  }
  held_.push_back(
      {.text = std::string(line), .key = std::string(key), .ranks = {rank}, .due = now + window_s_});
}

void LineMerger::take_due(double now, const LineSink& sink) {
  while (!held_.empty() && (held_.front().due <= now || held_.size() > kMaxHeld)) show_first(sink);
}

void LineMerger::take_all(const LineSink& sink) {
  while (!held_.empty()) show_first(sink);
}

void LineMerger::take_through(int64_t rank, const LineSink& sink) {
  const auto last = std::ranges::find_if(held_.rbegin(), held_.rend(), [rank](const Held& held) {
    return std::ranges::count(held.ranks, rank) > 0;
  });
  for (auto count = held_.rend() - last; count > 0; --count) show_first(sink);
}

std::optional<double> LineMerger::next_due() const {
  if (held_.empty()) return std::nullopt;
  return held_.front().due;
}

void LineMerger::drop_others(const std::vector<int64_t>& ranks) {
  std::erase_if(held_, [&](const Held& held) {
    return std::ranges::find_first_of(held.ranks, ranks) == held.ranks.end();
  });
}

void LineMerger::show_first(const LineSink& sink) {
  const Held& first = held_.front();
  const int64_t rank = std::ranges::min(first.ranks);
  std::string shown = is_prefixed(rank, first.text) ? first.text : prefix_of(rank) + first.text;
  if (first.ranks.size() > 1) shown += fmt::format(" (x{} ranks)", first.ranks.size());
  held_.pop_front();
  sink(shown);
}

}  // namespace trireme::launch
