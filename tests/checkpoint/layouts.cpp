#include "tests/checkpoint/layouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "trireme/base/hash.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint::testing {
namespace {

constexpr int64_t kBlocks = 8;

/// A rank's place in the layout; tensor ranks are neighbours, stages are farthest apart.
struct Place {
  int64_t tensor, shard, replica, stage;
};
Place place_of(const Layout& layout, int64_t rank) {
  const int64_t tensor = rank % layout.tensor, rest = rank / layout.tensor;
  return {tensor, rest % layout.shards, rest / layout.shards % layout.replicas,
          rest / layout.shards / layout.replicas};
}

plan::Region local_box(const ModelTensor& tensor, int64_t rank, int64_t ranks) {
  plan::Region box = plan::Region::whole(tensor.shape);
  if (tensor.split_dim < 0) return box;
  const auto dim = static_cast<size_t>(tensor.split_dim);
  const int64_t size = tensor.shape[dim];
  const int64_t begin = size * rank / ranks, end = size * (rank + 1) / ranks;
  box.start[dim] = begin;
  box.extent[dim] = end - begin;
  return plan::Region::box(box.start, box.extent);
}

bool in_stage(const ModelTensor& tensor, int64_t stage, int64_t stages) {
  return tensor.block * stages / kBlocks == stage;
}

}  // namespace

std::string Layout::name() const {
  return fmt::format("replicas{} shards{} stages{} tensor{}", replicas, shards, stages, tensor);
}

std::vector<Layout> layouts(int64_t ranks) {
  std::vector<Layout> all;
  for (int64_t stages = 1; stages <= ranks; ++stages) {
    for (int64_t tensor = 1; tensor * stages <= ranks; ++tensor) {
      for (int64_t shards = 1; shards * tensor * stages <= ranks; ++shards) {
        for (int64_t replicas = 1; replicas * shards * tensor * stages <= ranks; ++replicas)
          all.push_back({replicas, shards, stages, tensor});
      }
    }
  }
  return all;
}

const std::vector<ModelTensor>& model() {
  static const std::vector<ModelTensor> tensors = [] {
    std::vector<ModelTensor> all = {
        {"embedding", "F32", {53, 12}, 0, 0}, {"head", "BF16", {12, 47}, kBlocks - 1, 1},
        {"odd.scalar", "I64", {}, 0, -1},     {"odd.empty", "F32", {3, 0, 2}, 1, -1},
        {"odd.flags", "BOOL", {5}, 2, -1},    {"odd.deep", "F16", {2, 3, 2, 3}, 3, 2}};
    for (int64_t block = 0; block < kBlocks; block += 3) {
      for (const std::string kind : {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."}) {
        const std::string name = fmt::format("{}block.{}.", kind, block);
        all.push_back({name + "column", "F32", {5, 9}, block, 1});
        all.push_back({name + "row", "F32", {9, 5}, block, 0});
        all.push_back({name + "norm", "F32", {5}, block, -1});
      }
    }
    return all;
  }();
  return tensors;
}

std::vector<PieceSpec> held_by(const Layout& layout, int64_t rank) {
  const Place place = place_of(layout, rank);
  std::vector<PieceSpec> pieces;
  int64_t stage_elements = 0;
  for (const ModelTensor& tensor : model()) {
    if (!in_stage(tensor, place.stage, layout.stages)) continue;
    pieces.push_back(
        {tensor.name, tensor.dtype, tensor.shape, local_box(tensor, place.tensor, layout.tensor)});
    stage_elements += pieces.back().region.numel();
  }
  // One flat buffer, padded to equal shards.
  const int64_t size = (stage_elements + layout.shards - 1) / layout.shards;
  const plan::Range shard{place.shard * size, (place.shard + 1) * size};
  int64_t offset = 0;
  for (PieceSpec& piece : pieces) {
    const int64_t numel = piece.region.numel();
    const plan::Range mine = plan::intersect(shard, {offset, offset + numel});
    piece.region.range =
        mine.size() > 0 ? plan::Range{mine.begin - offset, mine.end - offset} : plan::Range{};
    offset += numel;
  }
  std::erase_if(pieces, [](const PieceSpec& piece) {
    return piece.region.numel() == 0 && std::ranges::find(piece.shape, 0) == piece.shape.end();
  });
  return pieces;
}

std::vector<PieceSpec> written_by(const Layout& layout, int64_t rank) {
  const Place place = place_of(layout, rank);
  std::vector<PieceSpec> pieces = held_by(layout, rank);
  // Flat shards of tensor ranks need not agree on where a tensor that they all hold is cut: the first writes
  // it.
  std::erase_if(pieces, [&](const PieceSpec& piece) {
    const auto tensor = std::ranges::find(model(), piece.tensor, &ModelTensor::name);
    return tensor->split_dim < 0 && place.tensor > 0;
  });
  for (PieceSpec& piece : pieces) piece.region = plan::share_of(piece.region, place.replica, layout.replicas);
  return pieces;
}

std::string bytes_of(const PieceSpec& piece) {
  const int64_t itemsize = safetensors_itemsize(piece.dtype);
  const uint64_t key = xxh3(piece.tensor);
  std::string bytes(static_cast<size_t>(piece.region.numel() * itemsize), '\0');
  for (plan::RunCursor cursor(piece.shape, piece.region); !cursor.done(); cursor.next()) {
    for (int64_t i = 0; i < cursor.run().length; ++i) {
      const uint64_t value = mix64(key, static_cast<uint64_t>(cursor.run().begin + i));
      std::memcpy(bytes.data() + (cursor.run().local + i) * itemsize, &value, static_cast<size_t>(itemsize));
    }
  }
  return bytes;
}

}  // namespace trireme::checkpoint::testing
