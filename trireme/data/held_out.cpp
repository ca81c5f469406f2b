#include "trireme/data/held_out.h"

#include <cmath>

#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

int64_t share_of(int64_t bytes, double fraction) {
  return std::llround(static_cast<double>(bytes) * fraction);
}

}  // namespace

uint64_t held_out_draw(std::string_view name, size_t index) {
  return mix64(xxh3(name), index);
}

int64_t HeldOut::bytes_of(const DrawnDocument& document, int64_t size) const {
  if (last_bytes == 0 || document > last) return 0;
  return document == last ? last_bytes : size;
}

HeldOutChooser::HeldOutChooser(double val_fraction, int64_t most_bytes)
    : val_fraction_(val_fraction), most_held_out_(share_of(most_bytes, val_fraction)) {}

void HeldOutChooser::add(uint64_t draw, int64_t bytes) {
  const DrawnDocument document{.draw = draw, .ordinal = documents_++};
  bytes_ += bytes;
  if (candidate_bytes_ >= most_held_out_ && (candidates_.empty() || document > candidates_.top().document)) {
    return;
  }
  candidates_.push({document, bytes});
  candidate_bytes_ += bytes;
  shrink_to(most_held_out_);
}

void HeldOutChooser::shrink_to(int64_t bytes) {
  while (!candidates_.empty() && candidate_bytes_ - candidates_.top().bytes >= bytes) {
    candidate_bytes_ -= candidates_.top().bytes;
    candidates_.pop();
  }
}

HeldOut HeldOutChooser::choose() {
  const int64_t wanted = share_of(bytes_, val_fraction_);
  shrink_to(wanted);
  if (candidates_.empty()) return {};
  const Candidate& last = candidates_.top();
  return {.last = last.document, .last_bytes = last.bytes - (candidate_bytes_ - wanted), .bytes = wanted};
}

}  // namespace trireme::data
