#include "trireme/kernels/nf4.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/round_up.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

constexpr std::array<float, 16> kNf4Values = {-1.0F,
                                              -0.6961928009986877F,
                                              -0.5250730514526367F,
                                              -0.39491748809814453F,
                                              -0.28444138169288635F,
                                              -0.18477343022823334F,
                                              -0.09105003625154495F,
                                              0.0F,
                                              0.07958029955625534F,
                                              0.16093020141124725F,
                                              0.24611230194568634F,
                                              0.33791524171829224F,
                                              0.44070982933044434F,
                                              0.5626170039176941F,
                                              0.7229568362236023F,
                                              1.0F};
constexpr float kSmallestMagnitude = 1e-38F;  ///< a block of smaller numbers is divided by this

/// Halfway between neighbouring values: what is above bound i has a code above i.
constexpr std::array<float, 15> bounds() {
  std::array<float, 15> between{};
  for (size_t i = 0; i < between.size(); ++i) between[i] = (kNf4Values[i] + kNf4Values[i + 1]) / 2.0F;
  return between;
}
constexpr std::array<float, 15> kNf4Bounds = bounds();

/// The largest magnitude; NaN where there is one, since the bits of magnitudes have their order, and those of
/// NaN are above all others.
float largest_of(const float* values) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < kNf4Block; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU);
  return std::bit_cast<float>(largest);
}

void encode_block(uint8_t* block, const float* values) {
  const float magnitude = largest_of(values), factor = 1.0F / std::max(kSmallestMagnitude, magnitude);
  std::array<int32_t, kNf4Block> codes{};
  for (const float bound : kNf4Bounds)
    for (size_t i = 0; i < codes.size(); ++i) codes[i] += values[i] * factor > bound ? 1 : 0;
  for (size_t i = 0; i < kNf4CodeBytes; ++i)
    block[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
  std::memcpy(block + kNf4CodeBytes, &magnitude, sizeof(magnitude));
}

using kernels::store;
inline void store(c10::Half& to, float value) {
  to = value;
}

template <typename Value>
void decode_block(Value* out, const uint8_t* block) {
  float magnitude = 0.0F;
  std::memcpy(&magnitude, block + kNf4CodeBytes, sizeof(magnitude));
  for (int64_t i = 0; i < kNf4CodeBytes; ++i) {
    store(out[2 * i], kNf4Values[block[i] >> 4] * magnitude);
    store(out[2 * i + 1], kNf4Values[block[i] & 15] * magnitude);
  }
}

template <typename Value>
void decode_all(at::Tensor& out, const at::Tensor& blocks) {
  auto* to = out.mutable_data_ptr<Value>();
  const auto* from = blocks.const_data_ptr<uint8_t>();
  const int64_t whole = out.numel() / kNf4Block, rest = out.numel() % kNf4Block;
  for (int64_t i = 0; i < whole; ++i) decode_block(to + i * kNf4Block, from + i * kNf4Bytes);
  if (rest == 0) return;
  std::array<Value, kNf4Block> last{};
  decode_block(last.data(), from + whole * kNf4Bytes);
  std::copy_n(last.begin(), rest, to + whole * kNf4Block);
}

void check_nf4(const at::Tensor& blocks, const at::Tensor& numbers, bool is_dtype) {
  const int64_t count = (numbers.numel() + kNf4Block - 1) / kNf4Block;
  const bool fits = blocks.dim() == 2 && blocks.size(0) == count && blocks.size(1) == kNf4Bytes;
  TRIREME_CHECK(
      fits && is_dtype && blocks.scalar_type() == at::kByte && blocks.is_contiguous() &&
          numbers.is_contiguous() && numbers.dim() == 1 && blocks.device() == numbers.device(),
      "[kernels.nf4] {} numbers of {} in {} dimensions are no {} blocks of {}; give one dimension of "
      "contiguous memory and ({}, {}) bytes",
      numbers.numel(), c10::toString(numbers.scalar_type()), numbers.dim(), blocks.numel(),
      c10::toString(blocks.scalar_type()), count, kNf4Bytes);
}

void check_encoded(const at::Tensor& blocks, const at::Tensor& values) {
  check_nf4(blocks, values, values.scalar_type() == at::kFloat);
}
void check_decoded(const at::Tensor& blocks, const at::Tensor& out) {
  const at::ScalarType dtype = out.scalar_type();
  check_nf4(blocks, out, dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
}

/// Tables that operators look up, made once a device, since a copy from the host would end the recording of a
/// pass.
struct Nf4Tables {
  at::Tensor bounds;  ///< (15)
  at::Tensor pairs;   ///< (256, 2): the two values of a byte

  explicit Nf4Tables(at::Device device) {
    const at::Tensor values = at::tensor(at::ArrayRef<float>(kNf4Values), at::kFloat);
    pairs = at::stack({values.repeat_interleave(16), values.repeat({16})}, 1).to(device);
    bounds = at::tensor(at::ArrayRef<float>(kNf4Bounds), at::kFloat).to(device);
  }
};
const Nf4Tables& tables_on(at::Device device) {
  static std::mutex mutex;
  // Never destroyed: at the end of a process a device may be gone before its tensors.
  static auto* const tables = new std::map<std::pair<at::DeviceType, int64_t>, Nf4Tables>;
  const std::scoped_lock lock(mutex);
  return tables->try_emplace({device.type(), device.index()}, device).first->second;
}

/// body(first number, numbers, their blocks) for each piece.
template <typename Body>
void for_pieces(const at::Tensor& blocks, int64_t numbers, const Body& body) {
  for (int64_t first = 0; first < numbers; first += kNf4Piece) {
    const int64_t count = std::min(kNf4Piece, numbers - first);
    body(first, count, blocks.narrow(0, first / kNf4Block, (count + kNf4Block - 1) / kNf4Block));
  }
}

void encode_piece(const at::Tensor& blocks, const at::Tensor& values) {
  const int64_t missing = round_up(values.numel(), kNf4Block) - values.numel();
  const at::Tensor rows = at::constant_pad_nd(values, {0, missing}).view({-1, kNf4Block});
  const at::Tensor magnitudes = rows.abs().amax(1);
  const at::Tensor scaled = rows * magnitudes.clamp_min(kSmallestMagnitude).reciprocal().unsqueeze(1);
  const at::Tensor codes =
      at::bucketize(scaled, tables_on(values.device()).bounds, /*out_int32=*/true).to(at::kByte);
  const at::Tensor pairs = codes.view({-1, kNf4CodeBytes, 2});
  nf4_codes(blocks).copy_(pairs.select(2, 0) * 16 + pairs.select(2, 1));
  nf4_magnitudes(blocks).copy_(magnitudes);
}

/// `out` is whole blocks.
void decode_piece(const at::Tensor& out, const at::Tensor& blocks) {
  const at::Tensor which = nf4_codes(blocks).to(at::kInt).view(-1);
  const at::Tensor pairs = tables_on(out.device()).pairs.index_select(0, which).view({-1, kNf4Block});
  at::Tensor rows = out.view({-1, kNf4Block});
  at::mul_out(rows, pairs, nf4_magnitudes(blocks).unsqueeze(1));
}

}  // namespace

at::Tensor nf4_codes(const at::Tensor& blocks) {
  return blocks.narrow(1, 0, kNf4CodeBytes);
}

at::Tensor nf4_magnitudes(const at::Tensor& blocks) {
  return blocks.narrow(1, kNf4CodeBytes, kNf4Bytes - kNf4CodeBytes).view(at::kFloat).squeeze(1);
}

void nf4_encode_by_operators(at::Tensor& blocks, const at::Tensor& values) {
  check_encoded(blocks, values);
  for_pieces(blocks, values.numel(), [&](int64_t first, int64_t count, const at::Tensor& place) {
    encode_piece(place, values.narrow(0, first, count));
  });
}

void nf4_decode_by_operators(at::Tensor& out, const at::Tensor& blocks) {
  check_decoded(blocks, out);
  for_pieces(blocks, out.numel(), [&](int64_t first, int64_t count, const at::Tensor& place) {
    at::Tensor part = out.narrow(0, first, count);
    if (count % kNf4Block == 0) return decode_piece(part, place);
    const at::Tensor whole = at::empty({round_up(count, kNf4Block)}, out.options());
    decode_piece(whole, place);
    part.copy_(whole.narrow(0, 0, count));
  });
}

void nf4_encode(at::Tensor& blocks, const at::Tensor& values) {
  if (!values.is_cpu()) return nf4_encode_by_operators(blocks, values);
  check_encoded(blocks, values);
  auto* to = blocks.mutable_data_ptr<uint8_t>();
  const auto* from = values.const_data_ptr<float>();
  const int64_t whole = values.numel() / kNf4Block, rest = values.numel() % kNf4Block;
  for (int64_t i = 0; i < whole; ++i) encode_block(to + i * kNf4Bytes, from + i * kNf4Block);
  if (rest == 0) return;
  std::array<float, kNf4Block> last{};
  std::copy_n(from + whole * kNf4Block, rest, last.begin());
  encode_block(to + whole * kNf4Bytes, last.data());
}

void nf4_decode(at::Tensor& out, const at::Tensor& blocks) {
  if (!out.is_cpu()) return nf4_decode_by_operators(out, blocks);
  check_decoded(blocks, out);
  if (out.scalar_type() == at::kFloat) return decode_all<float>(out, blocks);
  if (out.scalar_type() == at::kBFloat16) return decode_all<c10::BFloat16>(out, blocks);
  decode_all<c10::Half>(out, blocks);
}

}  // namespace trireme::kernels
