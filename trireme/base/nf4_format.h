#pragma once
// Blocks of numbers in NF4, 4-bit NormalFloat (Dettmers et al. 2023, QLoRA: Efficient Finetuning of Quantized
// LLMs): each number is one of 16 values between -1 and 1, a code, times the block's largest magnitude.
#include <cstdint>

namespace trireme {

inline constexpr int64_t kNf4Block = 64;                 ///< numbers in a block
inline constexpr int64_t kNf4CodeBytes = kNf4Block / 2;  ///< two codes a byte
inline constexpr int64_t kNf4Bytes =
    kNf4CodeBytes + 4;  ///< of a block: its codes, then the magnitude in fp32

/// Numbers that a GPU decodes at a time; whole blocks.
inline constexpr int64_t kNf4Piece = int64_t{1} << 22;

/// Bytes that a GPU takes to decode `count` numbers, beside the numbers: an index and a pair of values for
/// two of them, and a last block.
constexpr int64_t nf4_scratch(int64_t count) {
  constexpr int64_t kOfNumber = 2 + 4 + 2;
  return (count < kNf4Piece ? (count + kNf4Block - 1) / kNf4Block * kNf4Block : kNf4Piece) * kOfNumber;
}

/// Bytes of `count` numbers, which are whole blocks.
constexpr int64_t nf4_bytes(int64_t count) {
  return count / kNf4Block * kNf4Bytes;
}

}  // namespace trireme
