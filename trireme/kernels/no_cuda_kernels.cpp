// Stands in for the CUDA kernels in a build without CUDA.
#include "trireme/base/error.h"
#include "trireme/kernels/cublas_matmul.h"
#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/cudnn_attention.h"

namespace trireme::kernels::cuda {
namespace {

[[noreturn]] void absent(const char* operation) {
  throw LogicError("[kernels.{}] the tensor is on a GPU, but this build has no CUDA", operation);
}

}  // namespace

int rms_norm_forward(void*, void*, float*, const void*, const void*, const void*, int64_t, int64_t, float,
                     Dtype, void*, float*) {
  absent("rms_norm_forward");
}
int rms_norm_backward(void*, void*, float*, const void*, const void*, const void*, const void*, const float*,
                      int64_t, int64_t, Dtype, void*, float*) {
  absent("rms_norm_backward");
}
int layer_norm_forward(void*, void*, float*, float*, const void*, const void*, const void*, const void*,
                       int64_t, int64_t, float, Dtype, void*, float*) {
  absent("layer_norm_forward");
}
int layer_norm_backward(void*, void*, void*, float*, const void*, const void*, const void*, const void*,
                        const float*, const float*, int64_t, int64_t, Dtype, void*, float*, float*) {
  absent("layer_norm_backward");
}
int64_t norm_scratch(int64_t, int) {
  absent("norm_scratch");
}
int add_column_sums(void*, float*, const void*, int64_t, int64_t, Dtype, void*) {
  absent("add_column_sums");
}
int64_t column_scratch(int64_t) {
  absent("column_scratch");
}
int batch_norm_forward(const BatchNormForward&, Dtype, void*) {
  absent("batch_norm_forward");
}
int batch_norm_backward(const BatchNormBackward&, Dtype, void*) {
  absent("batch_norm_backward");
}
int64_t batch_norm_scratch(int64_t) {
  absent("batch_norm_scratch");
}
int turn_conv_weights(void*, const void*, const ConvWeights&, Dtype, void*) {
  absent("turn_conv_weights");
}
int add_conv_weights(void*, Dtype, const void*, bool, const ConvWeights&, Dtype, void*) {
  absent("add_conv_weights");
}
int max_pool_forward(const MaxPool&, void*, uint8_t*, const void*, Dtype, void*) {
  absent("max_pool_forward");
}
int max_pool_backward(const MaxPool&, void*, const void*, const uint8_t*, Dtype, void*) {
  absent("max_pool_backward");
}
int swiglu_forward(void*, const void*, int64_t, int64_t, Dtype, void*, float*) {
  absent("swiglu_forward");
}
int swiglu_backward(void*, const void*, const void*, int64_t, int64_t, Dtype, void*, float*, void*) {
  absent("swiglu_backward");
}
int gelu_forward(void*, const void*, int64_t, Dtype, void*, float*) {
  absent("gelu_forward");
}
int gelu_backward(void*, const void*, const void*, int64_t, Dtype, void*, float*, void*) {
  absent("gelu_backward");
}
int gelu_backward_with_sums(void*, float*, float*, const void*, const void*, int64_t, int64_t, Dtype, void*,
                            float*, void*) {
  absent("gelu_backward_with_sums");
}
int scale_columns(void*, const void*, const float*, int64_t, int64_t, Dtype, void*) {
  absent("scale_columns");
}
int scale_columns_backward(void*, float*, float*, const void*, const void*, const float*, int64_t, int64_t,
                           Dtype, void*) {
  absent("scale_columns_backward");
}
int rope_inplace(void*, const float*, const float*, int64_t, int64_t, int64_t, int64_t, int64_t, float, Dtype,
                 void*) {
  absent("rope_inplace");
}
int pack_head_gradients(void*, const HeadGradient&, const HeadGradient&, const HeadGradient&, const float*,
                        const float*, int64_t, int64_t, int64_t, Dtype, void*) {
  absent("pack_head_gradients");
}
int cross_entropy_fp8(float*, void*, const void*, const int64_t*, int64_t, int64_t, int64_t, void*) {
  absent("cross_entropy_fp8");
}
int cross_entropy(float*, void*, const int64_t*, int64_t, int64_t, int64_t, float, bool, Dtype, void*) {
  absent("cross_entropy");
}
int vocabulary_part(void*, float*, float*, float*, const void*, const int64_t*, int64_t, int64_t, int64_t,
                    Dtype, void*) {
  absent("vocabulary_part");
}
int vocabulary_part_gradient(void*, const void*, const int64_t*, int64_t, const float*, const float*,
                             const float*, int64_t, int64_t, Dtype, void*) {
  absent("vocabulary_part_gradient");
}
int join_vocabulary(void*, const VocabularyMessages&, const float*, const float*, const float*, int64_t,
                    int64_t, Dtype, void*) {
  absent("join_vocabulary");
}
int scale(void*, Dtype, const void*, const float*, bool, int64_t, Dtype, void*) {
  absent("scale");
}
int embedding_backward(void*, Dtype, float*, const void*, const int64_t*, const int64_t*, int64_t, int64_t,
                       Dtype, void*) {
  absent("embedding_backward");
}
int64_t embedding_scratch(int64_t, int64_t) {
  absent("embedding_scratch");
}
int adamw(float*, const Moments&, const void*, Dtype, void*, Dtype, std::span<const UpdatePart>,
          const AdamWStep&, const float*, void*) {
  absent("adamw");
}
int sgd(float*, const Moments&, const void*, Dtype, void*, Dtype, std::span<const UpdatePart>, const SgdStep&,
        const float*, void*) {
  absent("sgd");
}
int sum_of_squares(double*, double*, const void*, Dtype, int64_t, void*) {
  absent("sum_of_squares");
}

int fp8_amax(float*, const void*, int64_t, void*) {
  absent("fp8_amax");
}
int fp8_amax_rows(float*, float*, const void*, int64_t, int64_t, void*) {
  absent("fp8_amax_rows");
}
int fp8_cast(const Fp8CastCall&, void*) {
  absent("fp8_cast");
}
int fp8_transpose(void*, const void*, int64_t, int64_t, void*) {
  absent("fp8_transpose");
}
int fp8_amax_part(float*, const float*, int64_t, void*) {
  absent("fp8_amax_part");
}
int fp8_cast_part(void*, const float*, const float*, float*, int64_t, void*) {
  absent("fp8_cast_part");
}
int nf4_decode(void*, const uint8_t*, const Nf4Values&, int64_t, Dtype, void*) {
  absent("nf4_decode");
}
int fill_normal(float*, int64_t, uint64_t, const Counters&, double, void*) {
  absent("fill_normal");
}
int fill_kept(bool*, int64_t, uint64_t, const Counters&, double, void*) {
  absent("fill_kept");
}
void matmul(const MatmulCall&) {
  absent("matmul");
}
bool set_matmul_tuning(bool on) {
  return on;
}

}  // namespace trireme::kernels::cuda

namespace trireme::kernels {

bool attention_backward(AttentionGradients&, const at::Tensor&, const AttentionPass&, SumOrder) {
  return false;
}

}  // namespace trireme::kernels
