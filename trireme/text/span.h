#pragma once
#include <cstddef>
#include <string_view>

namespace trireme::text {

/// The bytes from `begin` up to, but without, `end` of a text.
struct Span {
  size_t begin, end;
  bool operator==(const Span&) const = default;
  size_t size() const { return end - begin; }
  std::string_view of(std::string_view text) const { return text.substr(begin, end - begin); }
};

}  // namespace trireme::text
