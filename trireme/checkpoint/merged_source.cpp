#include "trireme/checkpoint/merged_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/low_rank.h"
#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_family.h"

namespace trireme::checkpoint {
namespace {

constexpr const char* kMergedDtype = "F32";

/// The elements of a region in another dtype.
std::vector<char> read_as(const Source& source, const std::string& name, const plan::Region& region,
                          const std::string& dtype) {
  const std::string& stored = source.tensors().at(name).dtype;
  std::vector<char> bytes(static_cast<size_t>(region.numel() * safetensors_itemsize(stored)));
  source.read(name, region, bytes.data());
  if (stored == dtype) return bytes;
  std::vector<char> result(static_cast<size_t>(region.numel() * safetensors_itemsize(dtype)));
  cast(stored, bytes.data(), dtype, result.data(), region.numel());
  return result;
}

std::vector<float> read_whole(const Source& source, const std::string& name) {
  const std::vector<char> bytes =
      read_as(source, name, plan::Region::whole(source.tensors().at(name).shape), kMergedDtype);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class MergedSource : public Source {
 public:
  MergedSource(std::unique_ptr<Source> base, AdapterTensors adapters, const plan::ModelConfig& model)
      : Source(base->path()),
        base_(std::move(base)),
        adapters_(std::move(adapters)),
        scale_(plan::scale_of(model.adapter)),
        in_out_(plan::record_of(model.family).in_out) {
    for (const plan::UnitSpec& unit : plan::describe(plan::without_adapters(model), 1).units)
      for (const plan::ParamSpec& param : unit.params) tensors_[param.name] = {kMergedDtype, param.shape};
  }

  const std::map<std::string, std::string>& metadata() const override { return none_; }

  void read(const std::string& name, const plan::Region& region, void* out) const override {
    if (!has_adapter(name)) {
      const std::vector<char> values = read_as(*base_, name, region, kMergedDtype);
      std::memcpy(out, values.data(), values.size());
      return;
    }
    const std::lock_guard lock(mutex_);
    if (merged_name_ != name) {
      merged_ = merged(name);
      merged_name_ = name;
    }
    for (plan::RunCursor cursor(tensors_.at(name).shape, region); !cursor.done(); cursor.next()) {
      const plan::Run& run = cursor.run();
      std::copy_n(merged_.begin() + run.begin, run.length, static_cast<float*>(out) + run.local);
    }
  }

 private:
  bool has_adapter(const std::string& name) const {
    return adapters_.source->tensors().contains(adapters_.prefix + plan::adapter_names(name).first);
  }
  std::vector<float> of_adapter(const std::string& name) const {
    return read_whole(*adapters_.source, adapters_.prefix + name);
  }

  std::vector<float> merged(const std::string& name) const {
    const plan::AdapterNames names = plan::adapter_names(name);
    std::vector<float> values = read_whole(*base_, name);
    const LayerWeight weight = layer_weight(values, tensors_.at(name).shape, in_out_);
    const std::vector<float> first = of_adapter(names.first), second = of_adapter(names.second);
    std::vector<float> lengths;
    if (adapters_.source->tensors().contains(adapters_.prefix + names.magnitude)) {
      lengths = of_adapter(names.magnitude);
      if (adapters_.lengths_are_changes)
        std::ranges::transform(lengths, lengths_of_rows(weight), lengths.begin(), std::plus());
    }
    add_low_rank(weight, {.first = first, .second = second, .scale = scale_, .lengths = lengths});
    if (!std::ranges::all_of(values, [](float value) { return std::isfinite(value); }))
      throw DataError(
          "[checkpoint.merge] {} with the adapter in {} has elements that are not finite; one of the two is "
          "damaged, or alpha is too large",
          name, adapters_.source->path());
    return values;
  }

  std::unique_ptr<Source> base_;
  AdapterTensors adapters_;
  double scale_;
  bool in_out_;
  std::map<std::string, std::string> none_;
  mutable std::mutex mutex_;
  mutable std::string merged_name_;    ///< the layer that was read last
  mutable std::vector<float> merged_;  ///< its values
};

}  // namespace

std::unique_ptr<Source> merge_adapters(std::unique_ptr<Source> base, AdapterTensors adapters,
                                       const plan::ModelConfig& model) {
  return std::make_unique<MergedSource>(std::move(base), std::move(adapters), model);
}

std::string digest_of_frozen(const Source& base, const plan::ModelFacts& facts, const std::string& dtype) {
  StreamingHash hash;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.frozen()) {
      const int64_t numel = plan::checked_numel(param.shape).value();
      for (int64_t begin = 0; begin < numel; begin += kPartNumel) {
        const std::vector<char> values =
            read_as(base, param.name,
                    plan::Region::flat(param.shape, {begin, std::min(numel, begin + kPartNumel)}), dtype);
        hash.update(values.data(), values.size());
      }
    }
  }
  return hex64(hash.digest());
}

}  // namespace trireme::checkpoint
