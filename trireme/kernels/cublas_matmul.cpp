#include "trireme/kernels/cublas_matmul.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <compare>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/kernels/repeatable.h"

namespace trireme::kernels::cuda {
namespace {

constexpr uint64_t kWorkspaceBytes = 32 << 20;
constexpr int kProposals = 12;
/// Smallest output, in elements, for which algorithms are tried: a smaller one might not show that two of
/// them add in different orders, and takes little time anyway.
constexpr int64_t kSmallestTuned = 1 << 20;
/// Shapes that a process tries algorithms for. Training needs a few dozen; text generation, whose sequences
/// grow, would never end.
constexpr size_t kMostContests = 256;
/// A product of zeros alone cannot tell algorithms apart: after so many contests over such products, the
/// first algorithm stays.
constexpr int kMostTries = 3;
constexpr int kTimedRounds = 4, kRunsPerRound = 2;
/// After the first round, algorithms that took longer than this times the fastest are dropped.
constexpr float kInTheRunning = 1.15f;
/// An algorithm replaces the library's first choice only below this share of its time: clocks vary.
constexpr float kClearlyFaster = 0.985f;

std::atomic<bool> tuning = true;

void check(cublasStatus_t status, const char* what) {
  TRIREME_CHECK(status == CUBLAS_STATUS_SUCCESS, "[kernels.matmul] {}: {}", what,
                cublasLtGetStatusString(status));
}

/// The largest power of two that divides the address, at most 256: cuBLASLt distinguishes no more.
uint32_t alignment(const void* address) {
  constexpr uintptr_t kMost = 256;
  const auto bits = reinterpret_cast<uintptr_t>(address) | kMost;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

enum class Addend { kNone, kInPlace, kOther };

/// Calls with the same key run the same algorithm.
struct Key {
  int device;
  Dtype dtype, out_dtype;
  int64_t m, n, k, a_stride, b_stride;
  bool a_transposed, b_transposed, has_bias;
  Addend addend;
  bool fp8, fast;
  Fp8Operands::Kind a_kind, b_kind;  ///< of FP8 alone
  std::array<uint32_t, 5> alignments;
  auto operator<=>(const Key&) const = default;
};

Key key_of(const MatmulCall& call, int device) {
  return {.device = device,
          .dtype = call.dtype,
          .out_dtype = call.out_dtype,
          .m = call.m,
          .n = call.n,
          .k = call.k,
          .a_stride = call.a.stride,
          .b_stride = call.b.stride,
          .a_transposed = call.a.transposed,
          .b_transposed = call.b.transposed,
          .has_bias = call.bias != nullptr,
          .addend = call.addend == nullptr    ? Addend::kNone
                    : call.addend == call.out ? Addend::kInPlace
                                              : Addend::kOther,
          .fp8 = call.fp8.has_value(),
          .fast = call.fp8 && call.fp8->fast,
          .a_kind = call.fp8 ? call.fp8->a : Fp8Operands::Kind(),
          .b_kind = call.fp8 ? call.fp8->b : Fp8Operands::Kind(),
          .alignments = {alignment(call.a.data), alignment(call.b.data), alignment(call.bias),
                         alignment(call.addend), alignment(call.out)}};
}

struct Algorithm {
  cublasLtMatmulAlgo_t algo;
  size_t workspace;
};

/// The product as cuBLASLt takes it. Its matrices have columns without gaps, so it computes out' = b' @ a'.
struct Problem {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t b, a, out;
};

template <typename Value>
void set(Problem& problem, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  check(cublasLtMatmulDescSetAttribute(&problem.operation, attribute, &value, sizeof(value)),
        "setting an attribute");
}

void describe(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType type, int64_t rows, int64_t columns,
              const Matrix& matrix) {
  const auto inner = static_cast<uint64_t>(matrix.transposed ? rows : columns);
  const auto outer = static_cast<uint64_t>(matrix.transposed ? columns : rows);
  check(cublasLtMatrixLayoutInit(&layout, type, inner, outer, matrix.stride), "a layout");
}

cudaDataType in_cuda(Dtype dtype) {
  return dtype == Dtype::kFloat ? CUDA_R_32F : dtype == Dtype::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F;
}

cudaDataType in_cuda(Fp8Format format) {
  return format == Fp8Format::kE4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

cublasLtMatmulMatrixScale_t in_cuda(Fp8Span span) {
  switch (span) {
    case Fp8Span::kTensor:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case Fp8Span::kRow:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case Fp8Span::kRowBlock:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Fp8Span::kSquareBlock:
      break;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

int64_t output_bytes(const MatmulCall& call) {
  return call.m * call.n * (call.out_dtype == Dtype::kFloat ? 4 : 2);
}

/// cuBLASLt's A is b.
void describe_scales(Problem& problem, const Fp8Operands& operands) {
  set(problem, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.b_scale);
  set(problem, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.a_scale);
  set(problem, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(in_cuda(operands.b.span)));
  set(problem, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(in_cuda(operands.a.span)));
  set(problem, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(operands.fast ? 1 : 0));
}

Problem problem_of(const MatmulCall& call) {
  const cudaDataType type = in_cuda(call.dtype);
  const cudaDataType a_type = call.fp8 ? in_cuda(call.fp8->a.format) : type;
  const cudaDataType b_type = call.fp8 ? in_cuda(call.fp8->b.format) : type;
  const auto operation = [](const Matrix& matrix) { return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  Problem problem;
  check(cublasLtMatmulDescInit(&problem.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "creating the operation");
  set(problem, CUBLASLT_MATMUL_DESC_TRANSA, operation(call.b));
  set(problem, CUBLASLT_MATMUL_DESC_TRANSB, operation(call.a));
  if (call.bias != nullptr) {
    set(problem, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(problem, CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias);
    set(problem, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(type));
  }
  if (call.fp8) describe_scales(problem, *call.fp8);
  describe(problem.a, a_type, call.m, call.k, call.a);
  describe(problem.b, b_type, call.k, call.n, call.b);
  describe(problem.out, in_cuda(call.out_dtype), call.m, call.n, {call.out, call.n, false});
  return problem;
}

std::vector<Algorithm> proposals(Problem& problem, const MatmulCall& call, int wanted) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check(cublasLtMatmulPreferenceInit(&preference), "a preference");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
          "a preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // Partial sums of one element are added in fp32 and in a fixed order.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(call.b.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(call.a.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::min(alignment(call.addend), alignment(call.out)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(call.out));
  std::array<cublasLtMatmulHeuristicResult_t, kProposals> results;
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      at::cuda::getCurrentCUDABlasLtHandle(), &problem.operation, &problem.b, &problem.a, &problem.out,
      &problem.out, &preference, wanted, results.data(), &found);
  TRIREME_CHECK(
      status == CUBLAS_STATUS_SUCCESS && found > 0,
      "[kernels.matmul] cuBLASLt has no algorithm for ({}, {}) @ ({}, {}) with strides {} and {}: {}", call.m,
      call.k, call.k, call.n, call.a.stride, call.b.stride, cublasLtGetStatusString(status));
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back({result.algo, result.workspaceSize});
  }
  TRIREME_CHECK(!algorithms.empty(), "[kernels.matmul] cuBLASLt rejects every algorithm that it proposed");
  return algorithms;
}

cublasStatus_t enqueue(Problem& problem, const MatmulCall& call, const Algorithm& algorithm) {
  const at::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  const c10::DataPtr workspace = c10::cuda::CUDACachingAllocator::get()->allocate(algorithm.workspace);
  const float one = 1.0f, beta = call.addend == nullptr ? 0.0f : 1.0f;
  const void* const addend = call.addend == nullptr ? call.out : call.addend;
  return cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), &problem.operation, &one, call.b.data,
                        &problem.b, call.a.data, &problem.a, &beta, addend, &problem.out, call.out,
                        &problem.out, &algorithm.algo, workspace.get(), algorithm.workspace, stream);
}

/// Whether two algorithms cut the inner dimension into the same number of sums.
bool cuts_alike(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) {
  for (const auto attribute : {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME}) {
    const auto value = [attribute](const cublasLtMatmulAlgo_t& algo) {
      uint32_t read = 0;
      size_t written = 0;
      const cublasStatus_t status =
          cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &read, sizeof(read), &written);
      return status == CUBLAS_STATUS_SUCCESS ? read : 0;
    };
    if (value(a) != value(b)) return false;
  }
  return true;
}

/// Tries algorithms on one call. Zeros stand for the addend, whose size could hide differences.
class Contest {
 public:
  Contest(Problem& problem, const MatmulCall& call)
      : problem_(problem), call_(call), bytes_(static_cast<size_t>(output_bytes(call))) {
    if (call.addend == nullptr) return;
    addend_ = c10::cuda::CUDACachingAllocator::get()->allocate(bytes_);
    call_.addend = addend_.get();
    if (call.addend == call.out) call_.out = addend_.get();
  }

  /// The fastest of those that give the same bits as the first; nothing when the product is all zeros, which
  /// tells nothing about bits.
  std::optional<Algorithm> winner(std::vector<Algorithm> algorithms) {
    const Algorithm first = algorithms.front();
    std::erase_if(algorithms, [&](const Algorithm& one) { return !cuts_alike(one.algo, first.algo); });
    const std::vector<uint64_t> sums = checksums(algorithms);
    if (sums.front() == 0) return {};
    std::vector<Algorithm> equal;
    for (size_t i = 0; i < algorithms.size(); ++i) {
      if (sums[i] == sums.front()) equal.push_back(algorithms[i]);
    }
    std::vector<float> best(equal.size());
    for (size_t i = 0; i < equal.size(); ++i) best[i] = milliseconds(equal[i]);
    const float limit = kInTheRunning * std::ranges::min(best);
    for (int round = 1; round < kTimedRounds; ++round) {
      for (size_t i = 0; i < equal.size(); ++i) {
        if (best[i] <= limit) best[i] = std::min(best[i], milliseconds(equal[i]));
      }
    }
    const auto fastest = std::ranges::min_element(best);
    const bool clearly = *fastest < kClearlyFaster * best.front();
    return equal[clearly ? static_cast<size_t>(fastest - best.begin()) : 0];
  }

 private:
  /// A checksum of each algorithm's output; where it failed, a value that differs from the first's.
  std::vector<uint64_t> checksums(const std::vector<Algorithm>& algorithms) {
    const at::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
    const size_t size = algorithms.size() * sizeof(uint64_t);
    const c10::DataPtr device = c10::cuda::CUDACachingAllocator::get()->allocate(size);
    auto* const sums = static_cast<uint64_t*>(device.get());
    C10_CUDA_CHECK(cudaMemsetAsync(sums, 0, size, stream));
    std::vector<bool> ran;
    for (size_t i = 0; i < algorithms.size(); ++i) {
      if (addend_) C10_CUDA_CHECK(cudaMemsetAsync(addend_.get(), 0, bytes_, stream));
      ran.push_back(enqueue(problem_, call_, algorithms[i]) == CUBLAS_STATUS_SUCCESS);
      C10_CUDA_CHECK(static_cast<cudaError_t>(
          add_checksum(sums + i, call_.out, static_cast<int64_t>(bytes_), stream.stream())));
    }
    std::vector<uint64_t> host(algorithms.size());
    C10_CUDA_CHECK(cudaMemcpyAsync(host.data(), sums, size, cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 1; i < host.size(); ++i) {
      if (!ran[i]) host[i] = ~host.front();
    }
    return host;
  }

  float milliseconds(const Algorithm& algorithm) {
    const at::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
    at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
    begin.record(stream);
    for (int i = 0; i < kRunsPerRound; ++i) check(enqueue(problem_, call_, algorithm), "a product");
    end.record(stream);
    end.synchronize();
    return begin.elapsed_time(end);
  }

  Problem& problem_;
  MatmulCall call_;
  size_t bytes_;
  c10::DataPtr addend_;  ///< zeros, and the sum where the call adds in place
};

/// The algorithms chosen so far, by key.
class Choices {
 public:
  std::optional<Algorithm> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = chosen_.find(key);
    return found == chosen_.end() ? std::nullopt : std::optional(found->second);
  }
  void keep(const Key& key, const Algorithm& algorithm) {
    const std::lock_guard lock(mutex_);
    chosen_.insert_or_assign(key, algorithm);
  }
  /// Takes one of the tries of `key`; false: none is left.
  bool take_try(const Key& key) {
    const std::lock_guard lock(mutex_);
    if (tries_.size() >= kMostContests && !tries_.contains(key)) return false;
    return ++tries_[key] <= kMostTries;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    chosen_.clear();
    tries_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<Key, Algorithm> chosen_;
  std::map<Key, int> tries_;
};

Choices& choices() {
  static Choices instance;
  return instance;
}

Algorithm choose(const Key& key, Problem& problem, const MatmulCall& call) {
  if (const auto known = choices().find(key)) return *known;
  const bool capturing = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  const std::vector<Algorithm> algorithms = proposals(problem, call, kProposals);
  const bool tries =
      tuning && !must_repeat() && !capturing && call.m * call.n >= kSmallestTuned && choices().take_try(key);
  if (!tries) {
    if (!capturing) choices().keep(key, algorithms.front());
    return algorithms.front();
  }
  try {
    const std::optional<Algorithm> winner = Contest(problem, call).winner(algorithms);
    if (winner) choices().keep(key, *winner);
    return winner.value_or(algorithms.front());
  } catch (const c10::OutOfMemoryError&) {
    choices().keep(key, algorithms.front());
    return algorithms.front();
  }
}

}  // namespace

void matmul(const MatmulCall& call) {
  Problem problem = problem_of(call);
  const Key key = key_of(call, at::cuda::current_device());
  check(enqueue(problem, call, choose(key, problem, call)), "a product");
}

bool set_matmul_tuning(bool on) {
  const bool before = tuning.exchange(on);
  if (before != on) choices().forget();
  return before;
}

}  // namespace trireme::kernels::cuda
