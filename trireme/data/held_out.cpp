#include "trireme/data/held_out.h"

#include <algorithm>
#include <cmath>

#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

constexpr int kGroupBits = 20;  // 8 MiB of counts

size_t group_of(uint64_t draw) {
  return static_cast<size_t>(draw >> (64 - kGroupBits));
}

}  // namespace

uint64_t held_out_draw(std::string_view name, size_t index) {
  return mix64(xxh3(name), index);
}

int64_t HeldOut::take(uint64_t draw, int64_t size) {
  const size_t group = group_of(draw);
  if (group != last_group_) return group < last_group_ ? size : 0;
  const int64_t taken = std::min(size, left_);
  left_ -= taken;
  return taken;
}

HeldOutChooser::HeldOutChooser(double val_fraction)
    : val_fraction_(val_fraction), group_bytes_(size_t{1} << kGroupBits) {}

void HeldOutChooser::add(uint64_t draw, int64_t bytes) {
  group_bytes_[group_of(draw)] += bytes;
  bytes_ += bytes;
}

HeldOut HeldOutChooser::choose() const {
  int64_t left = std::llround(static_cast<double>(bytes_) * val_fraction_);
  size_t group = 0;
  for (; left > group_bytes_[group]; ++group) left -= group_bytes_[group];
  return {group, left};
}

}  // namespace trireme::data
