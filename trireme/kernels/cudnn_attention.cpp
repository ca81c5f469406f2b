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

/// A tensor of the graph; its name is its number.
struct Node {
  std::unique_ptr<Descriptor> descriptor;
  int64_t uid = 0;
  Sizes dims;
};

/// A graph of cuDNN's operations under construction.
class Graph {
 public:
  enum class Lies { kInMemory, kOnHost, kNowhere };  ///< kNowhere: between two operations of one kernel

  Node& tensor(cudnnDataType_t type, const Sizes& dims, const Sizes& strides, Lies lies) {
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
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, lies == Lies::kNowhere)
        .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, lies == Lies::kOnHost)
        .finalize();
    nodes_.push_back(std::move(node));
    return *nodes_.back();
  }
  /// Between operations, without gaps unless strides are given.
  Node& between(cudnnDataType_t type, const Sizes& dims, Sizes strides = {}) {
    if (strides.empty()) strides = {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
    return tensor(type, dims, strides, Lies::kNowhere);
  }
  Node& number() { return tensor(CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, Lies::kOnHost); }

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
  /// The same elements with other strides.
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

/// What one call reads and writes, heads as (B, H or K, T, hd).
struct Problem {
  Sizes query, key, value, output, d_output, d_query, d_key, d_value;  ///< dims, then strides
  bool bf16 = true;
  int device = 0;
  auto operator<=>(const Problem&) const = default;
};

/// The names of the graph's tensors that a call binds to memory.
struct Names {
  int64_t query, key, value, output, d_output, logsumexp, d_query, d_key, d_value, row_sums, scale, one,
      hidden;
};

Node& heads(Graph& graph, cudnnDataType_t type, const Sizes& sizes) {
  return graph.tensor(type, {sizes.begin(), sizes.begin() + 4}, {sizes.begin() + 4, sizes.end()},
                      Graph::Lies::kInMemory);
}

/// The same memory with the last two dimensions exchanged.
Node& turned(Graph& graph, cudnnDataType_t type, const Sizes& sizes) {
  return graph.tensor(type, {sizes[0], sizes[1], sizes[3], sizes[2]},
                      {sizes[4], sizes[5], sizes[7], sizes[6]}, Graph::Lies::kInMemory);
}

/// With P = exp(scale Q K^T - logsumexp) below the diagonal, D = the row sums of dO * O and
/// dS = scale P * (dO V^T - D): dV = P^T dO, dK = dS^T Q, dQ = dS K. Dao et al. 2022.
Names describe(Graph& graph, const Problem& problem) {
  const cudnnDataType_t type = problem.bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
  const int64_t batch = problem.query[0], count = problem.query[1], length = problem.query[2],
                width = problem.query[3];
  const int64_t kv_heads = problem.key[1];
  const Sizes square = {batch, count, length, length}, rows = {batch, count, length, 1};
  const Sizes square_turned = {count * length * length, length * length, 1, length};
  const Sizes row_strides = {count * length, length, 1, 1};
  const auto scores = [&](cudnnDataType_t of = CUDNN_DATA_FLOAT) -> Node& {
    return graph.between(of, square);
  };

  Node& query = heads(graph, type, problem.query);
  Node& key = turned(graph, type, problem.key);
  Node& value = turned(graph, type, problem.value);
  Node& output = heads(graph, type, problem.output);
  Node& d_output = heads(graph, type, problem.d_output);
  Node& logsumexp = graph.tensor(CUDNN_DATA_FLOAT, rows, row_strides, Graph::Lies::kInMemory);
  Node& d_query = heads(graph, type, problem.d_query);
  Node& d_key = heads(graph, type, problem.d_key);
  Node& d_value = heads(graph, type, problem.d_value);
  Node &scale = graph.number(), &one = graph.number(), &hidden = graph.number();
  Node& row_sums = graph.tensor(CUDNN_DATA_FLOAT, rows, row_strides, Graph::Lies::kInMemory);

  Node& products = graph.between(CUDNN_DATA_FLOAT, {batch, count, length, width},
                                 {count * length * width, length * width, count * width, 1});
  graph.pointwise(CUDNN_POINTWISE_MUL, d_output, &output, products);
  Node& sums = graph.between(CUDNN_DATA_FLOAT, rows, row_strides);
  graph.sum(products, sums);
  graph.pointwise(CUDNN_POINTWISE_MUL, sums, &one, row_sums);

  Node &raw = scores(), &scaled = scores(), &shifted = scores();
  graph.matmul(query, key, raw);
  graph.pointwise(CUDNN_POINTWISE_MUL, raw, &scale, scaled);
  graph.pointwise(CUDNN_POINTWISE_SUB, scaled, &logsumexp, shifted);
  Node &row = scores(CUDNN_DATA_INT32), &column = scores(CUDNN_DATA_INT32),
       &seen = scores(CUDNN_DATA_BOOLEAN);
  graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, shifted, nullptr, row, nullptr, CUDNN_DATA_FLOAT, 2);
  graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, shifted, nullptr, column, nullptr, CUDNN_DATA_FLOAT, 3);
  graph.pointwise(CUDNN_POINTWISE_CMP_GE, row, &column, seen, nullptr, CUDNN_DATA_BOOLEAN);
  Node &masked = scores(), &probabilities = scores();
  graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, shifted, &hidden, masked, &seen);
  graph.pointwise(CUDNN_POINTWISE_EXP, masked, nullptr, probabilities);

  // A head of keys and values has the sum over its query heads.
  const auto into_keys = [&](Node& left, const Node& right, const Node& result) {
    if (kv_heads == count) return graph.matmul(left, right, result);
    Node& of_each = graph.between(type, {batch, count, length, width});
    graph.matmul(left, right, of_each);
    graph.sum(of_each, result);
  };
  Node& probabilities_turned = graph.between(type, square, square_turned);
  graph.transpose(probabilities, probabilities_turned);
  into_keys(probabilities_turned, d_output, d_value);

  Node &d_probabilities = scores(), &centred = scores(), &d_shifted = scores(), &d_scores = scores();
  graph.matmul(d_output, value, d_probabilities);
  graph.pointwise(CUDNN_POINTWISE_SUB, d_probabilities, &row_sums, centred);
  graph.pointwise(CUDNN_POINTWISE_MUL, centred, &probabilities, d_shifted);
  graph.pointwise(CUDNN_POINTWISE_MUL, d_shifted, &scale, d_scores);
  Node& d_scores_turned = graph.between(type, square, square_turned);
  graph.transpose(d_scores, d_scores_turned);
  into_keys(d_scores_turned, query, d_key);

  // Straight into the output: a sum in memory between blocks is what would add in their order of arrival.
  Node& key_rows = graph.between(CUDNN_DATA_FLOAT, {batch, kv_heads, length, width},
                                 {problem.key[4], problem.key[5], problem.key[6], problem.key[7]});
  graph.transpose(key, key_rows);
  graph.matmul(d_scores, key_rows, d_query);
  return {query.uid, key.uid,     value.uid,    output.uid, d_output.uid, logsumexp.uid, d_query.uid,
          d_key.uid, d_value.uid, row_sums.uid, scale.uid,  one.uid,      hidden.uid};
}

class Plan {
 public:
  /// Nothing where no engine takes the graph.
  static std::unique_ptr<Plan> make(const Problem& problem, cudnnHandle_t handle) {
    auto plan = std::unique_ptr<Plan>(new Plan);
    plan->names_ = describe(plan->graph_, problem);
    plan->whole_.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, plan->graph_.operations())
        .set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
    if (plan->whole_.try_finalize() != CUDNN_STATUS_SUCCESS) return nullptr;
    plan->heuristics_.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, plan->whole_)
        .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
    if (plan->heuristics_.try_finalize() != CUDNN_STATUS_SUCCESS) return nullptr;
    return plan->take_first(handle) ? std::move(plan) : nullptr;
  }

  const Names& names() const { return names_; }

  void run(cudnnHandle_t handle, const std::vector<int64_t>& uids, const std::vector<void*>& pointers) const {
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
  Plan() = default;

  /// The first proposal that can be built and does not say of itself that its bits vary.
  bool take_first(cudnnHandle_t handle) {
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
      if (bits_vary(proposal)) continue;
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
  Names names_{};
  Descriptor whole_{CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR};
  Descriptor heuristics_{CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR};
  std::unique_ptr<Descriptor> plan_;
  int64_t workspace_ = 0;
};

/// The plan of a problem; nullptr: there is none. By thread, since plans must not run on two at once.
const Plan* plan_of(const Problem& problem, cudnnHandle_t handle) {
  thread_local std::map<Problem, std::unique_ptr<Plan>> plans;
  const auto found = plans.find(problem);
  if (found != plans.end()) return found->second.get();
  return plans.emplace(problem, Plan::make(problem, handle)).first->second.get();
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
              const AttentionPass& pass) {
  const at::Tensor query = part.queries(pass.query), key = part.key_heads(pass.key),
                   value = part.key_heads(pass.value), output = part.queries(pass.output),
                   d_out = part.queries(d_output), d_query = part.queries(gradients.query),
                   d_key = part.key_heads(gradients.key), d_value = part.key_heads(gradients.value);
  const at::Tensor logsumexp = part.queries(pass.logsumexp).contiguous();
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  const Plan* const plan = plan_of(
      {sizes_of(query), sizes_of(key), sizes_of(value), sizes_of(output), sizes_of(d_out), sizes_of(d_query),
       sizes_of(d_key), sizes_of(d_value), query.scalar_type() == at::kBFloat16, query.get_device()},
      handle);
  if (plan == nullptr) return false;
  const at::Tensor row_sums = at::empty_like(logsumexp);
  float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  float one = 1.0f, hidden = std::numeric_limits<float>::lowest();
  const Names& names = plan->names();
  plan->run(handle,
            {names.query, names.key, names.value, names.output, names.d_output, names.logsumexp,
             names.d_query, names.d_key, names.d_value, names.row_sums, names.scale, names.one, names.hidden},
            {query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(), d_out.data_ptr(),
             logsumexp.data_ptr(), d_query.data_ptr(), d_key.data_ptr(), d_value.data_ptr(),
             row_sums.data_ptr(), &scale, &one, &hidden});
  return true;
}

}  // namespace

bool ordered_attention_backward(AttentionGradients& gradients, const at::Tensor& d_output,
                                const AttentionPass& pass) {
  const int64_t batch = pass.query.size(0), kv_heads = pass.key.size(1), length = pass.query.size(2);
  const int64_t group = pass.query.size(1) / kv_heads;
  const int64_t bytes = group * length * length * static_cast<int64_t>(pass.query.element_size());
  const int64_t fit = std::max<int64_t>(1, kScoreBytes / bytes);  // heads of keys at a time
  const int64_t keys = std::min(fit, kv_heads),
                sequences = keys < kv_heads ? 1 : std::min(fit / kv_heads, batch);
  for (int64_t first = 0; first < batch; first += sequences) {
    for (int64_t first_key = 0; first_key < kv_heads; first_key += keys) {
      const Part part{first, std::min(sequences, batch - first), first_key,
                      std::min(keys, kv_heads - first_key), group};
      if (!run_part(part, gradients, d_output, pass)) {
        TRIREME_CHECK(first == 0 && first_key == 0, "[kernels.cudnn_attention] no plan for the last part");
        return false;
      }
    }
  }
  return true;
}

}  // namespace trireme::kernels
