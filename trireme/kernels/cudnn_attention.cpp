#include "trireme/kernels/cudnn_attention.h"

#include <ATen/ATen.h>
#include <ATen/cudnn/Handle.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cudnn.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::kernels {
namespace {

/// Most that the gradient of the scores takes at a time, unless one head of keys with its queries needs more.
constexpr int64_t kScoreBytes = int64_t{1} << 30;

void check(cudnnStatus_t status, const char* what) {
  TRIREME_CHECK(status == CUDNN_STATUS_SUCCESS, "[kernels.cudnn_attention] {}: {}", what,
                cudnnGetErrorString(status));
}

class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    check(cudnnBackendCreateDescriptor(type, &descriptor_), "a descriptor");
  }
  ~Descriptor() { cudnnBackendDestroyDescriptor(descriptor_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  template <typename Value>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const std::vector<Value>& values) {
    check(
        cudnnBackendSetAttribute(descriptor_, name, type, static_cast<int64_t>(values.size()), values.data()),
        "setting an attribute");
    return *this;
  }
  template <typename Value>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
    check(cudnnBackendSetAttribute(descriptor_, name, type, 1, &value), "setting an attribute");
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.get());
  }
  cudnnStatus_t try_finalize() { return cudnnBackendFinalize(descriptor_); }
  Descriptor& finalize() {
    check(try_finalize(), "a description");
    return *this;
  }
  cudnnBackendDescriptor_t get() const { return descriptor_; }

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

using Sizes = std::vector<int64_t>;

/// Strides of a tensor without gaps.
Sizes packed(const Sizes& dims) {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

/// A tensor of the graph; its name is its number.
struct Node {
  std::unique_ptr<Descriptor> descriptor;
  int64_t uid = 0;
  Sizes dims;
};

/// A graph of cuDNN's operations under construction.
class Graph {
 public:
  enum class Storage { kDevice, kHost, kVirtual };  ///< kVirtual: none, between two operations of one kernel

  Node& tensor(cudnnDataType_t type, const Sizes& dims, const Sizes& strides, Storage storage) {
    auto node = std::make_unique<Node>();
    node->uid = static_cast<int64_t>(nodes_.size()) + 1;
    node->dims = dims;
    node->descriptor = std::make_unique<Descriptor>(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    constexpr int64_t kAlignment = 16;
    node->descriptor->set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims)
        .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides)
        .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, node->uid)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment)
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, storage == Storage::kVirtual)
        .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, storage == Storage::kHost)
        .finalize();
    nodes_.push_back(std::move(node));
    return *nodes_.back();
  }
  /// Between operations, without gaps unless strides are given.
  Node& between(cudnnDataType_t type, const Sizes& dims, Sizes strides = {}) {
    if (strides.empty()) strides = packed(dims);
    return tensor(type, dims, strides, Storage::kVirtual);
  }
  Node& number() { return tensor(CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, Storage::kHost); }

  void matmul(const Node& a, const Node& b, const Node& c) {
    const Descriptor& how = kept(CUDNN_BACKEND_MATMUL_DESCRIPTOR)
                                .set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
                                .finalize();
    operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, *a.descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, *b.descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, *c.descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how)
        .finalize();
  }
  /// y = the sum of x over the dimensions that y lacks.
  void sum(const Node& x, const Node& y) {
    const Descriptor& how =
        kept(CUDNN_BACKEND_REDUCTION_DESCRIPTOR)
            .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
            .set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, CUDNN_REDUCE_TENSOR_ADD)
            .finalize();
    operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, *x.descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, *y.descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how)
        .finalize();
  }
  /// Gives y the elements of x, in other strides.
  void transpose(const Node& x, const Node& y) {
    operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, *x.descriptor)
        .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, *y.descriptor)
        .finalize();
  }
  /// y = mode(x, b), or where `chosen` says x, else b.
  void pointwise(cudnnPointwiseMode_t mode, const Node& x, const Node* b, const Node& y,
                 const Node* chosen = nullptr, cudnnDataType_t precision = CUDNN_DATA_FLOAT,
                 int64_t axis = -1) {
    Descriptor& how = kept(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode)
        .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, precision);
    if (axis >= 0) how.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    how.finalize();
    Descriptor& made = operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    made.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x.descriptor)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *y.descriptor);
    if (b != nullptr) made.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b->descriptor);
    if (chosen != nullptr) made.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *chosen->descriptor);
    made.finalize();
  }
  std::vector<cudnnBackendDescriptor_t> operations() const {
    std::vector<cudnnBackendDescriptor_t> all;
    for (const auto& operation : operations_) all.push_back(operation->get());
    return all;
  }

 private:
  Descriptor& kept(cudnnBackendDescriptorType_t type) {
    return *kept_.emplace_back(std::make_unique<Descriptor>(type));
  }
  Descriptor& operation(cudnnBackendDescriptorType_t type) {
    return *operations_.emplace_back(std::make_unique<Descriptor>(type));
  }

  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::unique_ptr<Descriptor>> kept_, operations_;
};

/// The tensors that one call reads and writes, heads as (B, H or K, T, hd).
struct Problem {
  Sizes query, key, value, output, d_output, d_query, d_key, d_value;  ///< dims, then strides
  bool bf16 = true;
  SumOrder order = SumOrder::kAny;
  int device = 0;
  auto operator<=>(const Problem&) const = default;
};

Node& heads(Graph& graph, cudnnDataType_t type, const Sizes& sizes) {
  return graph.tensor(type, {sizes.begin(), sizes.begin() + 4}, {sizes.begin() + 4, sizes.end()},
                      Graph::Storage::kDevice);
}

/// A tensor over this memory with the last two dimensions exchanged.
Node& turned(Graph& graph, cudnnDataType_t type, const Sizes& sizes) {
  return graph.tensor(type, {sizes[0], sizes[1], sizes[3], sizes[2]},
                      {sizes[4], sizes[5], sizes[7], sizes[6]}, Graph::Storage::kDevice);
}

/// Sizes of the scores and of a number for each of their rows, and the dtype of what a call binds.
struct Shape {
  explicit Shape(const Problem& problem)
      : type(problem.bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF),
        batch(problem.query[0]),
        count(problem.query[1]),
        length(problem.query[2]),
        width(problem.query[3]),
        kv_heads(problem.key[1]) {}

  Sizes square() const { return {batch, count, length, length}; }
  Sizes square_turned() const { return {count * length * length, length * length, 1, length}; }  ///< strides
  Sizes queries() const { return {batch, count, length, width}; }
  Sizes rows() const { return {batch, count, length, 1}; }
  Sizes row_strides() const { return {count * length, length, 1, 1}; }

  cudnnDataType_t type;
  int64_t batch, count, length, width, kv_heads;  ///< count: of query heads
};

/// The tensors that a call binds to memory; `key` and `value` with their last two dimensions exchanged.
struct Ends {
  Node &query, &key, &value, &output, &d_output, &logsumexp, &d_query, &d_key, &d_value, &scale, &one,
      &hidden, &row_sums;
  Node* d_query_sums;  ///< fp32; nullptr where the order of sums is fixed
};

/// Made in the order in which they are listed, which gives them their names.
Ends ends_of(Graph& graph, const Problem& problem, const Shape& shape) {
  const auto row_numbers = [&]() -> Node& {
    return graph.tensor(CUDNN_DATA_FLOAT, shape.rows(), shape.row_strides(), Graph::Storage::kDevice);
  };
  return {.query = heads(graph, shape.type, problem.query),
          .key = turned(graph, shape.type, problem.key),
          .value = turned(graph, shape.type, problem.value),
          .output = heads(graph, shape.type, problem.output),
          .d_output = heads(graph, shape.type, problem.d_output),
          .logsumexp = row_numbers(),
          .d_query = heads(graph, shape.type, problem.d_query),
          .d_key = heads(graph, shape.type, problem.d_key),
          .d_value = heads(graph, shape.type, problem.d_value),
          .scale = graph.number(),
          .one = graph.number(),
          .hidden = graph.number(),
          .row_sums = row_numbers(),
          .d_query_sums = problem.order == SumOrder::kFixed
                              ? nullptr
                              : &graph.tensor(CUDNN_DATA_FLOAT, shape.queries(), packed(shape.queries()),
                                              Graph::Storage::kDevice)};
}

/// D, the row sums of dO * O.
void sum_rows(Graph& graph, const Shape& shape, const Ends& ends) {
  const int64_t count = shape.count, length = shape.length, width = shape.width;
  Node& products = graph.between(CUDNN_DATA_FLOAT, {shape.batch, count, length, width},
                                 {count * length * width, length * width, count * width, 1});
  graph.pointwise(CUDNN_POINTWISE_MUL, ends.d_output, &ends.output, products);
  Node& sums = graph.between(CUDNN_DATA_FLOAT, shape.rows(), shape.row_strides());
  graph.sum(products, sums);
  graph.pointwise(CUDNN_POINTWISE_MUL, sums, &ends.one, ends.row_sums);
}

/// P = exp(scale Q K^T - logsumexp), 0 above the diagonal.
Node& probabilities_of(Graph& graph, const Shape& shape, const Ends& ends) {
  const auto scores = [&](cudnnDataType_t of = CUDNN_DATA_FLOAT) -> Node& {
    return graph.between(of, shape.square());
  };
  Node &raw = scores(), &scaled = scores(), &shifted = scores();
  graph.matmul(ends.query, ends.key, raw);
  graph.pointwise(CUDNN_POINTWISE_MUL, raw, &ends.scale, scaled);
  graph.pointwise(CUDNN_POINTWISE_SUB, scaled, &ends.logsumexp, shifted);
  Node &row = scores(CUDNN_DATA_INT32), &column = scores(CUDNN_DATA_INT32),
       &seen = scores(CUDNN_DATA_BOOLEAN);
  graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, shifted, nullptr, row, nullptr, CUDNN_DATA_FLOAT, 2);
  graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, shifted, nullptr, column, nullptr, CUDNN_DATA_FLOAT, 3);
  graph.pointwise(CUDNN_POINTWISE_CMP_GE, row, &column, seen, nullptr, CUDNN_DATA_BOOLEAN);
  Node &masked = scores(), &probabilities = scores();
  graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, shifted, &ends.hidden, masked, &seen);
  graph.pointwise(CUDNN_POINTWISE_EXP, masked, nullptr, probabilities);
  return probabilities;
}

/// dS = scale P * (dO V^T - D).
Node& d_scores_of(Graph& graph, const Shape& shape, const Ends& ends, const Node& probabilities) {
  const auto scores = [&]() -> Node& { return graph.between(CUDNN_DATA_FLOAT, shape.square()); };
  Node &d_probabilities = scores(), &centred = scores(), &d_shifted = scores(), &d_scores = scores();
  graph.matmul(ends.d_output, ends.value, d_probabilities);
  graph.pointwise(CUDNN_POINTWISE_SUB, d_probabilities, &ends.row_sums, centred);
  graph.pointwise(CUDNN_POINTWISE_MUL, centred, &probabilities, d_shifted);
  graph.pointwise(CUDNN_POINTWISE_MUL, d_shifted, &ends.scale, d_scores);
  return d_scores;
}

/// result = scores^T right. A head of keys and values has the sum over its query heads.
void multiply_into_keys(Graph& graph, const Shape& shape, const Node& scores, const Node& right,
                        const Node& result) {
  Node& scores_turned = graph.between(shape.type, shape.square(), shape.square_turned());
  graph.transpose(scores, scores_turned);
  if (shape.kv_heads == shape.count) return graph.matmul(scores_turned, right, result);
  Node& of_each = graph.between(shape.type, {shape.batch, shape.count, shape.length, shape.width});
  graph.matmul(scores_turned, right, of_each);
  graph.sum(of_each, result);
}

/// dQ = scores K. Through sums in memory, blocks add to them as they arrive. `key`: dims and strides of K.
void multiply_into_queries(Graph& graph, const Shape& shape, const Node& scores, const Ends& ends,
                           const Sizes& key) {
  Node& key_rows = graph.between(CUDNN_DATA_FLOAT, {shape.batch, shape.kv_heads, shape.length, shape.width},
                                 {key[4], key[5], key[6], key[7]});
  graph.transpose(ends.key, key_rows);
  if (ends.d_query_sums == nullptr) return graph.matmul(scores, key_rows, ends.d_query);
  graph.matmul(scores, key_rows, *ends.d_query_sums);
  graph.pointwise(CUDNN_POINTWISE_IDENTITY, *ends.d_query_sums, nullptr, ends.d_query);
}

/// With P, D and dS as above: dV = P^T dO, dK = dS^T Q, dQ = dS K. Dao et al. 2022.
Ends describe(Graph& graph, const Problem& problem) {
  const Shape shape(problem);
  const Ends ends = ends_of(graph, problem, shape);
  sum_rows(graph, shape, ends);
  const Node& probabilities = probabilities_of(graph, shape, ends);
  multiply_into_keys(graph, shape, probabilities, ends.d_output, ends.d_value);
  const Node& d_scores = d_scores_of(graph, shape, ends, probabilities);
  multiply_into_keys(graph, shape, d_scores, ends.query, ends.d_key);
  multiply_into_queries(graph, shape, d_scores, ends, problem.key);
  return ends;
}

/// The memory of a tensor of the graph in a call.
struct Binding {
  const Node& tensor;
  void* memory;
};

class Plan {
 public:
  /// Makes a plan; nullptr where no engine takes the graph.
  static std::unique_ptr<Plan> make(const Problem& problem, cudnnHandle_t handle) try {
    auto plan = std::unique_ptr<Plan>(new Plan(problem));
    plan->whole_.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, plan->graph_.operations())
        .set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
    if (plan->whole_.try_finalize() != CUDNN_STATUS_SUCCESS) return nullptr;
    plan->heuristics_.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, plan->whole_)
        .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
    if (plan->heuristics_.try_finalize() != CUDNN_STATUS_SUCCESS) return nullptr;
    return plan->take_first(handle, problem.order == SumOrder::kFixed) ? std::move(plan) : nullptr;
  } catch (const LogicError&) {  // this version of cuDNN knows an operation otherwise
    return nullptr;
  }

  const Ends& ends() const { return ends_; }

  void run(cudnnHandle_t handle, const std::vector<Binding>& bindings) const {
    std::vector<int64_t> uids;
    std::vector<void*> pointers;
    for (const auto& [tensor, memory] : bindings) {
      uids.push_back(tensor.uid);
      pointers.push_back(memory);
    }
    const c10::DataPtr memory =
        c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(workspace_));
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, uids)
        .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers)
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, memory.get())
        .finalize();
    check(cudnnBackendExecute(handle, plan_->get(), pack.get()), "backward");
  }

 private:
  explicit Plan(const Problem& problem) : ends_(describe(graph_, problem)) {}

  /// The first proposal that can be built and, where bits must repeat, does not say of itself that they vary.
  bool take_first(cudnnHandle_t handle, bool must_repeat) {
    constexpr int64_t kMost = 8;
    std::vector<std::unique_ptr<Descriptor>> proposals;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (int64_t i = 0; i < kMost; ++i) {
      proposals.push_back(std::make_unique<Descriptor>(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
      raw.push_back(proposals.back()->get());
    }
    int64_t found = 0;
    if (cudnnBackendGetAttribute(heuristics_.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, kMost, &found,
                                 raw.data()) != CUDNN_STATUS_SUCCESS) {
      return false;
    }
    for (int64_t i = 0; i < std::min(found, kMost); ++i) {
      const Descriptor& proposal = *proposals[static_cast<size_t>(i)];
      if (must_repeat && bits_vary(proposal)) continue;
      plan_ = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan_->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle)
          .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, proposal);
      if (plan_->try_finalize() != CUDNN_STATUS_SUCCESS) continue;
      int64_t count = 0;
      check(cudnnBackendGetAttribute(plan_->get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
                                     1, &count, &workspace_),
            "reading the workspace size");
      return true;
    }
    return false;
  }

  static bool bits_vary(const Descriptor& proposal) {
    const Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendDescriptor_t raw = engine.get();
    int64_t count = 0;
    if (cudnnBackendGetAttribute(proposal.get(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                 1, &count, &raw) != CUDNN_STATUS_SUCCESS) {
      return true;
    }
    std::vector<cudnnBackendNumericalNote_t> notes(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
    if (cudnnBackendGetAttribute(raw, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                 CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count,
                                 notes.data()) != CUDNN_STATUS_SUCCESS) {
      return true;
    }
    return std::find(notes.begin(), notes.begin() + count, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) !=
           notes.begin() + count;
  }

  Graph graph_;
  Ends ends_;  ///< of the graph
  Descriptor whole_{CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR};
  Descriptor heuristics_{CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR};
  std::unique_ptr<Descriptor> plan_;
  int64_t workspace_ = 0;
};

/// Versions before these need help from the caller, which torch's own call gives them: sums in memory that
/// are zero, and lengths that are padded to whole tiles.
bool needs_help(const Problem& problem) {
  constexpr size_t kClearsSums = 90600, kTakesAnyLength = 91501;
  constexpr int64_t kTile = 128;
  const size_t version = cudnnGetVersion();
  return version < kClearsSums || (version < kTakesAnyLength && problem.key[2] % kTile != 0);
}

/// The plan of a problem; nullptr: there is none. By thread, since plans must not run on two at once.
const Plan* plan_of(const Problem& problem, cudnnHandle_t handle) {
  thread_local std::map<Problem, std::unique_ptr<Plan>> plans;
  const auto found = plans.find(problem);
  if (found != plans.end()) return found->second.get();
  auto plan = needs_help(problem) ? nullptr : Plan::make(problem, handle);
  return plans.emplace(problem, std::move(plan)).first->second.get();
}

Sizes sizes_of(const at::Tensor& tensor) {
  Sizes sizes = tensor.sizes().vec();
  sizes.insert(sizes.end(), tensor.strides().begin(), tensor.strides().end());
  return sizes;
}

/// Some sequences, and some heads of keys with their query heads.
struct Part {
  int64_t first, count, first_key, keys, group;
  at::Tensor queries(const at::Tensor& all) const {
    return all.narrow(0, first, count).narrow(1, first_key * group, keys * group);
  }
  at::Tensor key_heads(const at::Tensor& all) const {
    return all.narrow(0, first, count).narrow(1, first_key, keys);
  }
};

bool run_part(const Part& part, AttentionGradients& gradients, const at::Tensor& d_output,
              const AttentionPass& pass, SumOrder order) {
  const at::Tensor query = part.queries(pass.query), key = part.key_heads(pass.key),
                   value = part.key_heads(pass.value), output = part.queries(pass.output),
                   d_out = part.queries(d_output), d_query = part.queries(gradients.query),
                   d_key = part.key_heads(gradients.key), d_value = part.key_heads(gradients.value);
  const at::Tensor logsumexp = part.queries(pass.logsumexp).contiguous();
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  const Plan* const plan = plan_of({.query = sizes_of(query),
                                    .key = sizes_of(key),
                                    .value = sizes_of(value),
                                    .output = sizes_of(output),
                                    .d_output = sizes_of(d_out),
                                    .d_query = sizes_of(d_query),
                                    .d_key = sizes_of(d_key),
                                    .d_value = sizes_of(d_value),
                                    .bf16 = query.scalar_type() == at::kBFloat16,
                                    .order = order,
                                    .device = query.get_device()},
                                   handle);
  if (plan == nullptr) return false;
  const at::Tensor row_sums = at::empty_like(logsumexp);
  at::Tensor d_query_sums;
  float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  float one = 1.0f, hidden = std::numeric_limits<float>::lowest();
  const Ends& ends = plan->ends();
  std::vector<Binding> bindings{{ends.query, query.data_ptr()},
                                {ends.key, key.data_ptr()},
                                {ends.value, value.data_ptr()},
                                {ends.output, output.data_ptr()},
                                {ends.d_output, d_out.data_ptr()},
                                {ends.logsumexp, logsumexp.data_ptr()},
                                {ends.d_query, d_query.data_ptr()},
                                {ends.d_key, d_key.data_ptr()},
                                {ends.d_value, d_value.data_ptr()},
                                {ends.row_sums, row_sums.data_ptr()},
                                {ends.scale, &scale},
                                {ends.one, &one},
                                {ends.hidden, &hidden}};
  if (ends.d_query_sums != nullptr) {
    d_query_sums = at::empty(query.sizes(), row_sums.options());
    bindings.push_back({*ends.d_query_sums, d_query_sums.data_ptr()});
  }
  plan->run(handle, bindings);
  return true;
}

}  // namespace

bool attention_backward(AttentionGradients& gradients, const at::Tensor& d_output, const AttentionPass& pass,
                        SumOrder order) {
  const int64_t batch = pass.query.size(0), kv_heads = pass.key.size(1), length = pass.query.size(2);
  const int64_t group = pass.query.size(1) / kv_heads;
  if (order == SumOrder::kAny) {
    return run_part({.first = 0, .count = batch, .first_key = 0, .keys = kv_heads, .group = group}, gradients,
                    d_output, pass, order);
  }
  const int64_t bytes = group * length * length * static_cast<int64_t>(pass.query.element_size());
  const int64_t fit = std::max<int64_t>(1, kScoreBytes / bytes);  // heads of keys at a time
  const int64_t keys = std::min(fit, kv_heads),
                sequences = keys < kv_heads ? 1 : std::min(fit / kv_heads, batch);
  for (int64_t first = 0; first < batch; first += sequences) {
    for (int64_t first_key = 0; first_key < kv_heads; first_key += keys) {
      const Part part{.first = first,
                      .count = std::min(sequences, batch - first),
                      .first_key = first_key,
                      .keys = std::min(keys, kv_heads - first_key),
                      .group = group};
      if (!run_part(part, gradients, d_output, pass, order)) {
        TRIREME_CHECK(first == 0 && first_key == 0, "[kernels.cudnn_attention] no plan for the last part");
        return false;
      }
    }
  }
  return true;
}

}  // namespace trireme::kernels
