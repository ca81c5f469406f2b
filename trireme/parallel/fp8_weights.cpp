#include "trireme/parallel/fp8_weights.h"

#include <ATen/ATen.h>

#include <limits>

#include "trireme/base/error.h"
#include "trireme/kernels/fp8.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/storage.h"

namespace trireme::parallel {
namespace {

constexpr int64_t kFloatsOfScale = 4;  ///< cuBLASLt wants scales that are aligned to 16 bytes

}  // namespace

Fp8Weights::Fp8Weights(const plan::UnitSpec& spec, const plan::FlatLayout& layout, const plan::Range& range,
                       comm::Group& group, const Options& options)
    : range_(range),
      block_(spec.fp8_block.value()),
      scales_of_(options.fp8_scales),
      entries_(layout.entries()),
      places_(entries_.size()) {
  TRIREME_CHECK(options.compute == at::kBFloat16,
                "[parallel.fp8_weights] unit {} computes in {}, but FP8 is cast from bf16", spec.name,
                c10::toString(options.compute));
  int64_t rest = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const plan::FlatEntry& entry = entries_[i];
    if (!entry.layer) {
      places_[i] = rest;
      rest += entry.numel;
    } else if (!matrices_.empty() && matrices_.back().layer == *entry.layer) {
      matrices_.back().range.end = entry.end();
      matrices_.back().rows += entry.shape[0];
    } else {
      matrices_.push_back({*entry.layer, i, {entry.offset, entry.end()}, entry.shape[0], entry.shape[1]});
    }
  }
  const auto on_device = at::TensorOptions().device(options.device);
  whole_ = without_storage(layout.numel(), on_device.dtype(at::kByte));
  shard_ = group.symmetric_empty(range.size(), at::kByte).zero_();
  rest_ = at::empty({rest}, on_device.dtype(at::kBFloat16));
  scales_ = at::empty({plan::kBlockLayers, kFloatsOfScale}, on_device.dtype(at::kFloat));
}

at::Tensor Fp8Weights::whole_parameter(size_t index) const {
  const plan::FlatEntry& entry = entries_[index];
  return rest_.narrow(0, places_[index].value(), entry.numel).view(entry.shape);
}

void Fp8Weights::lend(const std::vector<std::pair<std::string, at::Tensor>>& params) const {
  for (const Matrix& matrix : matrices_) {
    const at::Tensor values = place_in(whole_, matrix.range.begin, {matrix.rows, matrix.columns});
    nn::lend_fp8(params[matrix.first].second, {.values = values.view(at::kFloat8_e4m3fn),
                                               .scale = scales_.select(0, slot_of(matrix)).narrow(0, 0, 1)});
  }
}

/// The elements of `local`, a tensor of range_, that lie in `of`; both ranges are of the unit.
at::Tensor Fp8Weights::part(const at::Tensor& local, const plan::Range& of) const {
  const plan::Range common = plan::intersect(range_, of);
  return local.narrow(0, common.size() > 0 ? common.begin - range_.begin : 0, common.size());
}

/// What this rank adds to an exchange by maximum, int32: the bits of the largest magnitudes in its parts of
/// matrices, by layer, which have the order of the magnitudes; then the bits of its part of the rest, and the
/// smallest number for elements of other ranks.
at::Tensor Fp8Weights::own_contribution(const at::Tensor& master) const {
  at::Tensor own = at::full({plan::kBlockLayers + rest_.numel()}, std::numeric_limits<int32_t>::min(),
                            rest_.options().dtype(at::kInt));
  at::Tensor magnitudes = own.narrow(0, 0, plan::kBlockLayers).zero_().view(at::kFloat);
  for (const Matrix& matrix : matrices_) {
    at::Tensor magnitude = magnitudes.narrow(0, slot_of(matrix), 1);
    if (const at::Tensor mine = part(master, matrix.range); mine.numel() > 0)
      kernels::raise_fp8_amax(magnitude, mine);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!places_[i]) continue;
    const plan::Range of{entries_[i].offset, entries_[i].end()}, common = plan::intersect(range_, of);
    if (common.size() == 0) continue;
    const int64_t first = plan::kBlockLayers + *places_[i] + common.begin - of.begin;
    own.narrow(0, first, common.size()).copy_(part(master, of).to(at::kBFloat16).view(at::kShort));
  }
  return own;
}

void Fp8Weights::refresh(comm::Group& group, const at::Tensor& master) {
  if (std::exchange(current_, true)) return;
  const at::NoGradGuard no_grad;
  const at::Tensor all = comm::gather_rows(group, own_contribution(master)).amax(0);
  rest_.copy_(all.narrow(0, plan::kBlockLayers, rest_.numel()).to(at::kShort).view(at::kBFloat16));
  at::Tensor magnitudes = all.narrow(0, 0, plan::kBlockLayers).view(at::kFloat);
  for (const Matrix& matrix : matrices_) {
    const nn::Fp8Layer delayed = scales_of_ ? scales_of_(block_, matrix.layer) : nn::Fp8Layer();
    at::Tensor magnitude = magnitudes.narrow(0, slot_of(matrix), 1);
    if (delayed.amax.defined()) magnitude.copy_(delayed.weight_amax());
    const at::Tensor mine = part(master, matrix.range);
    if (mine.numel() == 0) continue;
    at::Tensor bytes = part(shard_, matrix.range);
    kernels::fp8_cast_part(bytes, mine, magnitude, delayed.weight_seen());
  }
  scales_.copy_(kernels::fp8_scale(magnitudes).unsqueeze(1));
}

}  // namespace trireme::parallel
