// Casts from bf16 to FP8, plain and transposed in one pass.
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "trireme/kernels/activation.cuh"
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

/// Of matrices of `width` columns that lie side by side, the tile of this block in the one that begins at
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

struct Loaded {
  uint4 rows[kTurns][kGroup];

  __device__ unsigned word(int turn, int r, int i) const {
    const uint4& pack = rows[turn][r];
    return i == 0 ? pack.x : i == 1 ? pack.y : i == 2 ? pack.z : pack.w;
  }
  /// Element `lane` of a pack.
  __device__ float at(int turn, int r, int lane) const {
    const unsigned pair = word(turn, r, lane / 2);
    return __uint_as_float(lane % 2 == 0 ? low(pair) : high(pair));
  }
  /// Of all of this thread's elements, as bits of fp32.
  __device__ unsigned largest_of_all() const {
    unsigned most = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int r = 0; r < kGroup; ++r) most = larger(most, row_max(turn, r));
    }
    return most;
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

using Bf16 = __nv_bfloat16;

/// A matrix as it is in memory.
struct Identity {
  static constexpr int kInputs = 1, kOutputs = 1;
};

/// What Function makes of matrices of which each has `width` columns of rows that are `stride` elements
/// apart.
template <typename Function>
struct Source {
  struct Input {
    const Bf16* data;
    int64_t stride;
  };
  Input inputs[Function::kInputs];

  /// The tile of each output; zeros beyond the matrices. Sizes are multiples of 16, so a group of rows is
  /// inside or outside as a whole.
  __device__ void load(Loaded (&loaded)[Function::kOutputs], const Tile& tile, const Place& place,
                       int64_t rows) const {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t row = tile.row + place.group[turn] * kGroup;
      const bool inside = row < rows && tile.has_column(place.column);
      RawPack<Bf16, kLanes> raw[kGroup][Function::kInputs];
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
#pragma unroll
        for (int i = 0; i < Function::kInputs; ++i) {
          const Bf16* const from = inputs[i].data + (row + r) * inputs[i].stride + tile.column + place.column;
          inside ? raw[r][i].load(from) : raw[r][i].assign(Pack<Bf16, kLanes>{});
        }
      }
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        if constexpr (std::is_same_v<Function, Identity>) {
          const Pack<Bf16, kLanes> pack = raw[r][0].pack();
          memcpy(&loaded[0].rows[turn][r], &pack, sizeof(pack));
        } else {
          Pack<Bf16, kLanes> out[Function::kOutputs];
          map_pack<Function>(raw[r], out);
#pragma unroll
          for (int i = 0; i < Function::kOutputs; ++i)
            memcpy(&loaded[i].rows[turn][r], &out[i], sizeof(out[i]));
        }
      }
    }
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
    amax_rows(float* of_rows, float* of_columns, const Bf16* x, int64_t rows, int64_t columns) {
  __shared__ TileMaxima maxima;
  const Tile tile(columns, 0);
  const Place place;
  Loaded loaded[1];
  Source<Identity>{{{x, columns}}}.load(loaded, tile, place, rows);
  maxima.find(loaded[0], place);
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

/// The one scale of a tensor or of a tile; some thread of some block writes it.
template <Fp8Span kSpan>
__device__ float amax_of_tile(const Fp8CastCall& call, const Loaded& loaded, unsigned& most) {
  if constexpr (kSpan == Fp8Span::kTensor) return *call.amax;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  const unsigned mine = __reduce_max_sync(0xffffffffu, loaded.largest_of_all());
  if (threadIdx.x % 32 == 0) atomicMax(&most, mine);
  __syncthreads();
  return __uint_as_float(most);
}

/// Raises `seen` by this thread's elements. Returns what they are multiplied by: `by`, or NaN.
__device__ float see(float* seen, const Loaded& loaded, float by) {
  constexpr unsigned kInfinity = 0x7f800000u;
  const unsigned mine = loaded.largest_of_all();
  const unsigned most = __reduce_max_sync(0xffffffffu, mine);
  if (threadIdx.x % 32 == 0) raise(seen, most);
  return mine < kInfinity ? by : __uint_as_float(0x7fffffffu);
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

/// Where word `group` of a column lies in the tile: words that lanes of a warp write together, and those that
/// they read together, are in different banks.
__device__ int word_in_tile(int column, int group) {
  return column * kGroups + (group ^ (column / kLanes));
}

/// What the threads of a block share while they cast a tile.
struct Shared {
  unsigned turned[kSide * kGroups];  ///< words of the transposed copy
  TileMaxima maxima;
  Inverses inverses;
  unsigned most;
};

template <Fp8Span kSpan, __nv_fp8_interpretation_t kFormat, bool kSees>
__device__ void cast_tile(const Fp8CastCall& call, const Tile& tile, const Place& place, const Loaded& loaded,
                          Shared& shared, float largest_value) {
  constexpr bool kByRow = kSpan == Fp8Span::kRow || kSpan == Fp8Span::kRowBlock;
  float of_all = 0.0f;
  if constexpr (kByRow) {
    if constexpr (kSpan == Fp8Span::kRowBlock) {
      shared.maxima.find(loaded, place);
      __syncthreads();
    }
    const float amax = counted(amax_of_span<kSpan>(call, tile, shared.maxima));
    if (float* const scale = scale_of_span<kSpan>(call, tile)) *scale = amax / largest_value;
    Inverses& inverses = shared.inverses;
    (threadIdx.x < kSide ? inverses.of_row[threadIdx.x] : inverses.of_column[threadIdx.x - kSide]) =
        largest_value / amax;
    __syncthreads();
  } else {
    const float amax = counted(amax_of_tile<kSpan>(call, loaded, shared.most));
    write_scale_of_tile<kSpan>(call, tile, amax / largest_value);
    of_all = largest_value / amax;
    if constexpr (kSees) of_all = see(call.seen, loaded, of_all);
  }

  if (call.plain.values != nullptr && tile.has_column(place.column)) {
    auto* const out = static_cast<uint8_t*>(call.plain.values);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t row = tile.row + place.group[turn] * kGroup;
      if (row >= call.rows) continue;
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        const float by = kByRow ? shared.inverses.of_row[place.group[turn] * kGroup + r] : of_all;
        const auto v = [&](int lane) { return loaded.at(turn, r, lane) * by; };
        const uint2 bytes =
            make_uint2(word_of<kFormat>(v(0), v(1), v(2), v(3)), word_of<kFormat>(v(4), v(5), v(6), v(7)));
        *reinterpret_cast<uint2*>(out + (row + r) * call.columns + tile.at(place.column)) = bytes;
      }
    }
  }
  if (call.transposed.values == nullptr) return;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float by = kByRow ? shared.inverses.of_column[place.column + lane] : of_all;
      const auto v = [&](int r) { return loaded.at(turn, r, lane) * by; };
      shared.turned[word_in_tile(place.column + lane, place.group[turn])] =
          word_of<kFormat>(v(0), v(1), v(2), v(3));
    }
  }
  __syncthreads();
  auto* const out = static_cast<uint8_t*>(call.transposed.values);
  const int group = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = tile.row + group * kGroup;
  if (row >= call.rows) return;
  for (int column = static_cast<int>(threadIdx.x) / 32; column < kSide; column += kWarps) {
    if (!tile.has_column(column)) return;
    *reinterpret_cast<unsigned*>(out + tile.at(column) * call.rows + row) =
        shared.turned[word_in_tile(column, group)];
  }
}

template <Fp8Span kSpan, __nv_fp8_interpretation_t kFormat, typename Function, bool kSees>
__global__ void __launch_bounds__(kThreads)
    cast_tiles(Fp8CastCall call, Source<Function> source, float largest_value) {
  __shared__ Shared shared;
  const int64_t width = call.columns / Function::kOutputs;
  const Place place;
  Loaded loaded[Function::kOutputs];
  source.load(loaded, Tile(width, 0), place, call.rows);
#pragma unroll
  for (int i = 0; i < Function::kOutputs; ++i) {
    if (i > 0) __syncthreads();
    cast_tile<kSpan, kFormat, kSees>(call, Tile(width, i * width), place, loaded[i], shared, largest_value);
  }
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

}  // namespace trireme::kernels::cuda
