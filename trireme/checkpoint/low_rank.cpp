#include "trireme/checkpoint/low_rank.h"

#include <algorithm>
#include <cmath>

namespace trireme::checkpoint {
namespace {

/// (rows, columns) to (columns, rows).
std::vector<float> transposed(std::span<const float> values, int64_t rows, int64_t columns) {
  std::vector<float> result(values.size());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column)
      result[static_cast<size_t>(column * rows + row)] = values[static_cast<size_t>(row * columns + column)];
  }
  return result;
}

/// sum (rows, columns) += scale * left (rows, rank) right (rank, columns), a row after the other, so that one
/// stays in the processor's cache while all of `rank` is added to it.
void add_product(std::span<float> sum, std::span<const float> left, std::span<const float> right,
                 int64_t rank, double scale) {
  const auto terms = static_cast<size_t>(rank);
  const size_t rows = left.size() / terms, columns = right.size() / terms;
  std::vector<float> change(columns);
  for (size_t row = 0; row < rows; ++row) {
    std::ranges::fill(change, 0.0F);
    for (size_t term = 0; term < terms; ++term) {
      const float factor = left[row * terms + term];
      const float* const added = &right[term * columns];
      for (size_t column = 0; column < columns; ++column) change[column] += factor * added[column];
    }
    float* const out = &sum[row * columns];
    for (size_t column = 0; column < columns; ++column)
      out[column] += static_cast<float>(scale) * change[column];
  }
}

/// Calls body(output, elements of one input's or output's row) for each row of the matrix as it is kept.
template <typename Body>
void visit_elements(const LayerWeight& weight, Body body) {
  const int64_t rows = weight.in_out ? weight.in : weight.out,
                columns = weight.in_out ? weight.out : weight.in;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column)
      body(static_cast<size_t>(weight.in_out ? column : row),
           weight.values[static_cast<size_t>(row * columns + column)]);
  }
}

}  // namespace

LayerWeight layer_weight(std::span<float> values, const plan::Shape& shape, bool in_out) {
  return {.values = values, .out = shape[in_out ? 1 : 0], .in = shape[in_out ? 0 : 1], .in_out = in_out};
}

std::vector<float> lengths_of_rows(const LayerWeight& weight) {
  std::vector<double> squares(static_cast<size_t>(weight.out));
  visit_elements(weight,
                 [&](size_t out, float& value) { squares[out] += static_cast<double>(value) * value; });
  std::vector<float> lengths;
  for (const double square : squares) lengths.push_back(static_cast<float>(std::sqrt(square)));
  return lengths;
}

void add_low_rank(const LayerWeight& weight, const LowRank& adapter) {
  const auto rank = static_cast<int64_t>(adapter.first.size()) / weight.in;
  if (weight.in_out) {
    add_product(weight.values, transposed(adapter.first, rank, weight.in),
                transposed(adapter.second, weight.out, rank), rank, adapter.scale);
  } else {
    add_product(weight.values, adapter.second, adapter.first, rank, adapter.scale);
  }
  if (adapter.lengths.empty()) return;
  std::vector<float> ratios = lengths_of_rows(weight);
  for (size_t out = 0; out < ratios.size(); ++out)
    ratios[out] = ratios[out] > 0.0F ? adapter.lengths[out] / ratios[out] : 0.0F;
  visit_elements(weight, [&](size_t out, float& value) { value *= ratios[out]; });
}

}  // namespace trireme::checkpoint
