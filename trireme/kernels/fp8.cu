// Casts from bf16 to FP8, plain and transposed in one pass.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "trireme/kernels/activation.cuh"
#include "trireme/kernels/amax.cuh"
#include "trireme/kernels/fp8_bytes.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kSide = static_cast<int>(kFp8Block);  ///< rows and columns of a tile, one a block of threads
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLanes = 8;                       ///< elements of 16 bytes
constexpr int kGroup = 4;                       ///< rows whose bytes make a word of the transposed copy
constexpr int kGroups = kSide / kGroup;         ///< such words in a tile's column
constexpr int kTurns = kGroups / (2 * kWarps);  ///< groups that a thread takes
constexpr int kHalf = 16;                       ///< lanes that have a row of the tile together

/// The two bf16 of a word without their signs.
__device__ unsigned magnitudes(unsigned word) {
  return word & 0x7fff7fffu;
}

/// bf16 bits as those of fp32.
__device__ unsigned low(unsigned word) {
  return word << 16;
}
__device__ unsigned high(unsigned word) {
  return word & 0xffff0000u;
}

/// A thread's share of a tile: in each turn kGroup rows of kLanes columns. Lanes 0 to 15 of a warp have one
/// group of rows, the others the next.
struct ThreadTile {
  int part, column, group[kTurns];

  __device__ ThreadTile() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    part = lane % kHalf;
    column = part * kLanes;
    for (int turn = 0; turn < kTurns; ++turn) group[turn] = 2 * (warp + kWarps * turn) + lane / kHalf;
  }
};

/// This block's tile. Matrices of `width` columns lie side by side; the tile is in the one that begins at
/// column `begin`.
struct Tile {
  int64_t row, column, begin, width;

  __device__ Tile(int64_t width_in, int64_t begin_in) : begin(begin_in), width(width_in) {
    const int64_t across = (width + kSide - 1) / kSide;
    row = blockIdx.x / across * kSide;
    column = blockIdx.x % across * kSide;
  }
  /// Whether column `i` of the tile is inside its matrix.
  __device__ bool has_column(int i) const { return column + i < width; }
  /// The place of column `i` in all matrices together.
  __device__ int64_t at(int i) const { return begin + column + i; }
};

/// The pair of elements 2i and 2i + 1 of a pack.
__device__ unsigned pair_at(const uint4& pack, int i) {
  return i == 0 ? pack.x : i == 1 ? pack.y : i == 2 ? pack.z : pack.w;
}

/// Element `lane` of a pack.
__device__ float element_at(const uint4& pack, int lane) {
  const unsigned pair = pair_at(pack, lane / 2);
  return __uint_as_float(lane % 2 == 0 ? low(pair) : high(pair));
}

/// The largest magnitude of a pack's elements, as bits of fp32.
__device__ unsigned largest_of(const uint4& pack) {
  const unsigned most = __vmaxu2(__vmaxu2(magnitudes(pack.x), magnitudes(pack.y)),
                                 __vmaxu2(magnitudes(pack.z), magnitudes(pack.w)));
  return larger(low(most), high(most));
}

/// A thread's packs of bf16.
struct Loaded {
  uint4 rows[kTurns][kGroup];

  __device__ float at(int turn, int r, int lane) const { return element_at(rows[turn][r], lane); }
  /// The largest magnitude of this thread's elements, as bits of fp32.
  __device__ unsigned largest_of_all() const {
    unsigned most = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int r = 0; r < kGroup; ++r) most = larger(most, largest_of(rows[turn][r]));
    }
    return most;
  }
  /// The largest magnitudes of this thread's elements in columns 2i and 2i + 1, as two bf16.
  __device__ unsigned column_max(int i) const {
    unsigned most = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int r = 0; r < kGroup; ++r) most = __vmaxu2(most, magnitudes(pair_at(rows[turn][r], i)));
    }
    return most;
  }
};

using Bf16 = __nv_bfloat16;

/// A matrix as it is in memory.
struct Identity {
  static constexpr int kInputs = 1, kOutputs = 1;
};

/// The outputs of Function for matrices that each have `width` columns, in rows that are `stride` elements
/// apart.
template <typename Function>
struct Source {
  struct Input {
    const Bf16* data;
    int64_t stride;
  };
  Input inputs[Function::kInputs];

  /// take(turn, r, packs) for each of this thread's packs, one of each output; zeros beyond the matrices.
  /// Sizes are multiples of 16, so a group of rows is inside or outside as a whole.
  template <typename Take>
  __device__ void visit(const Tile& tile, const ThreadTile& thread, int64_t rows, const Take& take) const {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t row = tile.row + thread.group[turn] * kGroup;
      const bool inside = row < rows && tile.has_column(thread.column);
      RawPack<Bf16, kLanes> raw[kGroup][Function::kInputs];
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
#pragma unroll
        for (int i = 0; i < Function::kInputs; ++i) {
          const Bf16* const from =
              inputs[i].data + (row + r) * inputs[i].stride + tile.column + thread.column;
          inside ? raw[r][i].load(from) : raw[r][i].assign(Pack<Bf16, kLanes>{});
        }
      }
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        uint4 words[Function::kOutputs];
        if constexpr (std::is_same_v<Function, Identity>) {
          const Pack<Bf16, kLanes> pack = raw[r][0].pack();
          memcpy(&words[0], &pack, sizeof(pack));
        } else {
          Pack<Bf16, kLanes> out[Function::kOutputs];
          map_pack<Function>(raw[r], out);
          memcpy(words, out, sizeof(out));
        }
        take(turn, r, words);
      }
    }
  }

  /// The tile of each output.
  __device__ void load(Loaded (&loaded)[Function::kOutputs], const Tile& tile, const ThreadTile& thread,
                       int64_t rows) const {
    visit(tile, thread, rows, [&](int turn, int r, const uint4(&words)[Function::kOutputs]) {
#pragma unroll
      for (int i = 0; i < Function::kOutputs; ++i) loaded[i].rows[turn][r] = words[i];
    });
  }
};

/// The largest magnitudes of the rows and columns of a tile, as bits of fp32. Two threads for each pair of a
/// row and a column: those below kSide have the rows, the others the columns.
class TileMaxima {
 public:
  /// All threads of the block come here, and synchronise afterwards.
  __device__ void find(const Loaded& loaded, const ThreadTile& thread) {
    find_rows(loaded, thread);
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) {
      const unsigned mine = loaded.column_max(i);
      const unsigned both = __vmaxu2(mine, __shfl_xor_sync(0xffffffffu, mine, kHalf));
      if (threadIdx.x % 32 < kHalf) columns_[threadIdx.x / 32][thread.column / 2 + i] = both;
    }
  }

  /// The largest magnitude of this thread's row or column.
  __device__ unsigned mine() const {
    if (threadIdx.x < kSide) return rows_[threadIdx.x];
    const int column = static_cast<int>(threadIdx.x) - kSide;
    unsigned most = columns_[0][column / 2];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) most = __vmaxu2(most, columns_[warp][column / 2]);
    return column % 2 == 0 ? low(most) : high(most);
  }

 private:
  /// A lane has parts of kRows rows. In each exchange it gives half of them away and gets the other lane's
  /// parts of those that it keeps, until it has all of one row.
  __device__ void find_rows(const Loaded& loaded, const ThreadTile& thread) {
    constexpr int kRows = kTurns * kGroup;
    unsigned most[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) most[i] = largest_of(loaded.rows[i / kGroup][i % kGroup]);
    int row = 0;
#pragma unroll
    for (int kept = kRows / 2; kept > 0; kept /= 2) {
      const int distance = kept * kHalf / kRows;
      const bool upper = (thread.part & distance) != 0;
#pragma unroll
      for (int i = 0; i < kept; ++i) {
        const unsigned given = upper ? most[i] : most[i + kept], keeps = upper ? most[i + kept] : most[i];
        most[i] = larger(keeps, __shfl_xor_sync(0xffffffffu, given, distance));
      }
      row += upper ? kept : 0;
    }
    most[0] = larger(most[0], __shfl_xor_sync(0xffffffffu, most[0], 1));
    static_assert(kHalf == 2 * kRows);
    if (thread.part % 2 == 0)
      rows_[(thread.group[0] + row / kGroup * 2 * kWarps) * kGroup + row % kGroup] = most[0];
  }

  unsigned rows_[kSide];
  unsigned columns_[kWarps][kSide / 2];  ///< two bf16 a word
};

__global__ void __launch_bounds__(kThreads) amax_flat(float* out, const uint4* x, int64_t packs) {
  __shared__ unsigned of_warps[kWarps];
  unsigned most = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    most = larger(most, largest_of(x[i]));
  }
  const unsigned of_warp = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const unsigned total = __reduce_max_sync(0xffffffffu, threadIdx.x < kWarps ? of_warps[threadIdx.x] : 0);
  if (threadIdx.x == 0) raise(out, total);
}

__global__ void __launch_bounds__(kThreads)
    amax_rows(float* of_rows, float* of_columns, const Bf16* x, int64_t rows, int64_t columns) {
  __shared__ TileMaxima maxima;
  const Tile tile(columns, 0);
  const ThreadTile thread;
  Loaded loaded[1];
  Source<Identity>{{{x, columns}}}.load(loaded, tile, thread, rows);
  maxima.find(loaded[0], thread);
  __syncthreads();
  const int64_t row = tile.row + threadIdx.x, column = tile.column + threadIdx.x - kSide;
  if (threadIdx.x < kSide) {
    if (row < rows) raise(of_rows + row, maxima.mine());
  } else if (column < columns) {
    raise(of_columns + column, maxima.mine());
  }
}

/// The factors of a tile's values: by row for the plain copy, by column for the transposed one. Each thread
/// computes one of them for all.
struct Inverses {
  float of_row[kSide];
  alignas(16) float of_column[kSide];
};

/// The largest magnitude of the span of this thread's row or column.
template <Fp8Span kSpan>
__device__ float amax_of_span(const Fp8CastCall& call, const Tile& tile, const TileMaxima& maxima) {
  if constexpr (kSpan == Fp8Span::kRowBlock) return __uint_as_float(maxima.mine());
  const int64_t row = tile.row + threadIdx.x;
  const int column = static_cast<int>(threadIdx.x) - kSide;
  if (column < 0) return row < call.rows ? call.amax[row] : 0.0f;
  return tile.has_column(column) ? call.amax[call.rows + tile.at(column)] : 0.0f;
}

/// Where the scale of this thread's row or column goes; nullptr: nowhere, or another block writes it.
template <Fp8Span kSpan>
__device__ float* scale_of_span(const Fp8CastCall& call, const Tile& tile) {
  const int column = static_cast<int>(threadIdx.x) - kSide;
  const bool is_row = column < 0;
  const int64_t row = tile.row + threadIdx.x;
  const bool wanted = (is_row ? call.plain.values : call.transposed.values) != nullptr;
  if (!wanted || (is_row ? row >= call.rows : !tile.has_column(column))) return nullptr;
  float* const scale = is_row ? call.plain.scale : call.transposed.scale;
  const int64_t across = is_row ? tile.at(0) : tile.row, size = is_row ? call.rows : call.columns;
  const int64_t i = is_row ? row : tile.at(column);
  if constexpr (kSpan == Fp8Span::kRowBlock) return scale + across / kSide * size + i;
  return across == 0 ? scale + i : nullptr;
}

/// The largest magnitude of a tile, in every thread.
__device__ float amax_of_tile(const Loaded& loaded, unsigned& most) {
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  const unsigned mine = __reduce_max_sync(0xffffffffu, loaded.largest_of_all());
  if (threadIdx.x % 32 == 0) atomicMax(&most, mine);
  __syncthreads();
  return __uint_as_float(most);
}

/// A thread's packs as bytes of FP8, where a row and a column of them have the same scale.
struct Narrow {
  uint2 rows[kTurns][kGroup];
};

template <__nv_fp8_interpretation_t kFormat>
__device__ uint2 narrowed(const uint4& pack, float by) {
  const auto v = [&](int lane) { return element_at(pack, lane) * by; };
  return make_uint2(word_of<kFormat>(v(0), v(1), v(2), v(3)), word_of<kFormat>(v(4), v(5), v(6), v(7)));
}

/// Four rows of a word become its four columns.
__device__ void transpose(const unsigned (&rows)[kGroup], unsigned (&columns)[kGroup]) {
  const unsigned low01 = __byte_perm(rows[0], rows[1], 0x5140),
                 high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const unsigned low23 = __byte_perm(rows[2], rows[3], 0x5140),
                 high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

template <Fp8Span kSpan>
__device__ void write_scale_of_tile(const Fp8CastCall& call, const Tile& tile, float scale) {
  if (threadIdx.x != 0) return;
  int64_t plain = 0, transposed = 0;
  if constexpr (kSpan == Fp8Span::kTensor) {
    if (blockIdx.x != 0 || tile.begin != 0) return;
  } else {
    const auto padded = [](int64_t size) { return (size / kSide + 3) / 4 * 4; };
    const int64_t row = tile.row / kSide, column = tile.at(0) / kSide;
    plain = row * padded(call.columns) + column;
    transposed = column * padded(call.rows) + row;
  }
  if (call.plain.values != nullptr) call.plain.scale[plain] = scale;
  if (call.transposed.values != nullptr) call.transposed.scale[transposed] = scale;
}

/// The number that is exclusive-ored to the places of a column's words, so that lanes of a warp write to
/// different banks.
__device__ int swizzle(int column) {
  return column / kLanes * 2;
}

/// Where word `group` of a column lies in the transposed tile.
__device__ int word_in_tile(int column, int group) {
  return column * kGroups + (group ^ swizzle(column));
}

/// Words 4 `quad` to 4 `quad` + 3 of a column.
__device__ uint4 quad_of(const unsigned* turned, int column, int quad) {
  const int by = swizzle(column);
  const uint4 found = *reinterpret_cast<const uint4*>(turned + column * kGroups + (quad ^ by / 4) * 4);
  return by % 4 == 0 ? found : make_uint4(found.z, found.w, found.x, found.y);
}

/// The memory that the threads of a block share while they cast a tile.
struct Shared {
  alignas(16) unsigned turned[kSide * kGroups];  ///< words of the transposed copy
  TileMaxima maxima;
  Inverses inverses;
  unsigned most;
};

/// bytes_of(turn, r): those of a pack of the plain copy.
template <typename BytesOf>
__device__ void write_plain(const Fp8CastCall& call, const Tile& tile, const ThreadTile& thread,
                            const BytesOf& bytes_of) {
  if (call.plain.values == nullptr || !tile.has_column(thread.column)) return;
  auto* const out = static_cast<uint8_t*>(call.plain.values);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t row = tile.row + thread.group[turn] * kGroup;
    if (row >= call.rows) continue;
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      *reinterpret_cast<uint2*>(out + (row + r) * call.columns + tile.at(thread.column)) = bytes_of(turn, r);
    }
  }
}

/// words_of(turn, words): of a group of rows, those of the transposed copy, one for each lane of a pack.
template <typename WordsOf>
__device__ void write_transposed(const Fp8CastCall& call, const Tile& tile, const ThreadTile& thread,
                                 Shared& shared, const WordsOf& words_of) {
  if (call.transposed.values == nullptr) return;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    unsigned words[kLanes];
    words_of(turn, words);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      shared.turned[word_in_tile(thread.column + lane, thread.group[turn])] = words[lane];
  }
  __syncthreads();
  auto* const out = static_cast<uint8_t*>(call.transposed.values);
  constexpr int kQuads = kGroups / 4, kQuadRows = 4 * kGroup;
  const int quad = static_cast<int>(threadIdx.x) % kQuads;
  const int64_t row = tile.row + quad * kQuadRows;
  if (row >= call.rows) return;
  for (int column = static_cast<int>(threadIdx.x) / kQuads; column < kSide; column += kThreads / kQuads) {
    if (!tile.has_column(column)) return;
    *reinterpret_cast<uint4*>(out + tile.at(column) * call.rows + row) = quad_of(shared.turned, column, quad);
  }
}

__device__ void write_narrow(const Fp8CastCall& call, const Tile& tile, const ThreadTile& thread,
                             const Narrow& narrow, Shared& shared) {
  write_plain(call, tile, thread, [&](int turn, int r) { return narrow.rows[turn][r]; });
  write_transposed(call, tile, thread, shared, [&](int turn, unsigned(&words)[kLanes]) {
    const auto& rows = narrow.rows[turn];
    unsigned left[kGroup], right[kGroup];
    transpose({rows[0].x, rows[1].x, rows[2].x, rows[3].x}, left);
    transpose({rows[0].y, rows[1].y, rows[2].y, rows[3].y}, right);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) words[i] = left[i], words[kGroup + i] = right[i];
  });
}

/// A scale for each row and each column of a tile.
template <Fp8Span kSpan, __nv_fp8_interpretation_t kFormat>
__device__ void cast_by_rows(const Fp8CastCall& call, const Tile& tile, const ThreadTile& thread,
                             const Loaded& loaded, Shared& shared, float largest_value) {
  if constexpr (kSpan == Fp8Span::kRowBlock) {
    shared.maxima.find(loaded, thread);
    __syncthreads();
  }
  const float amax = counted(amax_of_span<kSpan>(call, tile, shared.maxima));
  if (float* const scale = scale_of_span<kSpan>(call, tile)) *scale = amax / largest_value;
  Inverses& inverses = shared.inverses;
  (threadIdx.x < kSide ? inverses.of_row[threadIdx.x] : inverses.of_column[threadIdx.x - kSide]) =
      largest_value / amax;
  __syncthreads();
  write_plain(call, tile, thread, [&](int turn, int r) {
    return narrowed<kFormat>(loaded.rows[turn][r], inverses.of_row[thread.group[turn] * kGroup + r]);
  });
  write_transposed(call, tile, thread, shared, [&](int turn, unsigned(&words)[kLanes]) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float by = inverses.of_column[thread.column + lane];
      const auto v = [&](int r) { return loaded.at(turn, r, lane) * by; };
      words[lane] = word_of<kFormat>(v(0), v(1), v(2), v(3));
    }
  });
}

/// One scale for all, known beforehand: what is loaded becomes bytes at once. With kSees `seen` is raised,
/// and a pack that is not finite becomes NaN.
template <__nv_fp8_interpretation_t kFormat, typename Function, bool kSees>
__device__ void cast_by_tensor(const Fp8CastCall& call, const Source<Function>& source,
                               const ThreadTile& thread, Shared& shared, float largest_value) {
  constexpr unsigned kInfinity = 0x7f800000u;
  const int64_t width = call.columns / Function::kOutputs;
  const float amax = counted(*call.amax), by = largest_value / amax;
  write_scale_of_tile<Fp8Span::kTensor>(call, Tile(width, 0), amax / largest_value);
  Narrow narrow[Function::kOutputs];
  unsigned most = 0;
  const auto narrow_one = [&](int i, int turn, int r, const uint4& pack) {
    const unsigned of_pack = kSees ? largest_of(pack) : 0;
    most = larger(most, of_pack);
    narrow[i].rows[turn][r] =
        narrowed<kFormat>(pack, of_pack < kInfinity ? by : __uint_as_float(0x7fffffffu));
  };
  if constexpr (std::is_same_v<Function, Identity>) {
    Loaded loaded[1];  // so that all loads are in flight at once
    source.load(loaded, Tile(width, 0), thread, call.rows);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int r = 0; r < kGroup; ++r) narrow_one(0, turn, r, loaded[0].rows[turn][r]);
    }
  } else {
    source.visit(Tile(width, 0), thread, call.rows,
                 [&](int turn, int r, const uint4(&words)[Function::kOutputs]) {
#pragma unroll
                   for (int i = 0; i < Function::kOutputs; ++i) narrow_one(i, turn, r, words[i]);
                 });
  }
  if constexpr (kSees) {
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) raise(call.seen, most);
  }
#pragma unroll
  for (int i = 0; i < Function::kOutputs; ++i) {
    if (i > 0) __syncthreads();
    write_narrow(call, Tile(width, i * width), thread, narrow[i], shared);
  }
}

template <Fp8Span kSpan, __nv_fp8_interpretation_t kFormat, typename Function, bool kSees>
__global__ void __launch_bounds__(kThreads)
    cast_tiles(Fp8CastCall call, Source<Function> source, float largest_value) {
  __shared__ Shared shared;
  const ThreadTile thread;
  if constexpr (kSpan == Fp8Span::kTensor) {
    cast_by_tensor<kFormat, Function, kSees>(call, source, thread, shared, largest_value);
  } else {
    const int64_t width = call.columns / Function::kOutputs;
    Loaded loaded[Function::kOutputs];
    source.load(loaded, Tile(width, 0), thread, call.rows);
#pragma unroll
    for (int i = 0; i < Function::kOutputs; ++i) {
      if (i > 0) __syncthreads();
      const Tile tile(width, i * width);
      if constexpr (kSpan == Fp8Span::kSquareBlock) {
        const float amax = counted(amax_of_tile(loaded[i], shared.most));
        write_scale_of_tile<kSpan>(call, tile, amax / largest_value);
        Narrow narrow;
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
          for (int r = 0; r < kGroup; ++r)
            narrow.rows[turn][r] = narrowed<kFormat>(loaded[i].rows[turn][r], largest_value / amax);
        }
        write_narrow(call, tile, thread, narrow, shared);
      } else {
        cast_by_rows<kSpan, kFormat>(call, tile, thread, loaded[i], shared, largest_value);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) turn_tiles(Fp8CastCall call) {
  __shared__ Shared shared;
  const Tile tile(call.columns, 0);
  const ThreadTile thread;
  const auto* const x = static_cast<const uint8_t*>(call.x);
  Narrow narrow;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t row = tile.row + thread.group[turn] * kGroup;
    const bool inside = row < call.rows && tile.has_column(thread.column);
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      const auto* const from =
          reinterpret_cast<const uint2*>(x + (row + r) * call.columns + tile.at(thread.column));
      narrow.rows[turn][r] = inside ? *from : make_uint2(0, 0);
    }
  }
  write_narrow(call, tile, thread, narrow, shared);
}

unsigned tiles_of(int64_t rows, int64_t columns) {
  return static_cast<unsigned>(((rows + kSide - 1) / kSide) * ((columns + kSide - 1) / kSide));
}

template <Fp8Span kSpan, bool kSees, typename Function>
int cast_source(const Fp8CastCall& call, const Source<Function>& source, cudaStream_t stream) {
  const unsigned tiles = tiles_of(call.rows, call.columns / Function::kOutputs);
  if (call.format == Fp8Format::kE4m3) {
    cast_tiles<kSpan, __NV_E4M3, Function, kSees>
        <<<tiles, kThreads, 0, stream>>>(call, source, largest(Fp8Format::kE4m3));
  } else {
    cast_tiles<kSpan, __NV_E5M2, Function, kSees>
        <<<tiles, kThreads, 0, stream>>>(call, source, largest(Fp8Format::kE5m2));
  }
  return cudaGetLastError();
}

template <Fp8Span kSpan, bool kSees = false>
int cast_values(const Fp8CastCall& call, cudaStream_t stream) {
  const Source<Identity> source{{{static_cast<const Bf16*>(call.x), call.columns}}};
  return cast_source<kSpan, kSees>(call, source, stream);
}

template <Fp8Span kSpan, bool kSees>
int cast_swiglu(const Fp8CastCall& call, cudaStream_t stream) {
  const auto *gate = static_cast<const Bf16*>(call.x), *dy = static_cast<const Bf16*>(call.dy);
  if (call.of == Fp8Of::kSwiglu) {
    const int64_t width = call.columns, stride = 2 * width;
    const Source<SwigluForward<Bf16>> source{{{gate, stride}, {gate + width, stride}}};
    return cast_source<kSpan, kSees>(call, source, stream);
  }
  const int64_t stride = call.columns, width = stride / 2;
  const Source<SwigluBackward<Bf16>> source{{{gate, stride}, {gate + width, stride}, {dy, width}}};
  return cast_source<kSpan, kSees>(call, source, stream);
}

}  // namespace

int fp8_amax(float* out, const void* x, int64_t count, void* stream) {
  if (count == 0) return cudaSuccess;
  constexpr int64_t kMostBlocks = 132 * 8;  // enough loads in flight on the largest GPUs
  const int64_t packs = count / kLanes, needed = (packs + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(needed < kMostBlocks ? needed : kMostBlocks);
  amax_flat<<<blocks, kThreads, 0, as_stream(stream)>>>(out, static_cast<const uint4*>(x), packs);
  return cudaGetLastError();
}

int fp8_amax_rows(float* of_rows, float* of_columns, const void* x, int64_t rows, int64_t columns,
                  void* stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  amax_rows<<<tiles_of(rows, columns), kThreads, 0, as_stream(stream)>>>(
      of_rows, of_columns, static_cast<const Bf16*>(x), rows, columns);
  return cudaGetLastError();
}

int fp8_cast(const Fp8CastCall& call, void* stream) {
  if (call.rows == 0 || call.columns == 0) return cudaSuccess;
  const cudaStream_t on = as_stream(stream);
  const bool sees = call.seen != nullptr;
  if (call.of != Fp8Of::kValues) {
    if (call.span == Fp8Span::kRowBlock) return cast_swiglu<Fp8Span::kRowBlock, false>(call, on);
    if (call.span == Fp8Span::kTensor && sees) return cast_swiglu<Fp8Span::kTensor, true>(call, on);
    return cudaErrorInvalidValue;
  }
  switch (call.span) {
    case Fp8Span::kTensor:
      return sees ? cast_values<Fp8Span::kTensor, true>(call, on) : cast_values<Fp8Span::kTensor>(call, on);
    case Fp8Span::kRow:
      return cast_values<Fp8Span::kRow>(call, on);
    case Fp8Span::kRowBlock:
      return cast_values<Fp8Span::kRowBlock>(call, on);
    case Fp8Span::kSquareBlock:
      break;
  }
  return cast_values<Fp8Span::kSquareBlock>(call, on);
}

int fp8_transpose(void* out, const void* x, int64_t rows, int64_t columns, void* stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const Fp8CastCall call{.x = x,
                         .amax = nullptr,
                         .rows = rows,
                         .columns = columns,
                         .span = {},
                         .format = {},
                         .transposed = {.values = out}};
  turn_tiles<<<tiles_of(rows, columns), kThreads, 0, as_stream(stream)>>>(call);
  return cudaGetLastError();
}

}  // namespace trireme::kernels::cuda
