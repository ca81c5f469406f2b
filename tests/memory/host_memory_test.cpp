// Each test in a process of its own: what keep_freed_memory() sets is for good.
#include "trireme/memory/host_memory.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace trireme::memory {
namespace {

bool a_step_finds_the_places_of_the_step_before() {
  keep_freed_memory();
  const auto places = [] {
    std::vector<at::Tensor> kept;
    std::vector<void*> addresses;
    for (const int64_t count : {100'000, 300'000, 200'000, 300'000, 100'000}) {
      kept.push_back(at::empty({count}));
      addresses.push_back(kept.back().mutable_data_ptr());
    }
    while (!kept.empty()) kept.pop_back();  // as backward frees them, the last first
    return addresses;
  };
  const at::Tensor of_long_life = at::empty({1'000'000});
  return places() == places();
}

bool a_freed_block_fits_a_tensor_of_its_size() {
  keep_freed_memory();
  at::Tensor first = at::empty({1'000'000});
  const at::Tensor behind = at::empty({1'000'000});
  const void* const place = first.data_ptr();
  first.reset();
  return at::empty({1'000'000}).data_ptr() == place;
}

bool tensors_are_aligned_and_hold_what_they_are_given() {
  keep_freed_memory();
  for (int64_t count = 0; count < 2'000; count += 7) {
    const at::Tensor ones = at::ones({count});
    if (reinterpret_cast<uintptr_t>(ones.data_ptr()) % 64 != 0) return false;
    at::Tensor larger = ones.clone();
    larger.resize_({2 * count});
    if (larger.narrow(0, 0, count).sum().item<double>() != static_cast<double>(count)) return false;
  }
  return true;
}

bool what_cannot_be_had_is_refused_as_torch_does() {
  keep_freed_memory();
  try {
    at::empty({int64_t{1} << 60}, at::kByte);
  } catch (const c10::Error& error) {
    return std::string(error.what()).find("DefaultCPUAllocator") != std::string::npos;
  }
  return false;
}

/// As oneDNN does for convolutions and products in bf16.
bool memory_is_given_without_a_tensor() {
  keep_freed_memory();
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  void* const memory = allocator->raw_allocate(1000);
  std::memset(memory, 1, 1000);
  const bool aligned = reinterpret_cast<uintptr_t>(memory) % 64 == 0;
  allocator->raw_deallocate(memory);
  const at::Tensor image = at::ones({2, 3, 8, 8}), weight = at::ones({4, 3, 3, 3});
  const bool convolves = at::conv2d(image, weight).sum().item<double>() == 2 * 4 * 36 * 27.0;
  return aligned && convolves && allocator->raw_allocate(0) == nullptr;
}

void expect_in_a_process(bool (*holds)()) {
  EXPECT_EXIT(std::_Exit(holds() ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST(HostMemoryDeathTest, AStepFindsThePlacesOfTheStepBefore) {
  expect_in_a_process(&a_step_finds_the_places_of_the_step_before);
}
TEST(HostMemoryDeathTest, AFreedBlockFitsATensorOfItsSize) {
  expect_in_a_process(&a_freed_block_fits_a_tensor_of_its_size);
}
TEST(HostMemoryDeathTest, TensorsAreAlignedAndHoldWhatTheyAreGiven) {
  expect_in_a_process(&tensors_are_aligned_and_hold_what_they_are_given);
}
TEST(HostMemoryDeathTest, MemoryIsGivenWithoutATensor) {
  expect_in_a_process(&memory_is_given_without_a_tensor);
}
TEST(HostMemoryDeathTest, WhatCannotBeHadIsRefusedAsTorchDoes) {
  expect_in_a_process(&what_cannot_be_had_is_refused_as_torch_does);
}

}  // namespace
}  // namespace trireme::memory
