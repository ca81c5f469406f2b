#include "trireme/data/document_table.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace trireme::data {
namespace {

using Starts = std::span<int32_t>;

/// Writes the starts of one sequence.
void write_starts(Starts starts, const int64_t* tokens, int64_t end_token) {
  for (size_t i = 0; i < starts.size(); ++i) {
    const bool begins = i == 0 || tokens[i - 1] == end_token;
    starts[i] = begins ? static_cast<int32_t>(i) : starts[i - 1];
  }
}

/// Writes the starts of one sequence by the places where documents begin.
void write_starts(Starts starts, const std::vector<int64_t>& begins) {
  std::ranges::fill(starts, 0);
  for (const int64_t begin : begins)
    std::ranges::fill(starts.subspan(static_cast<size_t>(begin)), static_cast<int32_t>(begin));
}

/// A document ends where the next begins: of all sequences one after another.
void write_ends(at::Tensor& ends, const at::Tensor& starts) {
  int32_t* end = ends.mutable_data_ptr<int32_t>();
  const auto* const start = starts.const_data_ptr<int32_t>();
  const int64_t length = starts.size(1), tokens = starts.numel();
  for (int64_t i = 0; i < tokens; ++i) {
    if (start[i] == i % length) *end++ = static_cast<int32_t>(i);
  }
  *end = static_cast<int32_t>(tokens);
}

/// The table of which body(sequence, starts) writes the starts.
template <typename Body>
DocumentTable make_table(const at::Tensor& tokens, bool pin_memory, const Body& body) {
  const int64_t count = tokens.size(0), length = tokens.size(1);
  const auto options = at::TensorOptions().dtype(at::kInt).pinned_memory(pin_memory);
  DocumentTable table{.starts = at::empty({count, length}, options)};
  int32_t* const first = table.starts.mutable_data_ptr<int32_t>();
  for (int64_t row = 0; row < count; ++row)
    body(row, Starts(first + row * length, static_cast<size_t>(length)));
  int64_t documents = 0;
  for (int64_t i = 0; i < count * length; ++i) documents += first[i] == i % length ? 1 : 0;
  table.ends = at::empty({documents + 1}, options);
  write_ends(table.ends, table.starts);
  return table;
}

}  // namespace

DocumentTable document_table(const at::Tensor& tokens, int64_t end_token, bool pin_memory) {
  const at::Tensor rows = tokens.contiguous();
  return make_table(rows, pin_memory, [&](int64_t row, Starts starts) {
    write_starts(starts, rows.const_data_ptr<int64_t>() + row * rows.size(1), end_token);
  });
}

DocumentTable document_table(const TokenSamples& samples, std::span<const int64_t> indices,
                             const at::Tensor& tokens, int64_t end_token, bool pin_memory) {
  const at::Tensor rows = tokens.contiguous();
  return make_table(rows, pin_memory, [&](int64_t row, Starts starts) {
    const auto begins = samples.document_begins(indices[static_cast<size_t>(row)]);
    if (begins) return write_starts(starts, *begins);
    write_starts(starts, rows.const_data_ptr<int64_t>() + row * rows.size(1), end_token);
  });
}

}  // namespace trireme::data
