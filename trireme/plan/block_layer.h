#pragma once
#include <cstdint>

namespace trireme::plan {

/// The linear layers of a block, in the order in which they are multiplied; neighbours in memory count as
/// one.
enum class BlockLayer : int64_t { kQkv, kAttentionOutput, kFeedForwardIn, kFeedForwardOut };
inline constexpr int64_t kBlockLayers = 4;

}  // namespace trireme::plan
