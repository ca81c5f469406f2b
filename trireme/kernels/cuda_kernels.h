#pragma once
// Fused CUDA kernels on raw pointers. Everything is enqueued on `stream` (a cudaStream_t) and returns at once
// with the launch's cudaError_t, 0 when it was accepted. Pointers are to contiguous memory of the current GPU
// unless strides are given; void pointers have the dtype of the argument `dtype`. Arithmetic is fp32. Sums
// are taken in an order that depends on the sizes alone, so the same input gives the same bits every time.
// `amax`, where a kernel takes one, is raised to the largest magnitude of what it writes first (y, dx,
// d_gate_up); it is compared as bits of fp32, NaN above all, and not touched as nullptr. `dx_sums` (width),
// unless nullptr, becomes the sum of the rows of dx as they are stored; without rows it is not touched.
// Rows are vectorised where pointers and widths allow 16-byte accesses, and correct where they do not.
#include <cstdint>

#include "trireme/base/nf4_format.h"
#include "trireme/kernels/counters.h"
#include "trireme/kernels/fp8_format.h"
#include "trireme/kernels/optimizer.h"

namespace trireme::kernels::cuda {

enum class Dtype { kFloat, kBFloat16, kHalf };

// Norms (norm_forward.cu, norm_backward.cu). RMSNorm: Zhang and Sennrich 2019; LayerNorm: Ba et al. 2016.

/// sum = x + delta, rounded to dtype, then y = sum * rstd * weight, all (rows, width); rstd (rows). Without
/// delta (nullptr) x is normalised and `sum` is not touched.
int rms_norm_forward(void* y, void* sum, float* rstd, const void* x, const void* delta, const void* weight,
                     int64_t rows, int64_t width, float eps, Dtype dtype, void* stream,
                     float* amax = nullptr);
/// dx (rows, width) = d_sum + the gradient of the norm at x; d_sum may be nullptr, or dx or dy themselves.
/// dweight (width, dtype) is added to. `scratch`: norm_scratch(width, 1) floats.
int rms_norm_backward(void* dx, void* dweight, float* scratch, const void* dy, const void* d_sum,
                      const void* x, const void* weight, const float* rstd, int64_t rows, int64_t width,
                      Dtype dtype, void* stream, float* amax = nullptr);
/// As the RMS norm, with mean and bias: y = (sum - mean) * rstd * weight + bias. `scratch` of the backward
/// pass: norm_scratch() of two kinds of sums, or of three with dx_sums, which are those of add_column_sums().
int layer_norm_forward(void* y, void* sum, float* mean, float* rstd, const void* x, const void* delta,
                       const void* weight, const void* bias, int64_t rows, int64_t width, float eps,
                       Dtype dtype, void* stream, float* amax = nullptr);
int layer_norm_backward(void* dx, void* dweight, void* dbias, float* scratch, const void* dy,
                        const void* d_sum, const void* x, const void* weight, const float* mean,
                        const float* rstd, int64_t rows, int64_t width, Dtype dtype, void* stream,
                        float* amax = nullptr, float* dx_sums = nullptr);
int64_t norm_scratch(int64_t width, int kinds);

/// total (width, dtype) += the sum of the rows of x (rows, width): gradients of biases. `scratch`:
/// column_scratch(width) floats.
int add_column_sums(void* total, float* scratch, const void* x, int64_t rows, int64_t width, Dtype dtype,
                    void* stream);
int64_t column_scratch(int64_t width);

// Batch norms (batch_norm.cu), as in batch_norm.h.

/// channels is a multiple of 16 bytes, pointers to elements are aligned to 16, and rows are at least 2 and
/// fit in 31 bits. `scratch`: batch_norm_scratch(channels) floats, aligned to 16 bytes. `statistics` (4,
/// channels): mean, rstd, and the scale and shift that make x normal. `batches` (nullptr: none) counts calls.
struct BatchNormForward {
  void* y;
  float* statistics;
  float* scratch;
  float *running_mean, *running_var;
  int64_t* batches;
  const void *x, *residual, *weight, *bias;
  int64_t rows, channels;
  float eps, momentum;
  bool relu;
};
int batch_norm_forward(const BatchNormForward& call, Dtype dtype, void* stream);
/// y is needed where both a residual and ReLU followed; d_residual is written there alone.
struct BatchNormBackward {
  void *dx, *d_residual, *d_weight, *d_bias;
  float* scratch;
  const void *dy, *x, *y;
  const float* statistics;
  int64_t rows, channels;
  bool relu;
  bool adds_to_weight, adds_to_bias;  ///< else the gradients overwrite what is there
};
int batch_norm_backward(const BatchNormBackward& call, Dtype dtype, void* stream);
int64_t batch_norm_scratch(int64_t channels);

// Weights of convolutions (conv_weights.cu).

/// (out, channels, positions) contiguous, or channels-last: (out, positions, channels) in memory.
struct ConvWeights {
  static constexpr int64_t kMostPositions = 128;
  int64_t out, channels, positions;
};
/// `to` channels-last = `from` contiguous.
int turn_conv_weights(void* to, const void* from, const ConvWeights& shape, Dtype dtype, void* stream);
/// `to` contiguous = `from` channels-last, or with `adds` += it; `to` may be fp32 whatever `dtype` is.
int add_conv_weights(void* to, Dtype to_dtype, const void* from, bool adds, const ConvWeights& shape,
                     Dtype dtype, void* stream);

// Maxima (max_pool.cu).

/// x (images, height, width, channels) -> y (images, out_height, out_width, channels): the largest value of
/// each window of kernel x kernel, the first of equal ones, NaN where there is one; kernel at most 16. taken,
/// as y, says which place of the window it was, row by row. channels is a multiple of 16 bytes of elements.
struct MaxPool {
  int64_t images, channels, height, width, out_height, out_width;
  int64_t kernel, stride, padding;
};
int max_pool_forward(const MaxPool& call, void* y, uint8_t* taken, const void* x, Dtype dtype, void* stream);
int max_pool_backward(const MaxPool& call, void* dx, const void* dy, const uint8_t* taken, Dtype dtype,
                      void* stream);

// Activations (activation.cu), as in activation.h. `y`, not nullptr, receives what the forward gave, in the
// same pass.

int swiglu_forward(void* y, const void* gate_up, int64_t rows, int64_t width, Dtype dtype, void* stream,
                   float* amax = nullptr);
int swiglu_backward(void* d_gate_up, const void* dy, const void* gate_up, int64_t rows, int64_t width,
                    Dtype dtype, void* stream, float* amax = nullptr, void* y = nullptr);
int gelu_forward(void* y, const void* x, int64_t count, Dtype dtype, void* stream, float* amax = nullptr);
int gelu_backward(void* dx, const void* dy, const void* x, int64_t count, Dtype dtype, void* stream,
                  float* amax = nullptr, void* y = nullptr);
/// gelu_backward() of x (rows, width), with the sums over dx's rows. `scratch`: column_scratch(width) floats.
int gelu_backward_with_sums(void* dx, float* dx_sums, float* scratch, const void* dy, const void* x,
                            int64_t rows, int64_t width, Dtype dtype, void* stream, float* amax = nullptr,
                            void* y = nullptr);

// Factors of columns (scale_columns.cu).

/// y (rows, width) = x * factors, a factor (fp32) for each column.
int scale_columns(void* y, const void* x, const float* factors, int64_t rows, int64_t width, Dtype dtype,
                  void* stream);
/// dx (rows, width) = dy * factors, and d_factors (width) = the sums over the rows of dy * x. `scratch`:
/// column_scratch(width) floats. Without rows nothing is written.
int scale_columns_backward(void* dx, float* d_factors, float* scratch, const void* dy, const void* x,
                           const float* factors, int64_t rows, int64_t width, Dtype dtype, void* stream);

// Rotary embedding (rope.cu), as in rope.h.

int rope_inplace(void* x, const float* cosine, const float* sine, int64_t rows, int64_t seq_len,
                 int64_t stride, int64_t heads, int64_t head_dim, float direction, Dtype dtype, void* stream);

/// Gradients of the heads of one tensor, (batch, heads, seq_len, head_dim) with these strides in elements and
/// head_dim contiguous.
struct HeadGradient {
  const void* data;
  int64_t heads;
  int64_t batch_stride, head_stride, row_stride;
};
/// d_qkv (batch, seq_len, (H + 2K) * head_dim) = query | key | value heads; query and key are turned back by
/// the rotation when cosine (seq_len, head_dim / 2) is not nullptr.
int pack_head_gradients(void* d_qkv, const HeadGradient& query, const HeadGradient& key,
                        const HeadGradient& value, const float* cosine, const float* sine, int64_t batch,
                        int64_t seq_len, int64_t head_dim, Dtype dtype, void* stream);

// Device (device_code.cu).

/// Whether the binary holds code for the current GPU: cudaErrorNoKernelImageForDevice where it does not.
int code_for_current_gpu();

// Loss (cross_entropy.cu).

/// As in cross_entropy.h: loss (rows) in nats; when `want_gradient`, logits (rows, stride) become
/// scale * (softmax - onehot). Columns from `classes` to `stride` are padding: no part of the softmax,
/// gradient zero. Rows whose target is kIgnoredTarget have loss and gradient zero; another target that is
/// no class makes both NaN.
int cross_entropy(float* loss, void* logits, const int64_t* targets, int64_t rows, int64_t classes,
                  int64_t stride, float scale, bool want_gradient, Dtype dtype, void* stream);
/// As cross_entropy(), for bf16 logits, which stay as they are; rows are multiples of 16 bytes. gradients
/// (rows, stride) are e5m2, with 1 as the largest number of the format.
int cross_entropy_fp8(float* loss, void* gradients, const void* logits, const int64_t* targets, int64_t rows,
                      int64_t classes, int64_t stride, void* stream);

/// The logits (rows, classes) of a part of a vocabulary, from class `first` on: by row the largest, the sum
/// of exp(logit - largest), and the target's logit, -inf where another part has it and NaN for -inf. powers
/// (rows, classes): the exponentials, 0 for the target; null: not wanted.
int vocabulary_part(void* powers, float* top, float* sum, float* target, const void* logits,
                    const int64_t* targets, int64_t first, int64_t rows, int64_t classes, Dtype dtype,
                    void* stream);
/// gradients (rows, classes) = scale * (exp(logit - top) / sum - onehot(target)), of rows of scale 0 zero;
/// top, sum and scale (rows) are those of the whole vocabulary.
int vocabulary_part_gradient(void* gradients, const void* logits, const int64_t* targets, int64_t first,
                             const float* top, const float* sum, const float* scale, int64_t rows,
                             int64_t classes, Dtype dtype, void* stream);
/// The messages of the parts of a vocabulary: (tokens, stride) each, of which the first 2 * width columns
/// count.
struct VocabularyMessages {
  static constexpr int kMost = 64;
  const void* data[kMost] = {};
  int count = 0;
  int64_t stride = 0;
};
/// gradient (tokens, width): for each message its first columns times factors (count, tokens), plus those
/// behind them times of_target (tokens); zero where scale (tokens) is, whatever is there.
int join_vocabulary(void* gradient, const VocabularyMessages& messages, const float* factors,
                    const float* of_target, const float* scale, int64_t tokens, int64_t width, Dtype dtype,
                    void* stream);

// Scaling (scale.cu).

/// y (count) = factor * x, or with `adds` y += factor * x; factor is an fp32 scalar on the GPU. y may be x,
/// and may be fp32 whatever the dtype of x.
int scale(void* y, Dtype y_dtype, const void* x, const float* factor, bool adds, int64_t count, Dtype dtype,
          void* stream);

// FP8 (fp8.cu), as in fp8.h: x is bf16, sizes are multiples of 16, or of kFp8Block where spans are blocks,
// and rows of x are aligned to 16 bytes.

/// out = the larger of what it holds and the largest magnitude of x (count); NaN where there is one.
int fp8_amax(float* out, const void* x, int64_t count, void* stream);
/// As fp8_amax(), for each row and each column of x (rows, columns).
int fp8_amax_rows(float* of_rows, float* of_columns, const void* x, int64_t rows, int64_t columns,
                  void* stream);

/// values nullptr: not wanted.
struct Fp8Output {
  void* values = nullptr;
  float* scale = nullptr;
};
/// The source of a cast: a matrix in memory, or one that is computed during the cast and rounded to bf16,
/// which needs scales of a tensor with `seen`, or of blocks of rows.
enum class Fp8Of {
  kValues,         ///< x (rows, columns)
  kSwiglu,         ///< of x (rows, 2 * columns), gate beside up
  kSwigluGradient  ///< of x (rows, columns), gate beside up, for dy (rows, columns / 2)
};
/// amax: of the tensor, or of each row and then of each column; unused where spans are blocks. With a `seen`
/// that is not nullptr, for spans of a tensor alone, amax may come from other values: `seen` is raised to the
/// largest magnitude, values beyond amax become the largest of the format, and values that are not finite
/// become NaN, with some of their neighbours.
struct Fp8CastCall {
  const void* x;
  const float* amax;
  int64_t rows, columns;
  Fp8Span span;
  Fp8Format format;
  Fp8Output plain = {}, transposed = {};
  float* seen = nullptr;
  Fp8Of of = Fp8Of::kValues;
  const void* dy = nullptr;
};
int fp8_cast(const Fp8CastCall& call, void* stream);
/// out (columns, rows) = x (rows, columns)^T, bytes.
int fp8_transpose(void* out, const void* x, int64_t rows, int64_t columns, void* stream);

// Parts of weights in FP8 (fp8_weights.cu), as in fp8.h: x (count) fp32 counts as rounded to bf16.

/// out = the larger of what it holds and the largest magnitude; NaN where there is one.
int fp8_amax_part(float* out, const float* x, int64_t count, void* stream);
/// bytes (count) of e4m3. seen nullptr: amax is that of all elements that share the scale.
int fp8_cast_part(void* bytes, const float* x, const float* amax, float* seen, int64_t count, void* stream);

// Weights in NF4 (nf4.cu), as in nf4.h.

/// out (count) = blocks decoded, which begin at a multiple of 4 bytes; the last may have more numbers.
int nf4_decode(void* out, const uint8_t* blocks, const Nf4Values& table, int64_t count, Dtype dtype,
               void* stream);

// Random numbers (normal.cu), as in normal.h.

int fill_normal(float* out, int64_t count, uint64_t key, const Counters& at, double deviation, void* stream);
int fill_kept(bool* out, int64_t count, uint64_t key, const Counters& at, double p, void* stream);

// Comparing bits (checksum.cu).

/// sum += a hash of `bytes` (even) at `data`, 0 for zeros. Integers are added, so the order does not matter.
int add_checksum(uint64_t* sum, const void* data, int64_t bytes, void* stream);

// Embedding (embedding.cu).

/// dweight[t] += the sum in fp32 of dy[order[i]] over the i where sorted[i] = t. sorted (count) are the
/// tokens in rising order and order (count) the rows of dy (count, width) they came from (a stable sort).
/// Each row of dweight is written once. The order of additions depends on `sorted` alone: positions i are cut
/// into windows of 64; within a window they are summed in rising order, and the windows of a token in a fixed
/// order. So a token's sum may round differently where the number of lower tokens in the batch is another
/// one. `scratch`: embedding_scratch(count, width) floats.
int embedding_backward(void* dweight, Dtype dweight_dtype, float* scratch, const void* dy,
                       const int64_t* sorted, const int64_t* order, int64_t count, int64_t width, Dtype dtype,
                       void* stream);
int64_t embedding_scratch(int64_t count, int64_t width);

// Optimizers over flat fp32 ranges (optimizer.cu), as in optimizer.h.

/// The gradient is fp32, or of copy_dtype. `copy` (nullptr: none) receives the parameters in `copy_dtype`.
/// `grad_scale` (nullptr: none) is an fp32 scalar on the GPU that multiplies every gradient besides
/// step.grad_scale.
int adamw(float* param, const Moments& moments, const void* grad, Dtype grad_dtype, void* copy,
          Dtype copy_dtype, std::span<const UpdatePart> parts, const AdamWStep& step, const float* grad_scale,
          void* stream);
int sgd(float* param, const Moments& moments, const void* grad, Dtype grad_dtype, void* copy,
        Dtype copy_dtype, std::span<const UpdatePart> parts, const SgdStep& step, const float* grad_scale,
        void* stream);
/// out = the sum of squares, in double. `scratch`: kSquaresScratch doubles.
constexpr int64_t kSquaresScratch = 1024;
int sum_of_squares(double* out, double* scratch, const void* values, Dtype dtype, int64_t count,
                   void* stream);

}  // namespace trireme::kernels::cuda
