#pragma once
// Words for people: nearest names for typing errors; counts, bytes and durations with three digits and a
// unit.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

/// The candidate that takes the fewest edits to get from `word`, or empty where none is near: a third of its
/// letters may be wrong, without the dashes before an option, and one at least.
std::string nearest_name(std::string_view word, std::span<const std::string> candidates);

/// "12.3k", "4.56M", "1.24B": three significant digits, powers of 1000.
std::string format_count(double value);
/// "512 B", "12.3 KiB", "1.24 GiB": powers of 1024.
std::string format_bytes(double bytes);
/// "350 us", "12.3 ms", "4.56 s", "3m 20s", "2h 05m".
std::string format_duration(double seconds);

/// As fmt writes it in messages, but NaN has no sign: "0.25", "inf", "nan".
std::string number_text(double value);

std::string join(std::span<const std::string> parts, std::string_view separator);
/// The first eight of `names`, made printable, and how many more there are.
std::string some_of(std::span<const std::string> names);
std::vector<std::string> split(std::string_view text, char separator);

/// 123456789 -> "123,456,789".
std::string with_commas(int64_t value);

}  // namespace trireme
