#pragma once
// Ways to divide a small model over ranks, as named ranges of global tensors: replicas, flat shards of
// stages, rows and columns of matrices, and all of these together.
#include <string>
#include <vector>

#include "trireme/checkpoint/shard.h"

namespace trireme::checkpoint::testing {

struct Layout {
  int64_t replicas = 1;  ///< of each shard
  int64_t shards = 1;    ///< flat ones, of what a stage and a tensor rank hold
  int64_t stages = 1;
  int64_t tensor = 1;  ///< ranks that share matrices
  int64_t ranks() const { return replicas * shards * stages * tensor; }
  std::string name() const;
};

/// All with up to `ranks` ranks.
std::vector<Layout> layouts(int64_t ranks);

struct ModelTensor {
  std::string name, dtype;
  plan::Shape shape;
  int64_t block = 0;       ///< blocks are divided over the stages
  int64_t split_dim = -1;  ///< over tensor ranks; -1: every one holds all of it
};
/// Parameters, moments of an optimizer and a few odd tensors.
const std::vector<ModelTensor>& model();

/// What `rank` holds between steps.
std::vector<PieceSpec> held_by(const Layout& layout, int64_t rank);
/// What it writes: its share of what others hold, too.
std::vector<PieceSpec> written_by(const Layout& layout, int64_t rank);

/// The bytes of a region of a tensor of model(): each element's say which it is.
std::string bytes_of(const PieceSpec& piece);

}  // namespace trireme::checkpoint::testing
