#pragma once
// Blocks of numbers in NF4, 4-bit NormalFloat (Dettmers et al. 2023, QLoRA: Efficient Finetuning of Quantized
// LLMs): each number is one of 16 values between -1 and 1, a code, times the block's largest magnitude.
#include <cstdint>

namespace trireme {

inline constexpr int64_t kNf4Block = 64;                 ///< numbers in a block
inline constexpr int64_t kNf4CodeBytes = kNf4Block / 2;  ///< two codes a byte
inline constexpr int64_t kNf4Bytes =
    kNf4CodeBytes + 4;  ///< of a block: its codes, then the magnitude in fp32

/// The values of codes 0 to 15, as the paper's authors publish them.
struct Nf4Values {
  float of[16] = {-1.0F,
                  -0.6961928009986877F,
                  -0.5250730514526367F,
                  -0.39491748809814453F,
                  -0.28444138169288635F,
                  -0.18477343022823334F,
                  -0.09105003625154495F,
                  0.0F,
                  0.07958029955625534F,
                  0.16093020141124725F,
                  0.24611230194568634F,
                  0.33791524171829224F,
                  0.44070982933044434F,
                  0.5626170039176941F,
                  0.7229568362236023F,
                  1.0F};
};
inline constexpr Nf4Values kNf4Values;

/// Bytes of `count` numbers, which are whole blocks.
constexpr int64_t nf4_bytes(int64_t count) {
  return count / kNf4Block * kNf4Bytes;
}

}  // namespace trireme
