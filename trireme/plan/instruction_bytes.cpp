// Instructions as bytes: numbers of seven bits a byte, and nothing for attributes that are 0.
#include <algorithm>
#include <bit>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/plan/instruction.h"

namespace trireme::plan {
namespace {

void append_number(std::string& bytes, uint64_t number) {
  for (; number >= 0x80; number >>= 7) bytes.push_back(static_cast<char>(number | 0x80));
  bytes.push_back(static_cast<char>(number));
}

/// Small numbers of either sign are short.
uint64_t zigzag(int64_t number) {
  return (static_cast<uint64_t>(number) << 1) ^ static_cast<uint64_t>(number >> 63);
}
int64_t from_zigzag(uint64_t number) {
  return static_cast<int64_t>(number >> 1) ^ -static_cast<int64_t>(number & 1);
}

/// A bit for each value that is not 0.
template <typename Values>
uint64_t presence(const Values& values) {
  uint64_t bits = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::bit_cast<uint64_t>(values[i]) != 0) bits |= uint64_t{1} << i;
  }
  return bits;
}

/// 0: no placement; 1: R; 2: P; 3 and more: a dimension to split along.
uint64_t number_of(const std::optional<TensorPlacement>& place) {
  if (!place) return 0;
  if (place->is_shard()) return 3 + static_cast<uint64_t>(place->dim);
  return place->is_replicate() ? 1 : 2;
}

class InstructionTaker {
 public:
  explicit InstructionTaker(std::string_view& bytes) : bytes_(bytes) {}

  Instruction take() {
    Instruction one;
    one.kind = static_cast<InstructionKind>(number_below(static_cast<uint64_t>(InstructionKind::kBatch) + 1));
    if (one.kind == InstructionKind::kOp) {
      one.op = static_cast<Op>(number_below(kNames<Op>.size()));
      one.no_grad = number_below(2) != 0;
    }
    one.signal = static_cast<int32_t>(number_below(uint64_t{1} << 31)) - 1;
    one.line = static_cast<uint32_t>(number_below(uint64_t{1} << 32));
    one.inputs = static_cast<uint16_t>(number_below(kMostOpInputs + 1));
    one.outputs = static_cast<uint16_t>(number_below(kMostOpResults + 1));
    for (size_t i = 0; i < one.inputs; ++i)
      one.input[i] = static_cast<uint32_t>(number_below(uint64_t{1} << 32));
    for (size_t i = 0; i < one.outputs; ++i)
      one.output[i] = static_cast<uint32_t>(number_below(uint64_t{1} << 32));
    take_place(one);
    take_attributes(one.attributes);
    return one;
  }

 private:
  [[noreturn]] static void fail() {
    throw DataError("[plan.program] bytes are no instruction; another version of the program wrote them");
  }

  unsigned char byte() {
    if (bytes_.empty()) fail();
    const auto next = static_cast<unsigned char>(bytes_.front());
    bytes_.remove_prefix(1);
    return next;
  }

  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      const unsigned char next = byte();
      if (shift == 63 && next > 1) fail();
      value |= static_cast<uint64_t>(next & 0x7f) << shift;
      if (next < 0x80) return value;
    }
    fail();
  }

  uint64_t number_below(uint64_t end) {
    const uint64_t value = number();
    if (value >= end) fail();
    return value;
  }

  void take_place(Instruction& one) {
    constexpr uint64_t kMostDims = 64;
    const uint64_t place = number_below(3 + kMostDims);
    if (place == 1) one.place = TensorPlacement::replicate();
    if (place == 2) one.place = TensorPlacement::partial();
    if (place > 2) one.place = TensorPlacement::shard(static_cast<int64_t>(place - 3));
  }

  void take_attributes(OpAttributes& attributes) {
    const uint64_t whole = number_below(uint64_t{1} << OpAttributes::kMostWhole),
                   real = number_below(uint64_t{1} << OpAttributes::kMostReal);
    attributes.listed = static_cast<int64_t>(number_below(OpAttributes::kMostListed + 1));
    for (size_t i = 0; i < OpAttributes::kMostWhole; ++i) {
      if (whole >> i & 1) attributes.whole[i] = from_zigzag(number());
    }
    for (size_t i = 0; i < OpAttributes::kMostReal; ++i) {
      if (real >> i & 1) attributes.real[i] = finite();
    }
    for (size_t i = 0; i < static_cast<size_t>(attributes.listed); ++i)
      attributes.list[i] = from_zigzag(number());
  }

  double finite() {
    uint64_t bits = 0;
    for (int shift = 0; shift < 64; shift += 8) bits |= uint64_t{byte()} << shift;
    const double value = std::bit_cast<double>(bits);
    if (!std::isfinite(value)) fail();
    return value;
  }

  std::string_view& bytes_;
};

void append_attributes(std::string& bytes, const OpAttributes& attributes) {
  append_number(bytes, presence(attributes.whole));
  append_number(bytes, presence(attributes.real));
  append_number(bytes, static_cast<uint64_t>(attributes.listed));
  for (const int64_t value : attributes.whole) {
    if (value != 0) append_number(bytes, zigzag(value));
  }
  for (const double value : attributes.real) {
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 0; shift < 64 && bits != 0; shift += 8)
      bytes.push_back(static_cast<char>(bits >> shift));
  }
  for (const int64_t value : attributes.items()) append_number(bytes, zigzag(value));
}

}  // namespace

void append_bytes(std::string& bytes, const Instruction& instruction) {
  append_number(bytes, static_cast<uint64_t>(instruction.kind));
  if (instruction.kind == InstructionKind::kOp) {
    append_number(bytes, static_cast<uint64_t>(instruction.op));
    append_number(bytes, instruction.no_grad ? 1 : 0);
  }
  append_number(bytes, static_cast<uint64_t>(int64_t{instruction.signal} + 1));
  append_number(bytes, instruction.line);
  append_number(bytes, instruction.inputs);
  append_number(bytes, instruction.outputs);
  for (size_t i = 0; i < instruction.inputs; ++i) append_number(bytes, instruction.input[i]);
  for (size_t i = 0; i < instruction.outputs; ++i) append_number(bytes, instruction.output[i]);
  append_number(bytes, number_of(instruction.place));
  append_attributes(bytes, instruction.attributes);
}

Instruction take_instruction(std::string_view& bytes) {
  return InstructionTaker(bytes).take();
}

}  // namespace trireme::plan
