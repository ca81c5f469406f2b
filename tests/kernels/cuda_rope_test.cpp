// Rotary embedding on the GPU, and the packing of head gradients, against the formula in double.
#include "tests/kernels/cuda_support.h"

namespace trireme::kernels::cuda {
namespace {

class Rope : public CudaDtypeTest {
 protected:
  // a * cos - b * sin may cancel; what is left of fp32 rounding is absolute, with inputs of a few units.
  static constexpr double kAbsolute = 2e-6;
};
class PackHeads : public Rope {};
TRIREME_FOR_EACH_DTYPE(Rope);
TRIREME_FOR_EACH_DTYPE(PackHeads);

struct Tables {
  at::Tensor cosine, sine;

  Tables(int64_t seq_len, int64_t head_dim) {
    const at::Tensor angles = noise({seq_len, head_dim / 2}, at::kFloat, 11, 2.0);
    cosine = angles.cos();
    sine = angles.sin();
  }
};

/// rope_inplace in double.
at::Tensor exact_rope(const at::Tensor& x, const Tables& tables, int64_t heads, int64_t head_dim,
                      double direction) {
  const at::Tensor out = in_double(x).clone();
  const int64_t rows = x.size(0);
  const at::Tensor halves = out.narrow(1, 0, heads * head_dim).view({rows, heads, 2, head_dim / 2});
  const at::Tensor low = halves.select(2, 0).clone(), high = halves.select(2, 1).clone();
  const at::Tensor positions = at::arange(rows).remainder(tables.cosine.size(0));
  const at::Tensor c = in_double(tables.cosine).index_select(0, positions).unsqueeze(1);
  const at::Tensor s = direction * in_double(tables.sine).index_select(0, positions).unsqueeze(1);
  halves.select(2, 0).copy_(low * c - high * s);
  halves.select(2, 1).copy_(high * c + low * s);
  return out;
}

void run_rope(const at::Tensor& x, const Tables& tables, int64_t heads, int64_t head_dim, float direction) {
  EXPECT_EQ(0, rope_inplace(x.data_ptr(), tables.cosine.data_ptr<float>(), tables.sine.data_ptr<float>(),
                            x.size(0), tables.cosine.size(0), x.size(1), heads, head_dim, direction,
                            dtype_of(x.scalar_type()), current_stream()));
}

struct RopeSizes {
  int64_t rows, seq_len, heads, head_dim, extra;  // extra: elements of a row after the turned heads
  std::string name() const {
    return std::to_string(rows) + " rows, " + std::to_string(heads) + " heads of " +
           std::to_string(head_dim) + " + " + std::to_string(extra);
  }
};
// One row, one head, rows that are no multiple of the sequence, head sizes and strides without full packs,
// numbers of heads that do and do not fill groups, heads of few packs, and more packs in a row than threads
// in a block.
const RopeSizes kRopeSizes[] = {{1, 1, 1, 2, 0},       {1, 8, 1, 64, 0},        {6, 3, 5, 64, 128},
                                {70, 32, 12, 64, 256}, {70, 32, 6, 6, 6},       {9, 4, 3, 80, 0},
                                {9, 4, 3, 24, 7},      {33, 33, 40, 128, 1024}, {5, 2, 144, 256, 256},
                                {300, 50, 7, 16, 8},   {131, 131, 36, 64, 0},   {3, 3, 2, 512, 0}};

TEST_P(Rope, FollowsTheFormulaBothWays) {
  for (const RopeSizes& sizes : kRopeSizes) {
    const Tables tables(sizes.seq_len, sizes.head_dim);
    const at::Tensor x = noise({sizes.rows, sizes.heads * sizes.head_dim + sizes.extra}, type(), 12);
    for (const float direction : {1.0f, -1.0f}) {
      const at::Tensor exact =
          exact_rope(x, tables, sizes.heads, sizes.head_dim, static_cast<double>(direction));
      for (const at::Tensor& turned : {x.clone(), unaligned(x)}) {
        run_rope(turned, tables, sizes.heads, sizes.head_dim, direction);
        expect_close(turned, exact, relative(), kAbsolute, sizes.name());
      }
    }
  }
}

TEST_P(Rope, SameBitsEveryTimeAndForEveryAlignment) {
  for (const int64_t head_dim : {16, 80, 128}) {
    const Tables tables(32, head_dim);
    const at::Tensor x = noise({70, 24 * head_dim}, type(), 13);
    const at::Tensor first = x.clone(), second = x.clone(), scalar = unaligned(x);
    for (const at::Tensor& turned : {first, second, scalar}) run_rope(turned, tables, 20, head_dim, 1.0f);
    EXPECT_TRUE(at::equal(first, second)) << head_dim;
    EXPECT_TRUE(at::equal(first, scalar)) << head_dim;
  }
}

using RopeLimits = CudaTest;

TEST_F(RopeLimits, NothingToDoIsNoErrorAndOddHeadsAreOne) {
  EXPECT_EQ(0,
            rope_inplace(nullptr, nullptr, nullptr, 0, 8, 64, 1, 64, 1.0f, Dtype::kFloat, current_stream()));
  const at::Tensor x = noise({4, 5}, at::kFloat, 14);
  const Tables tables(4, 5);
  EXPECT_NE(0, rope_inplace(x.data_ptr(), tables.cosine.data_ptr<float>(), tables.sine.data_ptr<float>(), 4,
                            4, 5, 1, 5, 1.0f, Dtype::kFloat, current_stream()));
}

TEST_F(RopeLimits, MoreThanTwoToThe31Elements) {
  const int64_t stride = 8192, rows = (int64_t{1} << 18) + 3;
  if (!has_memory_for(2 * rows * stride)) GTEST_SKIP() << "needs 6 GB of GPU memory";
  const Tables tables(rows, 64);
  const at::Tensor x = at::zeros({rows, stride}, at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA));
  const at::Tensor last = noise({1, stride}, at::kBFloat16, 15);
  x.narrow(0, rows - 1, 1).copy_(last);
  run_rope(x, tables, 96, 64, 1.0f);
  Tables last_angles = tables;
  last_angles.cosine = tables.cosine.narrow(0, rows - 1, 1);
  last_angles.sine = tables.sine.narrow(0, rows - 1, 1);
  run_rope(last, last_angles, 96, 64, 1.0f);
  EXPECT_TRUE(at::equal(x.narrow(0, rows - 1, 1), last));
}

/// How the (batch, heads, seq_len, head_dim) gradients of attention lie in memory.
enum class Layout { kHeadsFirst, kRowsFirst, kPadded };

at::Tensor head_gradient(Layout layout, int64_t batch, int64_t heads, int64_t seq_len, int64_t head_dim,
                         at::ScalarType type, uint64_t seed) {
  switch (layout) {
    case Layout::kHeadsFirst:
      return noise({batch, heads, seq_len, head_dim}, type, seed);
    case Layout::kRowsFirst:
      return noise({batch, seq_len, heads, head_dim}, type, seed).transpose(1, 2);
    case Layout::kPadded:
      return noise({batch, heads, seq_len, head_dim + 1}, type, seed).narrow(3, 1, head_dim);
  }
  return {};
}

HeadGradient described(const at::Tensor& heads) {
  return {heads.data_ptr(), heads.size(1), heads.stride(0), heads.stride(1), heads.stride(2)};
}

/// (batch * seq_len, heads * head_dim).
at::Tensor rows_of(const at::Tensor& heads) {
  return heads.transpose(1, 2).reshape({heads.size(0) * heads.size(2), heads.size(1) * heads.size(3)});
}

struct HeadSizes {
  int64_t batch, seq_len, heads, kv_heads, head_dim;
};

struct HeadGradients {
  at::Tensor query, key, value;

  HeadGradients(const HeadSizes& sizes, Layout layout, at::ScalarType type)
      : query(head_gradient(layout, sizes.batch, sizes.heads, sizes.seq_len, sizes.head_dim, type, 16)),
        key(head_gradient(layout, sizes.batch, sizes.kv_heads, sizes.seq_len, sizes.head_dim, type, 17)),
        value(head_gradient(layout, sizes.batch, sizes.kv_heads, sizes.seq_len, sizes.head_dim, type, 18)) {}

  at::Tensor concatenated() const { return at::cat({rows_of(query), rows_of(key), rows_of(value)}, 1); }

  at::Tensor pack(const Tables* tables) const {
    const int64_t batch = query.size(0), seq_len = query.size(2), head_dim = query.size(3);
    const at::Tensor packed = at::full(
        {batch * seq_len, (query.size(1) + key.size(1) + value.size(1)) * head_dim}, NAN, query.options());
    EXPECT_EQ(0, pack_head_gradients(packed.data_ptr(), described(query), described(key), described(value),
                                     tables == nullptr ? nullptr : tables->cosine.data_ptr<float>(),
                                     tables == nullptr ? nullptr : tables->sine.data_ptr<float>(), batch,
                                     seq_len, head_dim, dtype_of(query.scalar_type()), current_stream()));
    return packed;
  }
};

const Layout kLayouts[] = {Layout::kHeadsFirst, Layout::kRowsFirst, Layout::kPadded};

TEST_P(PackHeads, TurnsQueryAndKeyBack) {
  const HeadSizes kSizes[] = {{1, 1, 1, 1, 2},   {2, 5, 3, 1, 64},    {2, 7, 4, 2, 6},
                              {1, 9, 32, 8, 64}, {3, 33, 32, 8, 128}, {2, 3, 12, 12, 80}};
  for (const HeadSizes& sizes : kSizes) {
    const Tables tables(sizes.seq_len, sizes.head_dim);
    for (const Layout layout : kLayouts) {
      const HeadGradients gradients(sizes, layout, type());
      const at::Tensor exact =
          exact_rope(gradients.concatenated(), tables, sizes.heads + sizes.kv_heads, sizes.head_dim, -1.0);
      expect_close(gradients.pack(&tables), exact, relative(), kAbsolute,
                   std::to_string(sizes.head_dim) + ", layout " + std::to_string(static_cast<int>(layout)));
    }
  }
}

TEST_P(PackHeads, CopiesWithoutTables) {
  const HeadSizes kSizes[] = {{1, 1, 1, 1, 1},  {2, 5, 3, 3, 5},   {2, 9, 12, 12, 64},
                              {2, 3, 7, 1, 15}, {3, 50, 2, 1, 16}, {1, 3, 40, 8, 256}};
  for (const HeadSizes& sizes : kSizes) {
    for (const Layout layout : kLayouts) {
      const HeadGradients gradients(sizes, layout, type());
      EXPECT_TRUE(at::equal(gradients.pack(nullptr), gradients.concatenated())) << sizes.head_dim;
    }
  }
}

TEST_P(PackHeads, SameBitsAsRopeOnThePackedRows) {
  const HeadSizes sizes{2, 33, 32, 8, 128};
  const Tables tables(sizes.seq_len, sizes.head_dim);
  const HeadGradients gradients(sizes, Layout::kRowsFirst, type());
  const at::Tensor expected = gradients.concatenated();
  run_rope(expected, tables, sizes.heads + sizes.kv_heads, sizes.head_dim, -1.0f);
  EXPECT_TRUE(at::equal(gradients.pack(&tables), expected));
  EXPECT_TRUE(at::equal(gradients.pack(&tables), expected));
}

}  // namespace
}  // namespace trireme::kernels::cuda
