#pragma once
// Blocks of numbers in NF4, 4-bit NormalFloat (Dettmers et al. 2023, QLoRA: Efficient Finetuning of Quantized
// LLMs): each number is one of 16 values between -1 and 1, a code, times the block's largest magnitude.
#include <cstdint>

namespace trireme {

inline constexpr int64_t kNf4Block = 64;                 ///< numbers in a block
inline constexpr int64_t kNf4CodeBytes = kNf4Block / 2;  ///< two codes a byte
inline constexpr int64_t kNf4Bytes =
    kNf4CodeBytes + 4;  ///< of a block: its codes, then the magnitude in fp32

/// Bytes of `count` numbers, which are whole blocks.
constexpr int64_t nf4_bytes(int64_t count) {
  return count / kNf4Block * kNf4Bytes;
}

}  // namespace trireme
