#include "trireme/text/stand_ins.h"

#include <algorithm>
#include <bitset>

#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr int kBlockBits = 8;
using Blocks = std::bitset<(0x110000 >> kBlockBits)>;

/// The blocks of 256 code points in which some have a stand-in: most texts hold none of them.
const Blocks& changed_blocks() {
  static const Blocks blocks = [] {
    Blocks changed;
    for (const StandIn& row : kStandIns) {
      for (uint32_t block = row.first >> kBlockBits; block <= row.last >> kBlockBits; ++block)
        changed.set(block);
    }
    return changed;
  }();
  return blocks;
}

uint32_t stand_in(uint32_t code) {
  const auto after = std::upper_bound(kStandIns.begin(), kStandIns.end(), code,
                                      [](uint32_t value, const StandIn& row) { return value < row.first; });
  if (after == kStandIns.begin() || code > std::prev(after)->last) return code;
  return std::prev(after)->other;
}

}  // namespace

bool needs_stand_ins(std::string_view text) {
  const Blocks& changed = changed_blocks();
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0xe0) {  // no code point below U+0800 has one
      ++i;
      continue;
    }
    const CodePoint point = code_point_at(text, i);
    if (changed[point.value >> kBlockBits] && stand_in(point.value) != point.value) return true;
    i += point.length;
  }
  return false;
}

std::string with_stand_ins(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    append_utf8(shown, stand_in(point.value));
    i += point.length;
  }
  return shown;
}

}  // namespace trireme::text
