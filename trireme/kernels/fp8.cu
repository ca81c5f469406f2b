// Casts from bf16 to FP8, plain and transposed in one pass.
#include <cuda_fp8.h>

#include <cstdint>

#include "trireme/kernels/amax.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kSide = static_cast<int>(kFp8Block);  ///< rows and columns of a tile, one a block of threads
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLanes = 8;                       ///< elements of 16 bytes
constexpr int kGroup = 4;                       ///< rows whose bytes make a word of the transposed copy
constexpr int kGroups = kSide / kGroup;         ///< such words in a tile's column
constexpr int kTurns = kGroups / (2 * kWarps);  ///< groups that a thread takes
constexpr int kHalf = 16;                       ///< lanes that have a row of the tile together

/// Of two magnitudes as bits: NaN is above all.
__device__ unsigned larger(unsigned a, unsigned b) {
  return a > b ? a : b;
}

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

__device__ float counted(float amax) {
  return amax < kSmallestAmax ? kSmallestAmax : amax;
}

/// What a thread has of a tile: in each turn kGroup rows of kLanes columns. Lanes 0 to 15 of a warp have one
/// group of rows, the others the group 16 further on, so that words of the transposed tile go to 32 banks.
struct Place {
  int part, column, group[kTurns];

  __device__ Place() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    part = lane % kHalf;
    column = part * kLanes;
    for (int turn = 0; turn < kTurns; ++turn) group[turn] = warp + kWarps * turn + kHalf * (lane / kHalf);
  }
};

struct Tile {
  int64_t row, column;

  __device__ explicit Tile(int64_t columns) {
    const int64_t across = (columns + kSide - 1) / kSide;
    row = blockIdx.x / across * kSide;
    column = blockIdx.x % across * kSide;
  }
};

struct Loaded {
  uint4 rows[kTurns][kGroup];

  /// Zeros beyond the matrix. Sizes are multiples of 16, so a group of rows is inside or outside as a whole.
  __device__ void load(const uint16_t* x, const Tile& tile, const Place& place, int64_t rows_in_all,
                       int64_t columns) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t row = tile.row + place.group[turn] * kGroup, column = tile.column + place.column;
      const bool inside = row < rows_in_all && column < columns;
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        rows[turn][r] = inside ? *reinterpret_cast<const uint4*>(x + (row + r) * columns + column)
                               : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ unsigned word(int turn, int r, int i) const {
    const uint4& pack = rows[turn][r];
    return i == 0 ? pack.x : i == 1 ? pack.y : i == 2 ? pack.z : pack.w;
  }
  /// Element `lane` of a pack.
  __device__ float at(int turn, int r, int lane) const {
    const unsigned pair = word(turn, r, lane / 2);
    return __uint_as_float(lane % 2 == 0 ? low(pair) : high(pair));
  }
  /// Of a row's kLanes elements, as bits of fp32.
  __device__ unsigned row_max(int turn, int r) const {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) most = __vmaxu2(most, magnitudes(word(turn, r, i)));
    return larger(low(most), high(most));
  }
  /// Of this thread's elements in columns 2i and 2i + 1, as two bf16.
  __device__ unsigned column_max(int i) const {
    unsigned most = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int r = 0; r < kGroup; ++r) most = __vmaxu2(most, magnitudes(word(turn, r, i)));
    }
    return most;
  }
};

/// The largest magnitudes of the rows and columns of a tile, as bits of fp32. Two threads for each pair of a
/// row and a column: those below kSide have the rows, the others the columns.
class TileMaxima {
 public:
  /// All threads of the block come here, and synchronise afterwards.
  __device__ void find(const Loaded& loaded, const Place& place) {
    find_rows(loaded, place);
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) {
      const unsigned mine = loaded.column_max(i);
      const unsigned both = __vmaxu2(mine, __shfl_xor_sync(0xffffffffu, mine, kHalf));
      if (threadIdx.x % 32 < kHalf) columns_[threadIdx.x / 32][place.column / 2 + i] = both;
    }
  }

  /// Of this thread's row or column.
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
  __device__ void find_rows(const Loaded& loaded, const Place& place) {
    constexpr int kRows = kTurns * kGroup;
    unsigned most[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) most[i] = loaded.row_max(i / kGroup, i % kGroup);
    int row = 0;
#pragma unroll
    for (int kept = kRows / 2; kept > 0; kept /= 2) {
      const int distance = kept * kHalf / kRows;
      const bool upper = (place.part & distance) != 0;
#pragma unroll
      for (int i = 0; i < kept; ++i) {
        const unsigned given = upper ? most[i] : most[i + kept], keeps = upper ? most[i + kept] : most[i];
        most[i] = larger(keeps, __shfl_xor_sync(0xffffffffu, given, distance));
      }
      row += upper ? kept : 0;
    }
    most[0] = larger(most[0], __shfl_xor_sync(0xffffffffu, most[0], 1));
    static_assert(kHalf == 2 * kRows);
    if (place.part % 2 == 0)
      rows_[(place.group[0] + row / kGroup * kWarps) * kGroup + row % kGroup] = most[0];
  }

  unsigned rows_[kSide];
  unsigned columns_[kWarps][kSide / 2];  ///< two bf16 a word
};

__global__ void __launch_bounds__(kThreads) amax_flat(float* out, const uint4* x, int64_t packs) {
  __shared__ unsigned of_warps[kWarps];
  unsigned most = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const uint4 pack = x[i];
    most = __vmaxu2(__vmaxu2(most, __vmaxu2(magnitudes(pack.x), magnitudes(pack.y))),
                    __vmaxu2(magnitudes(pack.z), magnitudes(pack.w)));
  }
  const unsigned of_warp = __reduce_max_sync(0xffffffffu, larger(low(most), high(most)));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const unsigned total = __reduce_max_sync(0xffffffffu, threadIdx.x < kWarps ? of_warps[threadIdx.x] : 0);
  if (threadIdx.x == 0) raise(out, total);
}

__global__ void __launch_bounds__(kThreads)
    amax_rows(float* of_rows, float* of_columns, const uint16_t* x, int64_t rows, int64_t columns) {
  __shared__ TileMaxima maxima;
  const Tile tile(columns);
  const Place place;
  Loaded loaded;
  loaded.load(x, tile, place, rows, columns);
  maxima.find(loaded, place);
  __syncthreads();
  const int64_t row = tile.row + threadIdx.x, column = tile.column + threadIdx.x - kSide;
  if (threadIdx.x < kSide) {
    if (row < rows) raise(of_rows + row, maxima.mine());
  } else if (column < columns) {
    raise(of_columns + column, maxima.mine());
  }
}

template <__nv_fp8_interpretation_t kFormat>
__device__ unsigned pair_of(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kFormat);
}

template <__nv_fp8_interpretation_t kFormat>
__device__ unsigned word_of(float a, float b, float c, float d) {
  return pair_of<kFormat>(a, b) | pair_of<kFormat>(c, d) << 16;
}

/// What the values of a tile are multiplied by: those of a row for the plain copy, those of a column for the
/// transposed one. Each thread finds one of them for all.
struct Inverses {
  float of_row[kSide];
  alignas(16) float of_column[kSide];
};

/// The largest magnitude of the span of this thread's row or column.
template <Fp8Span kSpan>
__device__ float amax_of_span(const Fp8CastCall& call, const Tile& tile, const TileMaxima& maxima) {
  if constexpr (kSpan == Fp8Span::kRowBlock) return __uint_as_float(maxima.mine());
  const int64_t row = tile.row + threadIdx.x, column = tile.column + threadIdx.x - kSide;
  if (threadIdx.x < kSide) return row < call.rows ? call.amax[row] : 0.0f;
  return column < call.columns ? call.amax[call.rows + column] : 0.0f;
}

/// Where the scale of this thread's row or column goes; nullptr: nowhere, or another block writes it.
template <Fp8Span kSpan>
__device__ float* scale_of_span(const Fp8CastCall& call, const Tile& tile) {
  const bool is_row = threadIdx.x < kSide;
  const int64_t across = is_row ? tile.column : tile.row, size = is_row ? call.rows : call.columns;
  const int64_t i = is_row ? tile.row + threadIdx.x : tile.column + threadIdx.x - kSide;
  const bool wanted = (is_row ? call.plain.values : call.transposed.values) != nullptr;
  if (!wanted || i >= size) return nullptr;
  float* const scale = is_row ? call.plain.scale : call.transposed.scale;
  if constexpr (kSpan == Fp8Span::kRowBlock) return scale + across / kSide * size + i;
  return across == 0 ? scale + i : nullptr;
}

/// The one scale of a tensor or of a tile; some thread of some block writes it.
template <Fp8Span kSpan>
__device__ float amax_of_tile(const Fp8CastCall& call, const Loaded& loaded, unsigned& most) {
  if constexpr (kSpan == Fp8Span::kTensor) return *call.amax;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  unsigned mine = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int r = 0; r < kGroup; ++r) mine = larger(mine, loaded.row_max(turn, r));
  }
  mine = __reduce_max_sync(0xffffffffu, mine);
  if (threadIdx.x % 32 == 0) atomicMax(&most, mine);
  __syncthreads();
  return __uint_as_float(most);
}

template <Fp8Span kSpan>
__device__ void write_scale_of_tile(const Fp8CastCall& call, const Tile& tile, float scale) {
  if (threadIdx.x != 0) return;
  int64_t plain = 0, transposed = 0;
  if constexpr (kSpan == Fp8Span::kTensor) {
    if (blockIdx.x != 0) return;
  } else {
    const auto padded = [](int64_t size) { return (size / kSide + 3) / 4 * 4; };
    const int64_t row = tile.row / kSide, column = tile.column / kSide;
    plain = row * padded(call.columns) + column;
    transposed = column * padded(call.rows) + row;
  }
  if (call.plain.values != nullptr) call.plain.scale[plain] = scale;
  if (call.transposed.values != nullptr) call.transposed.scale[transposed] = scale;
}

/// Where word `group` of a column lies in the tile: words that lanes of a warp write together, and those that
/// they read together, are in different banks.
__device__ int word_in_tile(int column, int group) {
  return column * kGroups + (group ^ (column / kLanes));
}

template <Fp8Span kSpan, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kThreads) cast_tiles(Fp8CastCall call, float largest_value) {
  constexpr bool kByRow = kSpan == Fp8Span::kRow || kSpan == Fp8Span::kRowBlock;
  __shared__ unsigned turned[kSide * kGroups];
  const Tile tile(call.columns);
  const Place place;
  Loaded loaded;
  loaded.load(static_cast<const uint16_t*>(call.x), tile, place, call.rows, call.columns);
  __shared__ TileMaxima maxima;
  __shared__ Inverses inverses;
  float of_all = 0.0f;
  if constexpr (kByRow) {
    if constexpr (kSpan == Fp8Span::kRowBlock) {
      maxima.find(loaded, place);
      __syncthreads();
    }
    const float amax = counted(amax_of_span<kSpan>(call, tile, maxima));
    if (float* const scale = scale_of_span<kSpan>(call, tile)) *scale = amax / largest_value;
    (threadIdx.x < kSide ? inverses.of_row[threadIdx.x] : inverses.of_column[threadIdx.x - kSide]) =
        largest_value / amax;
    __syncthreads();
  } else {
    __shared__ unsigned most;
    const float amax = counted(amax_of_tile<kSpan>(call, loaded, most));
    write_scale_of_tile<kSpan>(call, tile, amax / largest_value);
    of_all = largest_value / amax;
  }

  if (call.plain.values != nullptr && tile.column + place.column < call.columns) {
    auto* const out = static_cast<uint8_t*>(call.plain.values);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t row = tile.row + place.group[turn] * kGroup;
      if (row >= call.rows) continue;
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        const float by = kByRow ? inverses.of_row[place.group[turn] * kGroup + r] : of_all;
        const auto v = [&](int lane) { return loaded.at(turn, r, lane) * by; };
        const uint2 bytes =
            make_uint2(word_of<kFormat>(v(0), v(1), v(2), v(3)), word_of<kFormat>(v(4), v(5), v(6), v(7)));
        *reinterpret_cast<uint2*>(out + (row + r) * call.columns + tile.column + place.column) = bytes;
      }
    }
  }
  if (call.transposed.values == nullptr) return;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float by = kByRow ? inverses.of_column[place.column + lane] : of_all;
      const auto v = [&](int r) { return loaded.at(turn, r, lane) * by; };
      turned[word_in_tile(place.column + lane, place.group[turn])] = word_of<kFormat>(v(0), v(1), v(2), v(3));
    }
  }
  __syncthreads();
  auto* const out = static_cast<uint8_t*>(call.transposed.values);
  const int group = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = tile.row + group * kGroup;
  if (row >= call.rows) return;
  for (int column = static_cast<int>(threadIdx.x) / 32; column < kSide; column += kWarps) {
    if (tile.column + column >= call.columns) return;
    *reinterpret_cast<unsigned*>(out + (tile.column + column) * call.rows + row) =
        turned[word_in_tile(column, group)];
  }
}

unsigned tiles_of(int64_t rows, int64_t columns) {
  return static_cast<unsigned>(((rows + kSide - 1) / kSide) * ((columns + kSide - 1) / kSide));
}

template <Fp8Span kSpan>
int cast_span(const Fp8CastCall& call, cudaStream_t stream) {
  const unsigned tiles = tiles_of(call.rows, call.columns);
  if (call.format == Fp8Format::kE4m3) {
    cast_tiles<kSpan, __NV_E4M3><<<tiles, kThreads, 0, stream>>>(call, largest(Fp8Format::kE4m3));
  } else {
    cast_tiles<kSpan, __NV_E5M2><<<tiles, kThreads, 0, stream>>>(call, largest(Fp8Format::kE5m2));
  }
  return cudaGetLastError();
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
      of_rows, of_columns, static_cast<const uint16_t*>(x), rows, columns);
  return cudaGetLastError();
}

int fp8_cast(const Fp8CastCall& call, void* stream) {
  if (call.rows == 0 || call.columns == 0) return cudaSuccess;
  switch (call.span) {
    case Fp8Span::kTensor:
      return cast_span<Fp8Span::kTensor>(call, as_stream(stream));
    case Fp8Span::kRow:
      return cast_span<Fp8Span::kRow>(call, as_stream(stream));
    case Fp8Span::kRowBlock:
      return cast_span<Fp8Span::kRowBlock>(call, as_stream(stream));
    case Fp8Span::kSquareBlock:
      break;
  }
  return cast_span<Fp8Span::kSquareBlock>(call, as_stream(stream));
}

}  // namespace trireme::kernels::cuda
