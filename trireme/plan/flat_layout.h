#pragma once
// Where each parameter of a unit lies in its flat buffer, and which range of it a rank owns. Parameters
// follow each other without gaps where alignment allows, so neighbours can be used as one matrix; the tail is
// padded so that all shards are equal.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/plan/model_facts.h"

namespace trireme::plan {

struct FlatEntry {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset = 0;  ///< in elements from the start of the buffer
  int64_t numel = 0;
  bool decays = false;                   ///< as ParamSpec::decays
  std::optional<BlockLayer> layer = {};  ///< as ParamSpec::layer
  Part part = {};                        ///< as ParamSpec::part
  bool nf4 = false;                      ///< as ParamSpec::nf4
  int64_t end() const { return offset + numel; }
  /// Shape of the parameter in checkpoints.
  const Shape& whole_shape() const { return part.whole_of(shape); }
  /// Elements `range` of the buffer, which are some of this entry's, within the whole parameter.
  Region region(const Range& range) const {
    return part.region(shape, {range.begin - offset, range.end - offset});
  }
};

class FlatLayout {
 public:
  /// `shards` equal ranges; every parameter starts at a multiple of `alignment` elements, every shard too.
  FlatLayout(const std::vector<ParamSpec>& params, int64_t shards, int64_t alignment = kAlignment);

  static constexpr int64_t kAlignment = 8;  ///< 16 bytes of bf16: one vector load

  const std::vector<FlatEntry>& entries() const { return entries_; }
  const FlatEntry& entry(const std::string& name) const;  ///< throws LogicError when absent
  int64_t shards() const { return shards_; }
  int64_t numel() const { return shard_numel_ * shards_; }  ///< with padding
  int64_t shard_numel() const { return shard_numel_; }
  Range shard(int64_t rank) const { return {rank * shard_numel_, (rank + 1) * shard_numel_}; }
  int64_t padding() const { return numel() - used_; }

 private:
  std::vector<FlatEntry> entries_;
  int64_t shards_;
  int64_t shard_numel_ = 0;
  int64_t used_ = 0;  ///< elements that belong to parameters
};

/// The layout of what a unit trains. When its matrices may travel in FP8, parameters start at multiples of 16
/// bytes in FP8 as well as in bf16.
FlatLayout flat_layout(const UnitSpec& unit, int64_t shards);
/// The layout of the parameters of a unit that are frozen for good, which have a buffer of their own. Where
/// some are held in four bits, all begin at whole blocks of these, and so do shards.
FlatLayout frozen_layout(const UnitSpec& unit, int64_t shards);

}  // namespace trireme::plan
