#include "trireme/kernels/cpu_matmul.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "trireme/kernels/vectors.h"

namespace trireme::kernels {
namespace {

// A tile of the product stays in registers: kTileRows x kTileVectors vectors, beside vectors of B and an
// element of A.
#if defined(__AVX512F__)
constexpr int64_t kTileRows = 12;
#elif defined(__AVX__)
constexpr int64_t kTileRows = 6;
#else
constexpr int64_t kTileRows = 4;
#endif
constexpr int64_t kTileVectors = 2, kTileColumns = kTileVectors * kLanes;

/// The part of B used at a time: it stays in the second-level cache beside rows of A and of the product.
constexpr int64_t kInner = 512, kPackedFloats = 96 * 1024;
/// Tiles that are computed one below the other for the same columns of B.
constexpr int64_t kTilesDown = 4;

/// The values to which a tile is added; none where data is null.
struct Start {
  const float* data;
  int64_t stride;
};
/// Rows of A for a tile: element (row, step) is data[row * stride + step], or where A lies transposed
/// data[step * stride + row].
struct TileRows {
  const float* data;
  int64_t stride;
};

/// C (kRows, kTileColumns) = start + A B for packed B (inner, kTileColumns).
template <int kRows, bool kTransposed>
void tile(float* c, int64_t c_stride, Start start, TileRows a, const float* b, int64_t inner) {
  Vector sums[kRows][kTileVectors] = {};
  add_product(
      sums,
      [&](int64_t row, int64_t step) {
        return kTransposed ? a.data[step * a.stride + row] : a.data[row * a.stride + step];
      },
      b, kTileColumns, inner);
#pragma GCC unroll 12
  for (int64_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int vector = 0; vector < kTileVectors; ++vector) {
      Vector sum = sums[row][vector];
      if (start.data != nullptr) sum += load(start.data + row * start.stride + vector * kLanes);
      store(c + row * c_stride + vector * kLanes, sum);
    }
  }
}

using Tile = void (*)(float*, int64_t, Start, TileRows, const float*, int64_t);
template <bool kTransposed, int... kRows>
constexpr std::array<Tile, sizeof...(kRows) + 1> tiles_of(std::integer_sequence<int, kRows...>) {
  return {nullptr, &tile<kRows + 1, kTransposed>...};
}
/// Tiles by their number of rows.
using Tiles = std::array<Tile, kTileRows + 1>;
constexpr auto kUpTo = std::make_integer_sequence<int, kTileRows>();
constexpr Tiles kPlain = tiles_of<false>(kUpTo), kTransposed = tiles_of<true>(kUpTo);

/// The last columns, fewer than a tile has.
void narrow_tile(Tile tile, float* c, int64_t c_stride, Start start, TileRows a, const float* b,
                 int64_t inner, int64_t rows, int64_t columns) {
  float whole[kTileRows * kTileColumns], before[kTileRows * kTileColumns] = {};
  if (start.data != nullptr) {
    for (int64_t row = 0; row < rows; ++row)
      std::copy_n(start.data + row * start.stride, columns, before + row * kTileColumns);
    start = {before, kTileColumns};
  }
  tile(whole, kTileColumns, start, a, b, inner);
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(whole + row * kTileColumns, columns, c + row * c_stride);
}

/// (inner, kTileColumns) of B's columns, zeros beyond `columns`.
void pack_columns(float* to, const MatrixView& b, int64_t columns, int64_t inner) {
  if (columns < kTileColumns) std::fill_n(to, inner * kTileColumns, 0.0f);
  if (b.column_stride == 1) {
    for (int64_t step = 0; step < inner; ++step)
      std::copy_n(b.data + step * b.row_stride, columns, to + step * kTileColumns);
    return;
  }
  constexpr int64_t kAtOnce = 16;  // of more the first-level cache would lose some before their next element
  for (int64_t first = 0; first < columns; first += kAtOnce) {
    const int64_t end = std::min(columns, first + kAtOnce);
    for (int64_t step = 0; step < inner; ++step)
      for (int64_t column = first; column < end; ++column)
        to[step * kTileColumns + column] = b.data[step * b.row_stride + column * b.column_stride];
  }
}

/// The part of a product that one thread computes.
struct Task {
  float* out;
  int64_t out_stride;
  Start start;
  MatrixView a, b;
  int64_t m, n, k;
};

/// All rows of the task times `columns` columns of B, which are packed.
void multiply_block(const Task& task, const float* packed, int64_t columns, int64_t inner) {
  const bool transposed = task.a.column_stride != 1;
  const Tiles& tiles = transposed ? kTransposed : kPlain;
  const int64_t stride = transposed ? task.a.column_stride : task.a.row_stride;
  for (int64_t first = 0; first < task.m; first += kTilesDown * kTileRows) {
    const int64_t end = std::min(task.m, first + kTilesDown * kTileRows);
    for (int64_t column = 0; column < columns; column += kTileColumns) {
      const float* const b = packed + column * inner;
      const int64_t wide = columns - column;
      for (int64_t row = first; row < end; row += kTileRows) {
        const int64_t tall = std::min(kTileRows, end - row);
        const Tile tile = tiles[static_cast<size_t>(tall)];
        const TileRows rows{task.a.data + row * task.a.row_stride, stride};
        float* const c = task.out + row * task.out_stride + column;
        Start start = task.start;
        if (start.data != nullptr) start.data += row * start.stride + column;
        if (wide >= kTileColumns) {
          tile(c, task.out_stride, start, rows, b, inner);
        } else {
          narrow_tile(tile, c, task.out_stride, start, rows, b, inner, tall, wide);
        }
      }
    }
  }
}

void multiply_task(const Task& task) {
  const int64_t deepest = std::min(kInner, task.k),
                widest =
                    std::min(round_up(task.n, kTileColumns), round_up(kPackedFloats / deepest, kTileColumns));
  thread_local std::vector<Vector> memory;
  memory.resize(std::max(memory.size(), static_cast<size_t>(deepest * widest / kLanes)));
  auto* const packed = reinterpret_cast<float*>(memory.data());
  for (int64_t first = 0; first < task.n; first += widest) {
    const int64_t columns = std::min(widest, task.n - first);
    for (int64_t step = 0; step < task.k; step += deepest) {
      const int64_t inner = std::min(deepest, task.k - step);
      for (int64_t column = 0; column < columns; column += kTileColumns) {
        const MatrixView from{
            task.b.data + step * task.b.row_stride + (first + column) * task.b.column_stride,
            task.b.row_stride, task.b.column_stride};
        pack_columns(packed + column * inner, from, std::min(kTileColumns, columns - column), inner);
      }
      Task block = task;
      block.out += first;
      if (step > 0) block.start = {task.out, task.out_stride};
      if (block.start.data != nullptr) block.start.data += first;
      block.a.data += step * task.a.column_stride;
      multiply_block(block, packed, columns, inner);
    }
  }
}

int64_t divided_up(int64_t count, int64_t by) {
  return (count + by - 1) / by;
}

/// How many threads share out rows and columns. Each packs what it needs of B, which takes as long as a tile.
std::pair<int64_t, int64_t> shares(int64_t tiles_down, int64_t tiles_across, int64_t threads) {
  std::pair<int64_t, int64_t> best{1, 1};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t across = 1; across <= threads; ++across) {
    const int64_t down = threads / across,
                  tiles = divided_up(tiles_across, across) * (divided_up(tiles_down, down) + 1);
    if (tiles >= least) continue;
    least = tiles;
    best = {down, across};
  }
  return best;
}

}  // namespace

bool multiplies_faster(const MatrixView& a) {
#if defined(__AVX512F__) && defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd") != 0;
  // Rows of A a page apart compete for the same places of the first-level cache, or take a page each.
  constexpr int64_t kPage = 4096 / sizeof(float);
  return is_amd && (a.column_stride == 1 ? a.row_stride % kPage != 0 : a.column_stride < kPage);
#else
  static_cast<void>(a);
  return false;
#endif
}

void multiply(float* out, const MatrixView& a, const MatrixView& b, int64_t m, int64_t n, int64_t k,
              const float* start, int64_t start_stride) {
  constexpr int64_t kWorthAThread = 1 << 17;  // multiplications
  const int64_t tiles_down = divided_up(m, kTileRows), tiles_across = divided_up(n, kTileColumns);
  const int64_t threads = std::clamp<int64_t>(m * n * k / kWorthAThread, 1, at::get_num_threads());
  const auto [down, across] = shares(tiles_down, tiles_across, threads);
  const int64_t rows = divided_up(tiles_down, down) * kTileRows,
                columns = divided_up(tiles_across, across) * kTileColumns;
  at::parallel_for(0, down * across, 1, [&, across = across](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / across * rows, column = task % across * columns;
      if (row >= m || column >= n) continue;
      multiply_task(
          {.out = out + row * n + column,
           .out_stride = n,
           .start = {start == nullptr ? nullptr : start + row * start_stride + column, start_stride},
           .a = {a.data + row * a.row_stride, a.row_stride, a.column_stride},
           .b = {b.data + column * b.column_stride, b.row_stride, b.column_stride},
           .m = std::min(rows, m - row),
           .n = std::min(columns, n - column),
           .k = k});
    }
  });
}

}  // namespace trireme::kernels
