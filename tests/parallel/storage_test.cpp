#include "trireme/parallel/storage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace trireme::parallel {
namespace {

TEST(Storage, ViewsSeeTheNewMemoryAfterFreeAndAllocate) {
  const at::Tensor flat = at::arange(12, at::kFloat);
  const at::Tensor view = flat.narrow(0, 4, 4).view({2, 2});
  free_storage(flat);
  EXPECT_FALSE(has_storage(flat));
  EXPECT_EQ(view.storage().nbytes(), 0u);
  allocate_storage(flat);
  ASSERT_TRUE(has_storage(flat));
  flat.fill_(3.0);
  EXPECT_TRUE(at::equal(view, at::full({2, 2}, 3.0f)));
}

TEST(Storage, TouchingAFreedTensorThrows) {
  const at::Tensor flat = at::ones({8});
  free_storage(flat);
  EXPECT_THROW(flat.narrow(0, 0, 4).add_(1), c10::Error);
}

TEST(Storage, BackwardThroughAFreedAndRestoredWeightIsExact) {
  at::Tensor flat = at::randn({6});
  const at::Tensor copy = flat.clone();
  at::Tensor weight = at::empty({0}).requires_grad_();
  weight.set_data(flat.view({2, 3}));
  const at::Tensor x = at::randn({4, 3}).requires_grad_();
  const at::Tensor y = at::mm(x, weight.t());
  free_storage(flat);
  allocate_storage(flat);
  flat.copy_(copy);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::ones({4, 2}).mm(copy.view({2, 3}))));
}

TEST(Storage, EmptyTensorsStayEmpty) {
  const at::Tensor flat = at::empty({0});
  allocate_storage(flat);
  EXPECT_FALSE(has_storage(flat));
}

TEST(StoragePool, UnitsTakeTurnsWithOneBlock) {
  parallel::StoragePool pool(true);
  const at::Tensor first = at::ones({1000}), second = at::empty({900}), third = at::empty({1100});
  parallel::free_storage(second);
  parallel::free_storage(third);
  const void* const block = first.const_data_ptr();
  pool.free(first);
  EXPECT_FALSE(parallel::has_storage(first));
  pool.allocate(third);
  EXPECT_NE(third.const_data_ptr(), block) << "too small";
  pool.allocate(second);
  EXPECT_EQ(second.const_data_ptr(), block);
  second.fill_(2.0);
  pool.free(second);
  pool.allocate(first);
  EXPECT_EQ(first.const_data_ptr(), block) << "it kept its whole size";
  first.fill_(3.0);
  EXPECT_EQ(first.sum().item<float>(), 3000.0f);
}

TEST(StoragePool, LeavesTensorsWithMemoryAndThoseWithoutElementsAsTheyAre) {
  parallel::StoragePool pool(true);
  const at::Tensor held = at::full({100}, 2.0f), waiting = at::ones({100}), none = at::empty({0});
  const void *const own = held.const_data_ptr(), *const block = waiting.const_data_ptr();
  pool.free(waiting);
  pool.allocate(held);
  EXPECT_EQ(held.const_data_ptr(), own);
  EXPECT_TRUE(at::equal(held, at::full({100}, 2.0f)));
  pool.allocate(none);
  EXPECT_FALSE(parallel::has_storage(none));
  pool.allocate(waiting);
  EXPECT_EQ(waiting.const_data_ptr(), block) << "nobody else has taken it";
}

/// A small tensor that took the large piece would make another large one necessary.
TEST(StoragePool, LeavesLargePiecesOfASourceToLargeTensors) {
  std::vector<size_t> made;
  parallel::StoragePool pool(
      [&](size_t bytes) {
        made.push_back(bytes);
        return c10::GetAllocator(c10::kCPU)->allocate(bytes);
      },
      400);
  const at::Tensor small = at::empty({50}), block = at::empty({100}), root = at::empty({1000});
  for (const at::Tensor& tensor : {small, block, root}) parallel::free_storage(tensor);
  for (int round = 0; round < 3; ++round) {
    for (const at::Tensor& tensor : {root, block, small}) pool.allocate(tensor);
    for (const at::Tensor& tensor : {root, block, small}) pool.free(tensor);
    pool.allocate(block);
    pool.allocate(root);
    pool.free(block);
    pool.free(root);
  }
  EXPECT_EQ(made, (std::vector<size_t>{4000, 400, 400}));
}

}  // namespace
}  // namespace trireme::parallel
