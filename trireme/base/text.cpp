#include "trireme/base/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "trireme/base/utf8.h"

namespace trireme {
namespace {

/// Letters to insert, remove or replace, and neighbours to exchange, until `a` is `b`.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> edits(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) edits[i][0] = i;
  std::iota(edits[0].begin(), edits[0].end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
    }
  }
  return edits[a.size()][b.size()];
}

/// Dashes before an option's name are no letters of it.
std::string_view without_dashes(std::string_view word) {
  return word.substr(std::min(word.find_first_not_of('-'), word.size()));
}

/// `value` with three significant digits.
std::string three_digits(double value) {
  const double size = std::fabs(value);
  return fmt::format("{:.{}f}", value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

template <size_t kSize>
std::string scaled(double value, double base, const std::array<const char*, kSize>& units) {
  size_t unit = 0;
  while (std::fabs(value) >= base * 0.9995 && unit + 1 < kSize) {
    value /= base;
    ++unit;
  }
  const bool whole = unit == 0 && value == std::floor(value);
  return (whole ? fmt::format("{:.0f}", value) : three_digits(value)) + units[unit];
}

}  // namespace

std::string nearest_name(std::string_view word, std::span<const std::string> candidates) {
  std::string best;
  const size_t letters = without_dashes(word).size();
  size_t best_distance = 1 + std::max<size_t>(1, (letters + 1) / 3);  // fewer edits than this
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    // Of two that are equally near, the one that starts with `word` wins.
    const bool completes =
        !best.empty() && distance == best_distance && candidate.starts_with(word) && !best.starts_with(word);
    if (distance < best_distance || completes) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string format_count(double value) {
  return scaled(value, 1000.0, std::array<const char*, 5>{"", "k", "M", "B", "T"});
}

std::string format_bytes(double bytes) {
  return scaled(bytes, 1024.0, std::array<const char*, 5>{" B", " KiB", " MiB", " GiB", " TiB"});
}

std::string format_duration(double seconds) {
  if (seconds < 1e-3) return three_digits(seconds * 1e6) + " us";
  if (seconds < 1.0) return three_digits(seconds * 1e3) + " ms";
  if (seconds < 100.0) return three_digits(seconds) + " s";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  return fmt::format("{}h {:02}m", whole / 3600, whole % 3600 / 60);
}

std::string number_text(double value) {
  return std::isnan(value) ? "nan" : fmt::format("{}", value);
}

std::string join(std::span<const std::string> parts, std::string_view separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

std::string some_of(std::span<const std::string> names) {
  constexpr size_t kShown = 8;
  std::vector<std::string> shown;
  for (const std::string& name : names.first(std::min(names.size(), kShown)))
    shown.push_back(printable(name));
  return join(shown, ", ") +
         (names.size() > kShown ? fmt::format(" and {} more", names.size() - kShown) : "");
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end = text.find(separator); end != std::string_view::npos; end = text.find(separator, begin)) {
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.emplace_back(text.substr(begin));
  return parts;
}

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value);
  const int64_t first = value < 0 ? 1 : 0;
  for (int64_t position = static_cast<int64_t>(digits.size()) - 3; position > first; position -= 3) {
    digits.insert(static_cast<size_t>(position), ",");
  }
  return digits;
}

}  // namespace trireme
