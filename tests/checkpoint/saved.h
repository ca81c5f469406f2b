#pragma once
// Whole checkpoints of the small model, written as ranks of a layout would.
#include <memory>
#include <string>

#include "tests/checkpoint/layouts.h"
#include "tests/data/scratch.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/store.h"

namespace trireme::checkpoint::testing {

using trireme::testing::message_of;
/// In memory where that is to be had: a disk takes its time for every sync.
struct Scratch : trireme::testing::Scratch {
  Scratch()
      : trireme::testing::Scratch(std::filesystem::is_directory("/dev/shm")
                                      ? std::filesystem::path("/dev/shm")
                                      : std::filesystem::temp_directory_path()) {}
};

/// Writes what rank `rank` has to of step `step`.
void write_rank(const Folder& folder, const Layout& layout, int64_t rank, int64_t step, int64_t generation);

/// One save by all ranks and its commit; the checkpoint's name.
std::string save(Store& store, const Layout& layout, int64_t step, int64_t attempt = 1);

/// What is wrong with what `rank` of `layout` reads from the checkpoint; empty: nothing.
std::string read_error(const Checkpoint& checkpoint, const Layout& layout, int64_t rank);

}  // namespace trireme::checkpoint::testing
