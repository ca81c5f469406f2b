#include "trireme/checkpoint/safetensors_header.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme::checkpoint {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and copied as it is");

constexpr int64_t kDataAlignment = 64;
constexpr size_t kMaxHeaderTensors = 1'000'000;
constexpr size_t kMaxHeaderName = 1024;
constexpr size_t kMaxHeaderDims = 64;
constexpr size_t kMaxMetadata = 65'536;  // entries; each costs some 200 bytes beside its text
constexpr size_t kMaxMetadataBytes = size_t{16} << 20;
constexpr std::string_view kMetadata = "__metadata__";

/// Bits of an element of each dtype of the reference implementation 0.8.
constexpr auto kBits = std::to_array<std::pair<std::string_view, int64_t>>(
    {{"F64", 64},        {"F32", 32},    {"F16", 16},    {"BF16", 16},   {"I64", 64},    {"I32", 32},
     {"I16", 16},        {"I8", 8},      {"U64", 64},    {"U32", 32},    {"U16", 16},    {"U8", 8},
     {"BOOL", 8},        {"C64", 64},    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
     {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 8}});
constexpr std::string_view kFloat4 = "F4";

/// Takes the parser's events; the first violation stops it and is kept as a reason.
class HeaderEvents final : public nlohmann::json_sax<Json> {
 public:
  SafetensorsHeader take() { return std::move(header_); }
  const std::string& reason() const { return reason_; }

  bool start_object(size_t) override {
    if (in_unknown()) return open_unknown();
    ++depth_;
    if (depth_ == 1 || (depth_ == 2 && !in_array_)) return true;
    return fail("is nested deeper than the format allows");
  }

  bool key(std::string& key) override {
    if (unknown_depth_ > 0) return true;
    return depth_ == 1 ? start_entry(key) : start_field(key);
  }

  bool end_object() override {
    if (unknown_depth_ > 0) return close_unknown();
    const bool entry_ends = depth_-- == 2;
    field_.clear();
    if (!entry_ends || name_ == kMetadata) return true;
    return fields_.size() == 3 || fail("needs dtype, shape and data_offsets");
  }

  bool string(std::string& value) override {
    if (in_unknown()) return true;
    if (depth_ == 2 && name_ == kMetadata) return take_metadata(value);
    if (depth_ != 2 || in_array_ || field_ != "dtype") return fail("has an unexpected string");
    entry().dtype = value;
    return true;
  }

  bool start_array(size_t) override {
    if (in_unknown()) return open_unknown();
    const bool fits =
        depth_ == 2 && !in_array_ && name_ != kMetadata && (field_ == "shape" || field_ == "data_offsets");
    in_array_ = true;
    return fits || fail("has an unexpected array");
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (in_unknown()) return true;
    if (!in_array_) return fail("has an unexpected number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return fail("has a number beyond 63 bits");
    if (numbers_.size() == kMaxHeaderDims) return fail("has more than 64 dimensions");
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override {
    if (unknown_depth_ > 0) return close_unknown();
    in_array_ = false;
    const std::vector<int64_t> numbers = std::exchange(numbers_, {});
    if (field_ == "shape") {
      entry().shape = numbers;
      return true;
    }
    if (numbers.size() != 2) return fail("data_offsets are not two numbers");
    entry().begin = numbers[0];
    entry().end = numbers[1];
    return true;
  }

  bool null() override {
    const bool no_metadata = depth_ == 1 && name_ == kMetadata;
    return no_metadata || in_unknown() || fail("has a null");
  }
  bool boolean(bool) override { return in_unknown() || fail("has a boolean"); }
  bool number_integer(number_integer_t) override { return in_unknown() || fail("has a negative number"); }
  bool number_float(number_float_t, const std::string&) override {
    return in_unknown() || fail("has a fractional number");
  }
  bool binary(Json::binary_t&) override { return fail("has binary data"); }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    reason_ = error.what();
    return false;
  }

 private:
  HeaderEntry& entry() { return header_.tensors[name_]; }

  /// Whether what comes is the value, or a part of the value, of a field that the format does not know.
  bool in_unknown() const { return unknown_depth_ > 0 || (depth_ == 2 && is_unknown(field_)); }
  bool is_unknown(std::string_view field) const {
    return name_ != kMetadata && !field.empty() && field != "dtype" && field != "shape" &&
           field != "data_offsets";
  }
  bool open_unknown() {
    constexpr int kDeepest = 64;
    return ++unknown_depth_ <= kDeepest || fail("is nested deeper than 64 levels");
  }
  bool close_unknown() {
    --unknown_depth_;
    return true;
  }

  bool start_entry(const std::string& name) {
    name_ = name;
    fields_.clear();
    if (name.size() > kMaxHeaderName) return fail("has a name longer than 1024 bytes");
    if (!names_.insert(name).second) return fail("is listed twice");
    return names_.size() <= kMaxHeaderTensors || fail("is one tensor too many: the limit is 1000000");
  }

  bool start_field(const std::string& field) {
    field_ = field;
    if (name_ == kMetadata)
      return !header_.metadata.contains(field) || fail(fmt::format("has '{:.80}' twice", field));
    if (is_unknown(field)) return true;
    return fields_.insert(field).second || fail(fmt::format("has '{:.80}' twice", field));
  }

  bool take_metadata(const std::string& value) {
    metadata_bytes_ += field_.size() + value.size();
    if (metadata_bytes_ > kMaxMetadataBytes) return fail("is longer than 16 MiB");
    header_.metadata[field_] = value;
    return header_.metadata.size() <= kMaxMetadata || fail("has more than 65536 entries");
  }

  bool fail(std::string_view what) {
    reason_ = names_.empty() ? fmt::format("it {}", what) : fmt::format("entry '{:.80}' {}", name_, what);
    return false;
  }

  SafetensorsHeader header_;
  std::set<std::string> names_, fields_;
  std::string name_, field_;
  std::vector<int64_t> numbers_;
  std::string reason_;
  size_t metadata_bytes_ = 0;
  int depth_ = 0;
  int unknown_depth_ = 0;  ///< lists and objects that are open in the value of an unknown field
  bool in_array_ = false;
};

[[noreturn]] void malformed(const std::string& path, std::string_view reason) {
  throw DataError("[checkpoint.safetensors] {}: bad header: {}; fetch the file again from its source", path,
                  printable_line(reason));
}

constexpr int64_t kBitsOfByte = 8;

/// Bits of the entry's shape, or -1 when they do not fit 63 bits.
int64_t checked_bits(const HeaderEntry& entry) {
  int64_t bits = safetensors_bits(entry.dtype);
  int64_t strides =
      bits;  // a zero dimension must not hide the overflow of the others, for strides are products too
  for (const int64_t dim : entry.shape) {
    if (__builtin_mul_overflow(bits, dim, &bits)) return -1;
    if (__builtin_mul_overflow(strides, std::max<int64_t>(dim, 1), &strides)) return -1;
  }
  return bits;
}

/// Checks what the file says of the entry, and takes its shape.
void check_entry(const std::string& path, const std::string& name, HeaderEntry& entry) {
  if (safetensors_bits(entry.dtype) == 0)
    malformed(path, fmt::format("tensor '{:.80}' has unknown dtype '{:.20}'", name, entry.dtype));
  const auto shape = shape_from_file(entry.dtype, entry.shape);
  if (!shape)
    malformed(path, fmt::format("tensor '{:.80}' of F4 has the shape {}, whose last dimension is not even, "
                                "but two numbers make a byte",
                                name, fmt::join(entry.shape, "x")));
  entry.shape = *shape;
  const int64_t bits = checked_bits(entry);
  if (bits < 0) malformed(path, fmt::format("the shape of tensor '{:.80}' overflows 63 bits", name));
  if (bits % kBitsOfByte != 0)
    malformed(path, fmt::format("tensor '{:.80}' of {} {} ends within a byte", name, entry.dtype,
                                fmt::join(entry.shape, "x")));
  const int64_t bytes = bits / kBitsOfByte;
  if (entry.end < entry.begin || entry.end - entry.begin != bytes) {
    malformed(path,
              fmt::format("tensor '{:.80}' of {} {} needs {} bytes, but data_offsets are [{}, {}]", name,
                          entry.dtype, fmt::join(entry.shape, "x"), bytes, entry.begin, entry.end));
  }
}

using Named = std::pair<const std::string, HeaderEntry>;

std::vector<const Named*> by_offset(const SafetensorsHeader& header) {
  std::vector<const Named*> entries;
  for (const Named& entry : header.tensors) entries.push_back(&entry);
  std::ranges::stable_sort(entries, {},
                           [](const Named* e) { return std::pair(e->second.begin, e->second.end); });
  return entries;
}

void check_coverage(const std::string& path, const SafetensorsHeader& header, int64_t data_bytes) {
  int64_t end = 0;
  for (const Named* entry : by_offset(header)) {
    if (entry->second.begin != end) {
      malformed(path,
                fmt::format("tensor '{:.80}' starts at byte {} of the data, but the previous one ends at {}",
                            entry->first, entry->second.begin, end));
    }
    end = entry->second.end;
  }
  if (end != data_bytes) {
    malformed(path, fmt::format("the tensors take {} bytes, but the file has {} after the header", end,
                                data_bytes));
  }
}

std::string format_entry(const Named& entry) {
  const auto& [name, info] = entry;
  return fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", Json(name).dump(),
                     info.dtype, fmt::join(shape_in_file(info.dtype, info.shape), ","), info.begin, info.end);
}

}  // namespace

int64_t safetensors_bits(std::string_view dtype) {
  const auto* found = std::ranges::find(kBits, dtype, &std::pair<std::string_view, int64_t>::first);
  return found == kBits.end() ? 0 : found->second;
}

int64_t safetensors_itemsize(std::string_view dtype) {
  const int64_t bits = safetensors_bits(dtype);
  return bits % kBitsOfByte == 0 ? bits / kBitsOfByte : 0;
}

void check_readable_dtype(const std::string& path, const std::string& tensor, std::string_view dtype) {
  if (safetensors_itemsize(dtype) > 0) return;
  throw DataError(
      "[checkpoint.safetensors] {}: tensor '{:.80}' is of {}, whose numbers of {} bits can be listed but not "
      "read; convert it to a dtype of torch with the tool that wrote it",
      path, printable_line(tensor), dtype, safetensors_bits(dtype));
}

std::vector<int64_t> shape_in_file(std::string_view dtype, std::vector<int64_t> shape) {
  if (dtype == kFloat4 && !shape.empty()) shape.back() *= 2;
  return shape;
}

std::optional<std::vector<int64_t>> shape_from_file(std::string_view dtype, std::vector<int64_t> shape) {
  if (dtype != kFloat4) return shape;
  if (shape.empty() || shape.back() % 2 != 0) return std::nullopt;
  shape.back() /= 2;
  return shape;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes,
                                           const std::string& path) {
  const size_t begin = json.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos || json[begin] != '{') malformed(path, "it does not start with '{'");
  // The parser takes a zero byte for the end and would leave what follows unread.
  if (json.find('\0') != std::string_view::npos) malformed(path, "it contains a zero byte");
  HeaderEvents events;
  if (!Json::sax_parse(json.begin(), json.end(), &events)) malformed(path, events.reason());
  SafetensorsHeader header = events.take();
  for (auto& [name, entry] : header.tensors) check_entry(path, name, entry);
  check_coverage(path, header, data_bytes);
  return header;
}

std::string format_safetensors_header(const SafetensorsHeader& header) {
  std::vector<std::string> parts;
  if (!header.metadata.empty())
    parts.push_back(fmt::format(R"("{}":{})", kMetadata, Json(header.metadata).dump()));
  for (const Named* entry : by_offset(header)) parts.push_back(format_entry(*entry));
  return fmt::format("{{{}}}", fmt::join(parts, ","));
}

std::string safetensors_preamble(const SafetensorsHeader& header) {
  std::string json = format_safetensors_header(header);
  const auto unpadded = kHeaderLengthBytes + static_cast<int64_t>(json.size());
  const int64_t padded = (unpadded + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  json.append(static_cast<size_t>(padded - unpadded), ' ');
  const uint64_t length = json.size();
  TRIREME_CHECK(length <= kMaxHeaderBytes,
                "[checkpoint.safetensors] the header of {} bytes for {} tensors is too long", length,
                header.tensors.size());
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + json;
}

}  // namespace trireme::checkpoint
