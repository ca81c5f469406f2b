// The factor map of each operation: those that work element by element, reduce, or move elements.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/factor_maps.h"

namespace trireme::plan::maps {
namespace {

/// The shape of several operands that are repeated along dimensions of size 1 or that they do not have.
Shape broadcast(const Call& call) {
  Shape whole;
  for (const TensorType& type : call.inputs) {
    Shape shape = type.shape;
    if (shape.size() > whole.size()) whole.insert(whole.begin(), shape.size() - whole.size(), 1);
    shape.insert(shape.begin(), whole.size() - shape.size(), 1);
    for (size_t dim = 0; dim < whole.size(); ++dim) {
      call.require(whole[dim] == shape[dim] || whole[dim] == 1 || shape[dim] == 1,
                   "shapes must be equal, or 1 where an operand is repeated");
      if (whole[dim] == 1) whole[dim] = shape[dim];
    }
  }
  return whole;
}

/// Factors of `shape`, whose last dimensions are those of `whole`.
Dims aligned(const Shape& shape, const Shape& whole) {
  const size_t before = whole.size() - shape.size();
  Dims dims = numbered(std::ssize(shape), static_cast<int64_t>(before));
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    if (shape[dim] != whole[dim + before]) dims[dim] = kWhole;
  }
  return dims;
}

}  // namespace

std::string types_text(const Types& types) {
  std::vector<std::string> words;
  for (const TensorType& type : types) words.push_back(to_text(type));
  return join(words, ", ");
}

Dims numbered(int64_t count, int64_t from) {
  Dims dims(static_cast<size_t>(count));
  std::iota(dims.begin(), dims.end(), from);
  return dims;
}

FactorMap elementwise(const TensorType& type, TensorDtype dtype) {
  const Dims dims = numbered(std::ssize(type.shape));
  return {.results = {{type.shape, dtype}}, .inputs = {dims}, .outputs = {dims}, .factors = std::ssize(dims)};
}

FactorMap repeated(const Call& call, TensorDtype dtype) {
  const Shape whole = broadcast(call);
  FactorMap map{.results = {{whole, dtype}}, .factors = std::ssize(whole)};
  for (const TensorType& type : call.inputs) map.inputs.push_back(aligned(type.shape, whole));
  map.outputs = {numbered(map.factors)};
  return map;
}

namespace {

FactorMap binary(const Call& call) {
  call.require_same_dtype();
  const bool compares = call.op >= Op::kEq && call.op <= Op::kGe;
  if (!compares) call.require(call.in(0).dtype != TensorDtype::kBool, "bool has no arithmetic; cast it");
  if (call.op == Op::kDiv) call.require_floating(0);
  FactorMap map = repeated(call, compares ? TensorDtype::kBool : call.in(0).dtype);
  if (call.op == Op::kAdd || call.op == Op::kSub) map.linear = {{0, 1}};
  if (call.op == Op::kMul) map.linear = {{0}, {1}};
  if (call.op == Op::kDiv) map.linear = {{0}};
  return map;
}

FactorMap where(const Call& call) {
  call.require(call.in(0).dtype == TensorDtype::kBool, "the first operand must be bool");
  call.require(call.in(1).dtype == call.in(2).dtype, "values must have one dtype; cast one");
  FactorMap map = repeated(call, call.in(1).dtype);
  map.linear = {{1, 2}};
  return map;
}

FactorMap unary(const Call& call) {
  const bool keeps_whole_numbers = call.op == Op::kNeg || call.op == Op::kAbs || call.op == Op::kSquare;
  if (!keeps_whole_numbers) call.require_floating(0);
  call.require(call.in(0).dtype != TensorDtype::kBool, "bool has no arithmetic; cast it");
  const double p = call.attributes.real[0];
  call.require(call.op != Op::kDropout || (p >= 0.0 && p < 1.0), "p is {}; give 0 up to below 1", p);
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  if (call.op == Op::kNeg || call.op == Op::kScale || call.op == Op::kDropout) map.linear = {{0}};
  return map;
}

TensorDtype dtype_of(const Call& call, int64_t number) {
  call.require(0 <= number && number < std::ssize(kNames<TensorDtype>), "there is no dtype {}", number);
  return static_cast<TensorDtype>(number);
}

FactorMap cast(const Call& call) {
  return elementwise(call.in(0), dtype_of(call, call.attributes.whole[0]));
}

FactorMap created(const Call& call) {
  const bool counts = call.op == Op::kArange;
  const auto items = call.attributes.items();
  const Shape shape = counts ? Shape{call.attributes.whole[0]} : Shape(items.begin(), items.end());
  call.require(checked_numel(shape).has_value(), "shape ({}) has a negative dimension or too many elements",
               fmt::join(shape, ", "));
  const TensorDtype dtype = counts ? TensorDtype::kInt64 : dtype_of(call, call.attributes.whole[0]);
  call.require(call.op != Op::kRandn || is_floating(dtype), "random numbers are floating, not {}", dtype);
  const Dims dims = numbered(std::ssize(shape));
  return {.results = {{shape, dtype}}, .outputs = {dims}, .factors = std::ssize(dims)};
}

/// Sums may be shared out along what they sum over, the largest of values may not: a placement is a sum.
FactorMap reduced(const Call& call) {
  const bool sums = call.op == Op::kSum || call.op == Op::kMean, keeps = call.attributes.whole[0] != 0;
  if (call.op == Op::kMean) call.require_floating(0);
  call.require(call.in(0).dtype != TensorDtype::kBool, "bool has no arithmetic; cast it");
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  std::vector<bool> gone(call.in(0).shape.size(), call.attributes.listed == 0);
  for (const int64_t number : call.attributes.items()) {
    const auto dim = static_cast<size_t>(call.dim(number, call.rank(0)));
    call.require(!gone[dim], "dimension {} is named twice", dim);
    gone[dim] = true;
  }
  Shape& shape = map.results[0].shape;
  for (size_t dim = gone.size(); dim-- > 0;) {
    if (!gone[dim]) continue;
    if (!sums) {
      call.require(shape[dim] > 0, "there is nothing along dimension {}", dim);
      map.inputs[0][dim] = kWhole;
    }
    shape[dim] = 1;
    map.outputs[0][dim] = kWhole;
    if (keeps) continue;
    shape.erase(shape.begin() + static_cast<int64_t>(dim));
    map.outputs[0].erase(map.outputs[0].begin() + static_cast<int64_t>(dim));
  }
  if (sums) map.linear = {{0}};
  return map;
}

FactorMap transposed(const Call& call) {
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const auto a = static_cast<size_t>(call.dim(call.attributes.whole[0], call.rank(0))),
             b = static_cast<size_t>(call.dim(call.attributes.whole[1], call.rank(0)));
  std::swap(map.results[0].shape[a], map.results[0].shape[b]);
  std::swap(map.outputs[0][a], map.outputs[0][b]);
  map.linear = {{0}};
  return map;
}

/// The shape that is asked for, with what is left in the place of -1.
Shape asked_shape(const Call& call) {
  const auto items = call.attributes.items();
  Shape shape(items.begin(), items.end());
  const auto open = std::ranges::find(shape, -1);
  const int64_t elements = checked_numel(call.in(0).shape).value_or(-1);
  if (open != shape.end()) {
    *open = 1;
    const int64_t others = checked_numel(shape).value_or(0);
    call.require(others > 0 && elements % others == 0, "({}) has no place for {} elements",
                 fmt::join(items, ", "), elements);
    *open = elements / others;
  }
  call.require(checked_numel(shape) == elements, "({}) has other than {} elements", fmt::join(shape, ", "),
               elements);
  return shape;
}

/// Dimensions are cut into groups with as many elements on both sides; in a group the outermost of each side
/// is one factor, which ranks must share out equally unless the group is that one dimension.
FactorMap reshaped(const Call& call) {
  const Shape &from = call.in(0).shape, to = asked_shape(call);
  FactorMap map{.results = {{to, call.in(0).dtype}},
                .inputs = {Dims(from.size(), kWhole)},
                .outputs = {Dims(to.size(), kWhole)}};
  map.linear = {{0}};
  if (checked_numel(from) == 0) return map;
  size_t a = 0, b = 0;
  while (a < from.size() && b < to.size()) {
    if (from[a] == 1 && to[b] != 1) {
      ++a;
      continue;
    }
    if (to[b] == 1 && from[a] != 1) {
      ++b;
      continue;
    }
    const size_t first_a = a, first_b = b;
    int64_t left = from[a++], right = to[b++];
    while (left != right) (left < right ? left : right) *= left < right ? from[a++] : to[b++];
    map.inputs[0][first_a] = map.outputs[0][first_b] = map.factors;
    if (from[first_a] != to[first_b]) map.even.push_back(map.factors);
    ++map.factors;
  }
  return map;
}

FactorMap unsqueezed(const Call& call) {
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const int64_t dim = call.dim(call.attributes.whole[0], call.rank(0) + 1);
  map.results[0].shape.insert(map.results[0].shape.begin() + dim, 1);
  map.outputs[0].insert(map.outputs[0].begin() + dim, kWhole);
  map.linear = {{0}};
  return map;
}

FactorMap squeezed(const Call& call) {
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const int64_t dim = call.dim(call.attributes.whole[0], call.rank(0));
  call.require(call.in(0).shape[static_cast<size_t>(dim)] == 1, "dimension {} has not the size 1", dim);
  map.inputs[0][static_cast<size_t>(dim)] = kWhole;
  map.results[0].shape.erase(map.results[0].shape.begin() + dim);
  map.outputs[0].erase(map.outputs[0].begin() + dim);
  map.linear = {{0}};
  return map;
}

FactorMap sliced(const Call& call) {
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const auto dim = static_cast<size_t>(call.dim(call.attributes.whole[0], call.rank(0)));
  const int64_t begin = call.attributes.whole[1], end = call.attributes.whole[2];
  int64_t& size = map.results[0].shape[dim];
  call.require(0 <= begin && begin <= end && end <= size, "{} to {} is outside a dimension of {}", begin, end,
               size);
  map.linear = {{0}};
  if (end - begin == size) return map;
  size = end - begin;
  map.inputs[0][dim] = map.outputs[0][dim] = kWhole;
  return map;
}

FactorMap joined(const Call& call) {
  call.require_same_dtype();
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const auto dim = static_cast<size_t>(call.dim(call.attributes.whole[0], call.rank(0)));
  map.inputs[0][dim] = map.outputs[0][dim] = kWhole;
  int64_t& size = map.results[0].shape[dim];
  std::vector<int64_t> all = {0};
  for (size_t index = 1; index < call.inputs.size(); ++index) {
    const Shape& shape = call.in(index).shape;
    call.require(shape.size() == map.results[0].shape.size(), "operands have other numbers of dimensions");
    for (size_t other = 0; other < shape.size(); ++other)
      call.require(other == dim || shape[other] == map.results[0].shape[other],
                   "operands differ in dimension {}, along which they are not joined", other);
    size += shape[dim];
    map.inputs.push_back(map.inputs[0]);
    all.push_back(static_cast<int64_t>(index));
  }
  map.linear = {all};
  return map;
}

/// Neighbouring parts along a dimension, one a result.
FactorMap split_up(const Call& call) {
  FactorMap map = elementwise(call.in(0), call.in(0).dtype);
  const auto dim = static_cast<size_t>(call.dim(call.attributes.whole[0], call.rank(0)));
  const auto sizes = call.attributes.items();
  call.require(!sizes.empty() && std::ssize(sizes) <= kMostOpResults, "give 1 to {} sizes", kMostOpResults);
  const TensorType whole = map.results[0];
  int64_t all = 0;
  for (const int64_t size : sizes) {
    call.require(size >= 0, "size {} is negative", size);
    call.require(size <= whole.shape[dim] - all, "sizes add up to more than {}", whole.shape[dim]);
    all += size;
  }
  call.require(all == whole.shape[dim], "sizes add up to {}, not to {}", all, whole.shape[dim]);
  map.inputs[0][dim] = map.outputs[0][dim] = kWhole;
  map.results.assign(sizes.size(), whole);
  map.outputs.assign(sizes.size(), map.outputs[0]);
  for (size_t part = 0; part < sizes.size(); ++part) map.results[part].shape[dim] = sizes[part];
  map.linear = {{0}};
  return map;
}

/// The maps of the operations up to `last`, from behind those of the line before.
struct MapsUpTo {
  Op last;
  FactorMap (*map)(const Call& call);
};
constexpr MapsUpTo kFactorMaps[] = {{Op::kArange, created},      {Op::kGe, binary},
                                    {Op::kSilu, unary},          {Op::kCast, cast},
                                    {Op::kDropout, unary},       {Op::kWhere, where},
                                    {Op::kMin, reduced},         {Op::kTranspose, transposed},
                                    {Op::kReshape, reshaped},    {Op::kUnsqueeze, unsqueezed},
                                    {Op::kSqueeze, squeezed},    {Op::kSlice, sliced},
                                    {Op::kSplit, split_up},      {Op::kCat, joined},
                                    {Op::kMatmul, multiplied},   {Op::kLinear, linear},
                                    {Op::kEmbedding, looked_up}, {Op::kAttention, attended},
                                    {Op::kLogSoftmax, softened}, {Op::kRmsNorm, normed},
                                    {Op::kMseLoss, mean_loss},   {Op::kAdamw, updated}};

}  // namespace

FactorMap map_of(const Call& call) {
  const auto found =
      std::ranges::find_if(kFactorMaps, [&call](const MapsUpTo& maps) { return call.op <= maps.last; });
  TRIREME_CHECK(found != std::end(kFactorMaps), "[plan.ops] {} has no factor map", call.op);
  return found->map(call);
}

}  // namespace trireme::plan::maps

namespace trireme::plan {

FactorMap factor_map(Op op, const std::vector<TensorType>& inputs, const OpAttributes& attributes) {
  const OpRecord& record = record_of(op);
  const int64_t count = std::ssize(inputs);
  if (count < record.least_inputs || count > record.most_inputs) {
    throw ConfigError("[plan.ops] {} has {} operands; it takes {}", op, count,
                      record.least_inputs == record.most_inputs
                          ? std::to_string(record.least_inputs)
                          : fmt::format("{} to {}", record.least_inputs, record.most_inputs));
  }
  const maps::Call call{op, inputs, attributes};
  FactorMap map = maps::map_of(call);
  constexpr int64_t kLargestDim = int64_t{1} << 48;    // sums of a few still fit 63 bits,
  constexpr int64_t kMostElements = int64_t{1} << 56;  // and so do bytes with padding for ranks
  for (const TensorType& type : map.results) {
    const bool fits = std::ranges::all_of(type.shape, [](int64_t size) { return size <= kLargestDim; });
    const auto numel = checked_numel(type.shape);
    call.require(fits && numel && *numel <= kMostElements, "the result would be {}, which is too large",
                 to_text(type));
  }
  return map;
}

}  // namespace trireme::plan
