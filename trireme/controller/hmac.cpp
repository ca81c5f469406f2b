#include "trireme/controller/hmac.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::controller {
namespace {

constexpr size_t kBlockBytes = 64;
using HashState = std::array<uint32_t, 8>;

constexpr HashState kFirstState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr std::array<uint32_t, 64> kRoundWords = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian_word(std::string_view block, size_t index) {
  uint32_t word = 0;
  for (size_t i = 0; i < 4; ++i) word = word << 8 | static_cast<unsigned char>(block[4 * index + i]);
  return word;
}

std::array<uint32_t, 64> message_schedule(std::string_view block) {
  std::array<uint32_t, 64> w{};
  for (size_t i = 0; i < 16; ++i) w[i] = big_endian_word(block, i);
  for (size_t i = 16; i < w.size(); ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  return w;
}

/// FIPS 180-4, section 6.2.2; a to h are the letters of that page.
void hash_block(HashState& state, std::string_view block) {
  const std::array<uint32_t, 64> w = message_schedule(block);
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < w.size(); ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundWords[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = std::exchange(g, std::exchange(f, std::exchange(e, d + t1)));
    d = std::exchange(c, std::exchange(b, std::exchange(a, t1 + t2)));
  }
  const HashState added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

/// The last bytes of a message with FIPS's padding: a bit, zeros, and the length in bits.
std::string padded_tail(std::string_view tail, uint64_t message_bytes) {
  std::string padded(tail);
  padded += '\x80';
  while (padded.size() % kBlockBytes != kBlockBytes - 8) padded += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) padded += static_cast<char>(8 * message_bytes >> shift & 0xff);
  return padded;
}

std::string digest_of(const HashState& state) {
  std::string digest;
  for (const uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift & 0xff);
  }
  return digest;
}

std::string with_each_byte_xor(std::string text, char mask) {
  for (char& letter : text) letter = static_cast<char>(letter ^ mask);
  return text;
}

}  // namespace

std::string sha256(std::string_view message) {
  HashState state = kFirstState;
  const size_t whole = message.size() / kBlockBytes * kBlockBytes;
  for (size_t at = 0; at < whole; at += kBlockBytes) hash_block(state, message.substr(at, kBlockBytes));
  const std::string tail = padded_tail(message.substr(whole), message.size());
  for (size_t at = 0; at < tail.size(); at += kBlockBytes)
    hash_block(state, std::string_view(tail).substr(at, kBlockBytes));
  return digest_of(state);
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string block = key.size() > kBlockBytes ? sha256(key) : std::string(key);
  block.resize(kBlockBytes, '\0');
  const std::string inner = sha256(with_each_byte_xor(block, 0x36).append(message));
  return sha256(with_each_byte_xor(block, 0x5c).append(inner));
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char differs = 0;  // volatile, so that no compiler leaves early
  for (size_t i = 0; i < a.size(); ++i) differs = static_cast<unsigned char>(differs | (a[i] ^ b[i]));
  return differs == 0;
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t have = 0; have < count;) {
    const ssize_t got = ::getrandom(bytes.data() + have, count - have, 0);
    if (got < 0 && errno != EINTR) {
      throw EnvironmentError(
          "[controller.random_bytes] the kernel gives no random bytes: {}; check that the "
          "sandbox allows getrandom",
          errno_text(errno));
    }
    have += got > 0 ? static_cast<size_t>(got) : 0;
  }
  return bytes;
}

}  // namespace trireme::controller
