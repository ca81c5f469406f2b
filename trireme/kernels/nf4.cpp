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
#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/parallel.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

/// Numbers that operators encode at a time; whole blocks.
constexpr int64_t kPiece = int64_t{1} << 22;
constexpr float kSmallestMagnitude = 1e-38F;  ///< a block of smaller numbers is divided by this

/// Halfway between neighbouring values: what is above bound i has a code above i.
constexpr std::array<float, 15> bounds() {
  std::array<float, 15> between{};
  for (size_t i = 0; i < between.size(); ++i) between[i] = (kNf4Values.of[i] + kNf4Values.of[i + 1]) / 2.0F;
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
    store(out[2 * i], kNf4Values.of[block[i] >> 4] * magnitude);
    store(out[2 * i + 1], kNf4Values.of[block[i] & 15] * magnitude);
  }
}

template <typename Value>
void decode_all(at::Tensor& out, const at::Tensor& blocks) {
  auto* to = out.mutable_data_ptr<Value>();
  const auto* from = blocks.const_data_ptr<uint8_t>();
  const int64_t whole = out.numel() / kNf4Block, rest = out.numel() % kNf4Block;
  for_rows(whole, kNf4Block, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) decode_block(to + i * kNf4Block, from + i * kNf4Bytes);
  });
  if (rest == 0) return;
  std::array<Value, kNf4Block> last{};
  decode_block(last.data(), from + whole * kNf4Bytes);
  std::copy_n(last.begin(), rest, to + whole * kNf4Block);
}

cuda::Dtype gpu_dtype_of(const at::Tensor& out) {
  if (out.scalar_type() == at::kFloat) return cuda::Dtype::kFloat;
  return out.scalar_type() == at::kBFloat16 ? cuda::Dtype::kBFloat16 : cuda::Dtype::kHalf;
}

void decode_on_gpu(at::Tensor& out, const at::Tensor& blocks) {
  const int error = cuda::nf4_decode(out.mutable_data_ptr(), blocks.const_data_ptr<uint8_t>(), kNf4Values,
                                     out.numel(), gpu_dtype_of(out), current_stream());
  if (error != 0) throw LogicError("[kernels.nf4_decode] launch failed: {}", gpu_error_text(error));
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

/// Made once a device, since a copy from the host would end the recording of a pass.
const at::Tensor& bounds_on(at::Device device) {
  static std::mutex mutex;
  // Never destroyed: at the end of a process a device may be gone before its tensors.
  static auto* const made = new std::map<std::pair<at::DeviceType, int64_t>, at::Tensor>;
  const std::scoped_lock lock(mutex);
  at::Tensor& bounds = (*made)[{device.type(), device.index()}];
  if (!bounds.defined()) bounds = at::tensor(at::ArrayRef<float>(kNf4Bounds), at::kFloat).to(device);
  return bounds;
}

void encode_piece(const at::Tensor& blocks, const at::Tensor& values) {
  const int64_t missing = round_up(values.numel(), kNf4Block) - values.numel();
  const at::Tensor rows = at::constant_pad_nd(values, {0, missing}).view({-1, kNf4Block});
  const at::Tensor magnitudes = rows.abs().amax(1);
  const at::Tensor scaled = rows * magnitudes.clamp_min(kSmallestMagnitude).reciprocal().unsqueeze(1);
  const at::Tensor codes =
      at::bucketize(scaled, bounds_on(values.device()), /*out_int32=*/true).to(at::kByte);
  const at::Tensor pairs = codes.view({-1, kNf4CodeBytes, 2});
  nf4_codes(blocks).copy_(pairs.select(2, 0) * 16 + pairs.select(2, 1));
  nf4_magnitudes(blocks).copy_(magnitudes);
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
  for (int64_t first = 0; first < values.numel(); first += kPiece) {
    const int64_t count = std::min(kPiece, values.numel() - first);
    const at::Tensor place = blocks.narrow(0, first / kNf4Block, (count + kNf4Block - 1) / kNf4Block);
    encode_piece(place, values.narrow(0, first, count));
  }
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
  check_decoded(blocks, out);
  if (!out.is_cpu()) return decode_on_gpu(out, blocks);
  if (out.scalar_type() == at::kFloat) return decode_all<float>(out, blocks);
  if (out.scalar_type() == at::kBFloat16) return decode_all<c10::BFloat16>(out, blocks);
  decode_all<c10::Half>(out, blocks);
}

}  // namespace trireme::kernels
