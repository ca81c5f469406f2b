#pragma once
// Operations on small arrays of numbers, element by element: what placements and factor maps are measured
// against. A rank that has a part of a tensor computes with the same code.
#include <cmath>
#include <functional>
#include <stdexcept>
#include <vector>

#include "trireme/plan/op_rules.h"

namespace trireme::plan::test {

using Index = std::vector<int64_t>;

struct Dense {
  Shape shape;
  std::vector<double> data;

  explicit Dense(Shape dims = {}) : shape(std::move(dims)), data(static_cast<size_t>(numel()), 0.0) {}
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
  size_t place(const Index& index) const {
    int64_t at = 0;
    for (size_t dim = 0; dim < shape.size(); ++dim) at = at * shape[dim] + index[dim];
    return static_cast<size_t>(at);
  }
  double& operator[](const Index& index) { return data[place(index)]; }
  double operator[](const Index& index) const { return data[place(index)]; }
};

/// Calls body with every index of a shape, in row-major order.
inline void for_each(const Shape& shape, const std::function<void(const Index&)>& body) {
  const int64_t count = Dense(shape).numel();
  for (int64_t flat = 0; flat < count; ++flat) {
    Index index(shape.size());
    int64_t rest = flat;
    for (size_t dim = shape.size(); dim-- > 0; rest /= shape[dim]) index[dim] = rest % shape[dim];
    body(index);
  }
}

/// Where a rank's part of a tensor begins in the whole, and how large that is.
struct Part {
  Shape begin, whole;
};

/// A call as one rank sees it: its parts of the operands, where they lie, and the shapes of its results.
struct DenseCall {
  Op op;
  const OpAttributes& attributes;
  const std::vector<Dense>& in;
  const std::vector<Part>&parts, &result_parts;
  std::vector<Dense> out;  ///< zeros, of the right shapes
};

/// The element of a repeated operand for an index of the result.
inline double repeated(const Dense& tensor, const Index& index) {
  Index own(index.end() - std::ssize(tensor.shape), index.end());
  for (size_t dim = 0; dim < own.size(); ++dim) own[dim] = tensor.shape[dim] == 1 ? 0 : own[dim];
  return tensor[own];
}

inline double binary(Op op, double a, double b) {
  switch (op) {
    case Op::kAdd:
      return a + b;
    case Op::kSub:
      return a - b;
    case Op::kMul:
      return a * b;
    case Op::kDiv:
      return a / b;
    case Op::kMaximum:
      return std::max(a, b);
    case Op::kMinimum:
      return std::min(a, b);
    case Op::kEq:
      return a == b;
    case Op::kNe:
      return a != b;
    case Op::kLt:
      return a < b;
    case Op::kLe:
      return a <= b;
    case Op::kGt:
      return a > b;
    case Op::kGe:
      return a >= b;
    default:
      throw std::logic_error("no binary operation");
  }
}

inline double unary(Op op, double x, const OpAttributes& attributes) {
  switch (op) {
    case Op::kNeg:
      return -x;
    case Op::kAbs:
      return std::abs(x);
    case Op::kSquare:
      return x * x;
    case Op::kScale:
      return attributes.real[0] * x;
    case Op::kShift:
      return attributes.real[0] + x;
    case Op::kExp:
      return std::exp(x);
    case Op::kLog:
      return std::log(x);
    case Op::kSqrt:
      return std::sqrt(x);
    case Op::kRsqrt:
      return 1 / std::sqrt(x);
    case Op::kTanh:
      return std::tanh(x);
    case Op::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Op::kRelu:
      return std::max(x, 0.0);
    case Op::kGelu:
      return x * std::erfc(-x / std::sqrt(2.0)) / 2;
    case Op::kSilu:
      return x / (1 + std::exp(-x));
    case Op::kCast:
      return x;
    default:
      throw std::logic_error("no unary operation");
  }
}

/// The place of an element in the whole tensor.
inline int64_t place_in_whole(const Index& index, const Part& part) {
  int64_t at = 0;
  for (size_t dim = 0; dim < index.size(); ++dim) at = at * part.whole[dim] + part.begin[dim] + index[dim];
  return at;
}

/// A number that depends on seed and place alone.
inline double random_at(int64_t seed, int64_t place) {
  return std::fmod(std::abs(std::sin(static_cast<double>(12.9898 * (place + 1) + 78.233 * seed)) * 43758.5),
                   1.0);
}

inline size_t counted_dim(int64_t dim, size_t dims) {
  return static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(dims) : dim);
}

/// Sums, means, largest and smallest values.
inline void reduce(DenseCall& call) {
  const Dense& x = call.in[0];
  std::vector<bool> gone(x.shape.size(), call.attributes.listed == 0);
  for (const int64_t dim : call.attributes.items()) gone[counted_dim(dim, gone.size())] = true;
  double count = 1;
  for (size_t dim = 0; dim < gone.size(); ++dim)
    if (gone[dim]) count *= static_cast<double>(call.parts[0].whole[dim]);
  std::vector<bool> seen(call.out[0].data.size(), false);
  for_each(x.shape, [&](const Index& index) {
    Index to;
    for (size_t dim = 0; dim < gone.size(); ++dim) {
      if (!gone[dim] || call.attributes.whole[0] != 0) to.push_back(gone[dim] ? 0 : index[dim]);
    }
    double& result = call.out[0][to];
    const size_t at = call.out[0].place(to);
    if (call.op == Op::kMax || call.op == Op::kMin) {
      result = !seen[at]             ? x[index]
               : call.op == Op::kMax ? std::max(result, x[index])
                                     : std::min(result, x[index]);
      seen[at] = true;
    } else {
      result += x[index] / (call.op == Op::kMean ? count : 1);
    }
  });
}

inline void multiply(DenseCall& call) {
  const bool is_linear = call.op == Op::kLinear;
  const Dense &a = call.in[0], &b = call.in[1];
  for_each(call.out[0].shape, [&](const Index& index) {
    double sum = call.in.size() > 2 ? call.in[2].data[static_cast<size_t>(index.back())] : 0;
    for (int64_t k = 0; k < a.shape.back(); ++k) {
      Index left = index, right = index;
      left.back() = k;
      if (is_linear) {
        sum += a[left] * b[{index.back(), k}];
        continue;
      }
      right[right.size() - 2] = k;
      // Dimensions before the last two are repeated.
      Index own_left(left.end() - std::ssize(a.shape), left.end()),
          own_right(right.end() - std::ssize(b.shape), right.end());
      for (size_t dim = 0; dim + 2 < own_left.size(); ++dim)
        own_left[dim] = a.shape[dim] == 1 ? 0 : own_left[dim];
      for (size_t dim = 0; dim + 2 < own_right.size(); ++dim)
        own_right[dim] = b.shape[dim] == 1 ? 0 : own_right[dim];
      sum += a[own_left] * b[own_right];
    }
    call.out[0][index] = sum;
  });
}

inline void attend(DenseCall& call) {
  const Dense &q = call.in[0], &k = call.in[1], &v = call.in[2];
  const int64_t share = k.shape[1] > 0 ? q.shape[1] / k.shape[1] : 1;
  for_each(call.out[0].shape, [&](const Index& index) {
    double all = 0, sum = 0;
    for (int64_t s = 0; s < k.shape[2]; ++s) {
      if (call.attributes.whole[0] != 0 && s > index[2]) continue;
      double score = 0;
      for (int64_t d = 0; d < q.shape[3]; ++d)
        score += q[{index[0], index[1], index[2], d}] * k[{index[0], index[1] / share, s, d}];
      const double weight = std::exp(score * call.attributes.real[0]);
      all += weight;
      sum += weight * v[{index[0], index[1] / share, s, index[3]}];
    }
    call.out[0][index] = sum / all;
  });
}

/// Softmax and its logarithm along a dimension; norms over the last one.
inline void normalise(DenseCall& call) {
  const Dense& x = call.in[0];
  const bool soft = call.op == Op::kSoftmax || call.op == Op::kLogSoftmax;
  const size_t dim = soft ? counted_dim(call.attributes.whole[0], x.shape.size()) : x.shape.size() - 1;
  for_each(x.shape, [&](const Index& index) {
    double exponents = 0, sum = 0, squares = 0;
    for (int64_t i = 0; i < x.shape[dim]; ++i) {
      Index other = index;
      other[dim] = i;
      exponents += std::exp(x[other]), sum += x[other], squares += x[other] * x[other];
    }
    const double n = static_cast<double>(x.shape[dim]), mean = call.op == Op::kLayerNorm ? sum / n : 0;
    double result = soft ? std::exp(x[index]) / exponents
                         : (x[index] - mean) / std::sqrt(squares / n - mean * mean + call.attributes.real[0]);
    if (call.op == Op::kLogSoftmax) result = std::log(result);
    if (call.in.size() > 1) result *= call.in[1].data[static_cast<size_t>(index[dim])];
    if (call.in.size() > 2) result += call.in[2].data[static_cast<size_t>(index[dim])];
    call.out[0][index] = result;
  });
}

inline void lose(DenseCall& call) {
  const Dense& x = call.in[0];
  double count = 1;
  for (const int64_t size : call.parts[0].whole) count *= static_cast<double>(size);
  double& loss = call.out[0].data[0];
  if (call.op == Op::kMseLoss) {
    for (size_t i = 0; i < x.data.size(); ++i) loss += std::pow(x.data[i] - call.in[1].data[i], 2) / count;
    return;
  }
  for (int64_t row = 0; row < x.shape[0]; ++row) {
    double all = 0;
    for (int64_t word = 0; word < x.shape[1]; ++word) all += std::exp(x[{row, word}]);
    const double right = x[{row, static_cast<int64_t>(call.in[1][{row}])}];
    loss += (std::log(all) - right) / static_cast<double>(call.parts[0].whole[0]);
  }
}

/// What is written comes as results, in the order of the operands.
inline void update(DenseCall& call) {
  const auto& real = call.attributes.real;
  for (size_t i = 0; i < call.in[0].data.size(); ++i) {
    const double p = call.in[0].data[i], g = call.in[1].data[i];
    double& result = call.out[0].data[i];
    if (call.op == Op::kAddInto) result = p + g;
    if (call.op == Op::kCopyInto) result = g;
    if (call.op == Op::kSgd) {
      double step = g + real[2] * p;
      if (call.in.size() > 2) step = call.out[1].data[i] = real[1] * call.in[2].data[i] + step;
      result = p - real[0] * step;
    }
    if (call.op != Op::kAdamw) continue;
    const double m = call.out[1].data[i] = real[1] * call.in[2].data[i] + (1 - real[1]) * g,
                 v = call.out[2].data[i] = real[2] * call.in[3].data[i] + (1 - real[2]) * g * g;
    const auto step = static_cast<double>(call.attributes.whole[0]);
    const double root = std::sqrt(v / (1 - std::pow(real[2], step))) + real[3];
    result = p * (1 - real[0] * real[4]) - real[0] * m / (1 - std::pow(real[1], step)) / root;
  }
}

/// Moves of elements: transposes, slices, joins.
inline void rearrange(DenseCall& call) {
  const size_t dims = call.in[0].shape.size();
  const int64_t asked = call.attributes.whole[0];
  int64_t before = 0;
  for (size_t part = 0; part < call.out.size(); ++part) {
    Dense& out = call.out[part];
    for_each(out.shape, [&](const Index& index) {
      Index from = index;
      size_t operand = 0;
      if (call.op == Op::kTranspose)
        std::swap(from[counted_dim(asked, dims)], from[counted_dim(call.attributes.whole[1], dims)]);
      if (call.op == Op::kUnsqueeze)
        from.erase(from.begin() + static_cast<int64_t>(counted_dim(asked, dims + 1)));
      if (call.op == Op::kSqueeze)
        from.insert(from.begin() + static_cast<int64_t>(counted_dim(asked, dims)), 0);
      if (call.op == Op::kSlice && call.parts[0].whole[counted_dim(asked, dims)] !=
                                       call.result_parts[0].whole[counted_dim(asked, dims)])
        from[counted_dim(asked, dims)] += call.attributes.whole[1];
      if (call.op == Op::kSplit) from[counted_dim(asked, dims)] += before;
      if (call.op == Op::kCat) {
        int64_t& at = from[counted_dim(asked, dims)];
        for (; at >= call.in[operand].shape[counted_dim(asked, dims)]; ++operand)
          at -= call.in[operand].shape[counted_dim(asked, dims)];
      }
      out[index] = call.in[operand][from];
    });
    if (call.op == Op::kSplit) before += out.shape[counted_dim(asked, dims)];
  }
}

inline void run(DenseCall& call) {
  Dense* const out = call.out.empty() ? nullptr : &call.out[0];
  switch (call.op) {
    case Op::kFull:
      out->data.assign(out->data.size(), call.attributes.real[0]);
      return;
    case Op::kRandn:
    case Op::kArange:
      for_each(out->shape, [&](const Index& index) {
        const int64_t place = place_in_whole(index, call.result_parts[0]);
        (*out)[index] =
            call.op == Op::kArange ? static_cast<double>(place) : random_at(call.attributes.whole[1], place);
      });
      return;
    case Op::kDropout:
      for_each(out->shape, [&](const Index& index) {
        const double p = call.attributes.real[0];
        const bool stays = random_at(call.attributes.whole[0], place_in_whole(index, call.parts[0])) >= p;
        (*out)[index] = stays ? call.in[0][index] / (1 - p) : 0;
      });
      return;
    case Op::kWhere:
      for_each(out->shape, [&](const Index& index) {
        (*out)[index] =
            repeated(call.in[0], index) != 0 ? repeated(call.in[1], index) : repeated(call.in[2], index);
      });
      return;
    case Op::kEmbedding:
      for_each(out->shape, [&](const Index& index) {
        const Index word(index.begin(), index.end() - 1);
        const int64_t row = static_cast<int64_t>(call.in[0][word]) - call.parts[1].begin[0];
        if (0 <= row && row < call.in[1].shape[0]) (*out)[index] = call.in[1][{row, index.back()}];
      });
      return;
    case Op::kReshape:
      out->data = call.in[0].data;
      return;
    case Op::kSum:
    case Op::kMean:
    case Op::kMax:
    case Op::kMin:
      return reduce(call);
    case Op::kMatmul:
    case Op::kLinear:
      return multiply(call);
    case Op::kAttention:
      return attend(call);
    case Op::kSoftmax:
    case Op::kLogSoftmax:
    case Op::kLayerNorm:
    case Op::kRmsNorm:
      return normalise(call);
    case Op::kCrossEntropy:
    case Op::kMseLoss:
      return lose(call);
    case Op::kAddInto:
    case Op::kCopyInto:
    case Op::kSgd:
    case Op::kAdamw:
      return update(call);
    case Op::kTranspose:
    case Op::kUnsqueeze:
    case Op::kSqueeze:
    case Op::kSlice:
    case Op::kSplit:
    case Op::kCat:
      return rearrange(call);
    default:
      break;
  }
  for_each(out->shape, [&](const Index& index) {
    (*out)[index] = call.in.size() == 2
                        ? binary(call.op, repeated(call.in[0], index), repeated(call.in[1], index))
                        : unary(call.op, call.in[0][index], call.attributes);
  });
}

}  // namespace trireme::plan::test
