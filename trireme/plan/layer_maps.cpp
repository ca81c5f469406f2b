// The factor maps of layers, losses and optimizers.
#include <fmt/format.h>

#include <algorithm>

#include "trireme/plan/factor_maps.h"

namespace trireme::plan::maps {

/// (..., m, k) x (..., k, n), with the dimensions before the last two repeated as in additions.
FactorMap multiplied(const Call& call) {
  call.require_same_dtype();
  call.require_floating(0);
  call.require(call.rank(0) >= 2 && call.rank(1) >= 2, "both operands need two dimensions or more");
  const Shape &a = call.in(0).shape, &b = call.in(1).shape;
  call.require(a.back() == b[b.size() - 2], "the first has {} columns, the second {} rows", a.back(),
               b[b.size() - 2]);
  const Types before = {{Shape(a.begin(), a.end() - 2), call.in(0).dtype},
                        {Shape(b.begin(), b.end() - 2), call.in(0).dtype}};
  FactorMap map = repeated({call.op, before, call.attributes}, call.in(0).dtype);
  const int64_t m = map.factors, k = m + 1, n = m + 2;
  map.factors += 3;
  map.inputs[0].insert(map.inputs[0].end(), {m, k});
  map.inputs[1].insert(map.inputs[1].end(), {k, n});
  map.outputs[0].insert(map.outputs[0].end(), {m, n});
  map.results[0].shape.insert(map.results[0].shape.end(), {a[a.size() - 2], b.back()});
  map.linear = {{0}, {1}};
  if (b.size() == 2) map.stay = {1};
  return map;
}

/// (..., in) with a weight (out, in) and perhaps a bias (out), as torch::nn::Linear has them.
FactorMap linear(const Call& call) {
  call.require_same_dtype();
  call.require_floating(0);
  call.require(call.rank(0) >= 1 && call.rank(1) == 2, "the weight needs two dimensions: (out, in)");
  const int64_t in = call.in(0).shape.back(), out = call.in(1).shape[0];
  call.require(call.in(1).shape[1] == in, "rows of {} do not fit a weight of {} columns", in,
               call.in(1).shape[1]);
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const int64_t k = map.factors - 1, n = map.factors++;
  map.results[0].shape.back() = out;
  map.outputs[0].back() = n;
  map.inputs.push_back({n, k});
  map.stay = {1};
  if (call.inputs.size() == 2) {
    map.linear = {{0}, {1}};
    return map;
  }
  call.require(call.in(2).shape == Shape{out}, "the bias must be ({})", out);
  map.inputs.push_back({n});
  map.added = {2};
  map.linear = {{0, 2}, {1, 2}};
  map.stay.push_back(2);
  return map;
}

/// Words (...) and a table (words, width). A rank that has some of the table's rows gives zeros for others.
FactorMap looked_up(const Call& call) {
  call.require(call.in(0).dtype == TensorDtype::kInt64, "the first operand must be int64: rows of the table");
  call.require(call.rank(1) == 2, "the table needs two dimensions");
  call.require_floating(1);
  FactorMap map = elementwise(call.in(0), call.in(1).dtype);
  const int64_t word = map.factors, width = word + 1;
  map.factors += 2;
  map.results[0].shape.push_back(call.in(1).shape[1]);
  map.inputs.push_back({word, width});
  map.outputs[0].push_back(width);
  map.linear = {{1}};
  map.stay = {1};
  return map;
}

/// Queries (batch, heads, tokens, width), keys and values with as many heads or a divisor of them.
FactorMap attended(const Call& call) {
  call.require_same_dtype();
  call.require_floating(0);
  for (size_t index = 0; index < 3; ++index)
    call.require(call.rank(index) == 4, "operands must be (batch, heads, tokens, width)");
  const Shape &q = call.in(0).shape, &k = call.in(1).shape, &v = call.in(2).shape;
  call.require(q[0] == k[0] && q[0] == v[0] && k[1] == v[1] && k[2] == v[2] && q[3] == k[3],
               "batches, widths, and heads and tokens of keys and values must be equal");
  call.require(k[1] > 0 && q[1] % k[1] == 0, "{} heads cannot share {} of keys and values", q[1], k[1]);
  const bool causal = call.attributes.whole[0] != 0;
  call.require(!causal || q[2] == k[2], "causal attention needs as many keys as queries");
  const int64_t batch = 0, head = 1, token = 2, width = 3;
  FactorMap map{.results = {{{q[0], q[1], q[2], v[3]}, call.in(0).dtype}},
                .inputs = {{batch, head, causal ? kWhole : token, kWhole},
                           {batch, head, kWhole, kWhole},
                           {batch, head, kWhole, width}},
                .outputs = {{batch, head, causal ? kWhole : token, width}},
                .factors = 4};
  if (q[1] != k[1]) map.even = {head};
  map.linear = {{2}};
  return map;
}

/// Along one dimension, which every rank needs whole.
FactorMap softened(const Call& call) {
  call.require_floating(0);
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const auto dim = static_cast<size_t>(call.dim(call.attributes.whole[0], call.rank(0)));
  map.inputs[0][dim] = map.outputs[0][dim] = kWhole;
  return map;
}

/// Over the last dimension, with a weight and perhaps a bias of its size.
FactorMap normed(const Call& call) {
  call.require_same_dtype();
  call.require_floating(0);
  call.require(call.rank(0) >= 1, "there is no dimension");
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  map.inputs[0].back() = map.outputs[0].back() = kWhole;
  for (size_t index = 1; index < call.inputs.size(); ++index) {
    call.require(call.in(index).shape == Shape{call.in(0).shape.back()}, "operand {} must be ({})", index,
                 call.in(0).shape.back());
    map.inputs.push_back({kWhole});
    map.stay.push_back(static_cast<int64_t>(index));
  }
  return map;
}

/// The mean over all rows of logits (rows, words), or over all elements of two tensors.
FactorMap mean_loss(const Call& call) {
  call.require_floating(0);
  const bool words = call.op == Op::kCrossEntropy;
  if (words) {
    call.require(call.rank(0) == 2 && call.in(1).shape == Shape{call.in(0).shape[0]},
                 "logits must be (rows, words), targets (rows)");
    call.require(call.in(1).dtype == TensorDtype::kInt64, "targets must be int64");
  } else {
    call.require_same_dtype();
    call.require(call.in(0).shape == call.in(1).shape, "shapes must be equal");
  }
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  map.results[0] = {{}, call.in(0).dtype};
  map.outputs = {{}};
  if (words) map.inputs[0][1] = kWhole;
  map.inputs.push_back(words ? Dims{0} : map.inputs[0]);
  return map;
}

/// Operand 0 and those behind operand 1 are written, each element by those in its place.
FactorMap updated(const Call& call) {
  for (const TensorType& type : call.inputs)
    call.require(type.shape == call.in(0).shape, "shapes must be equal");
  if (call.op == Op::kAddInto || call.op == Op::kCopyInto) {
    call.require_same_dtype();
  } else {
    for (size_t i = 0; i < call.inputs.size(); ++i) call.require_floating(i);
    const int64_t step = call.attributes.whole[0];
    call.require(call.op != Op::kAdamw || step >= 1, "step is {}; steps count from 1", step);
  }
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const Dims dims = map.inputs[0];
  map.inputs.assign(call.inputs.size(), dims);
  map.results.clear();
  map.outputs.clear();
  if (call.op == Op::kAddInto || call.op == Op::kCopyInto) map.linear = {{0, 1}};
  return map;
}

}  // namespace trireme::plan::maps
