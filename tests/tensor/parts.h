#pragma once
// What each rank should hold of a tensor, by torch's own tensor_split() and sums.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/spawn.h"
#include "trireme/plan/placement.h"

namespace trireme::test {

inline std::shared_ptr<comm::Group> group_of_all(comm::World& world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.make_group("all", ranks);
}

/// Whole numbers from -5 to 5, whose sums over a few ranks are exact in every dtype.
inline at::Tensor whole_numbers(int64_t seed, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  at::Tensor values = at::empty(shape, at::kLong);
  for (int64_t i = 0; i < values.numel(); ++i)
    values.mutable_data_ptr<int64_t>()[i] = (7 * i + i * i / 3 + 5 * seed) % 11 - 5;
  return values.to(dtype);
}

/// Every placement of a tensor with so many dimensions.
inline std::vector<plan::TensorPlacement> all_placements(int64_t dims) {
  std::vector<plan::TensorPlacement> all = {plan::TensorPlacement::replicate(),
                                            plan::TensorPlacement::partial()};
  for (int64_t dim = 0; dim < dims; ++dim) all.push_back(plan::TensorPlacement::shard(dim));
  return all;
}

/// What `rank` of `ranks` has of `whole`. Parts of a sum: ranks but the last have numbers of their own.
inline at::Tensor part_of(const at::Tensor& whole, const plan::TensorPlacement& placement, int64_t rank,
                          int64_t ranks) {
  if (placement.is_replicate()) return whole.clone();
  if (placement.is_shard())
    return whole.tensor_split(ranks, placement.dim)[static_cast<size_t>(rank)].clone();
  if (rank + 1 < ranks) return whole_numbers(rank + 100, whole.sizes(), whole.scalar_type());
  at::Tensor rest = whole.clone();
  for (int64_t other = 0; other + 1 < ranks; ++other)
    rest -= whole_numbers(other + 100, whole.sizes(), whole.scalar_type());
  return rest;
}

/// Expects `part`, of this rank, to be what `whole` is with this placement. Collective for parts of a sum.
inline void expect_part(const at::Tensor& part, const at::Tensor& whole,
                        const plan::TensorPlacement& placement, comm::Group& group, const std::string& what) {
  at::Tensor got = part.contiguous(), wanted = whole;
  if (placement.is_partial()) {
    got = got.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    wanted = whole.to(at::kDouble);
    group.all_reduce(got, comm::ReduceOp::kSum);
  } else {
    wanted = part_of(whole, placement, group.rank(), group.size());
  }
  EXPECT_EQ(part.scalar_type(), whole.scalar_type()) << what;
  EXPECT_EQ(part.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::equal(got, wanted))
      << what << " on rank " << group.rank() << ": " << got << "\ninstead of\n"
      << wanted;
}

}  // namespace trireme::test
