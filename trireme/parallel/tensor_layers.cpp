#include "trireme/parallel/tensor_layers.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/vocabulary_part.h"
#include "trireme/parallel/box.h"
#include "trireme/parallel/kept_group.h"
#include "trireme/parallel/tensor_joint.h"
#include "trireme/tensor/redistribute.h"

namespace trireme::parallel {
namespace {

using GroupPtr = std::shared_ptr<comm::Group>;
using plan::Placed;
using plan::TensorPlacement;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// How ranks hold an activation and its gradient. Where all have the value, each has a share of the gradient.
constexpr Placed kSame = {TensorPlacement::replicate(), TensorPlacement::partial()};
constexpr Placed kOwnRows = {TensorPlacement::shard(0), TensorPlacement::shard(0)};
/// Terms of a sum, whose gradient every rank needs whole.
constexpr Placed kTerms = {TensorPlacement::partial(), TensorPlacement::replicate()};
/// The placement of what all ranks have, with a gradient that each has whole.
constexpr Placed kRepeated = {TensorPlacement::replicate(), TensorPlacement::replicate()};

const GroupPtr& checked(const GroupPtr& group, const char* layer) {
  if (group) return group;
  throw LogicError("[parallel.{}] there is no group; pass the ranks that share the layer, such as Mesh::tp",
                   layer);
}

/// For a number of heads or features, all numbers of ranks that can share it equally.
std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> found;
  for (int64_t divisor = 1; divisor <= number; ++divisor)
    if (number % divisor == 0) found.push_back(divisor);
  return found;
}

/// `what` as "out features".
void check_cut(const char* layer, const char* what, int64_t features, int64_t heads,
               const comm::Group& group) {
  if (heads > 0 && features % heads != 0) {
    throw ConfigError("[parallel.{}] {} {} are not those of {} heads; pass a multiple", layer, features, what,
                      heads);
  }
  const int64_t pieces = heads > 0 ? heads : features;
  if (pieces % group.size() == 0) return;
  throw ConfigError("[parallel.{}] {} ranks cannot share {} {} equally; numbers of ranks that can are {}",
                    layer, group.size(), pieces, heads > 0 ? "heads" : what,
                    fmt::join(divisors(pieces), ", "));
}

void check_sizes(const char* layer, int64_t in, int64_t out) {
  if (in >= 1 && out >= 1) return;
  throw ConfigError("[parallel.{}] sizes are {} and {}; pass numbers of at least 1", layer, in, out);
}

void check_words(const char* layer, int64_t words, const comm::Group& group) {
  if (words >= group.size()) return;
  throw ConfigError("[parallel.{}] {} ranks cannot share a vocabulary of {}; pass at least one word a rank",
                    layer, group.size(), words);
}

void check_features(const char* layer, const at::Tensor& x, int64_t features) {
  if (x.dim() >= 1 && x.size(-1) == features) return;
  throw LogicError("[parallel.{}] x is ({}), but must have {} features on this rank", layer,
                   fmt::join(x.sizes(), ", "), features);
}

/// The part of a parameter whose dimension `dim` is cut; the whole on a group of one.
plan::Part slice_of(const plan::Shape& whole, size_t dim, const comm::Group& group) {
  if (group.size() == 1) return {};
  plan::Part part{.whole = whole, .start = plan::Shape(whole.size(), 0)};
  part.start[dim] = plan::shard_range(whole[dim], group.size(), group.rank()).begin;
  return part;
}

/// Elements of `whole` in memory of their own; `held` is the shape of a part.
at::Tensor piece_of(const at::Tensor& whole, const plan::Part& part, const plan::Shape& held) {
  if (part.is_whole()) return whole.detach().clone();
  return box_of(whole.detach().view(part.whole), part.region(held, {})).reshape(held).clone();
}

/// (..., T, D) -> (..., T times / over, D), of the rows that a redistribution has made of its rows.
plan::Shape with_rows(at::IntArrayRef sizes, int64_t times, int64_t over) {
  plan::Shape shape = sizes.vec();
  int64_t& rows = shape[shape.size() - 2];
  rows = rows * times / over;
  return shape;
}

void check_rows(const char* layer, at::IntArrayRef sizes, const comm::Group& group) {
  if (sizes.size() >= 2 && sizes[sizes.size() - 2] % group.size() == 0) return;
  throw LogicError(
      "[parallel.{}] the rows of ({}) cannot be split over {} ranks: the last dimension but one must be a "
      "multiple; pad it, or flatten x to (rows, features)",
      layer, fmt::join(sizes, ", "), group.size());
}

at::Tensor as_rows(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

at::Tensor gathered(const at::Tensor& rows, const GroupPtr& group) {
  return tensor::redistribute(as_rows(rows), kOwnRows, kSame, group)
      .view(with_rows(rows.sizes(), group->size(), 1));
}

/// Terms that ranks have -> the sum, or this rank's rows of it.
at::Tensor summed(const at::Tensor& terms, Rows rows, const GroupPtr& group, const char* layer) {
  if (rows == Rows::kAll) return tensor::redistribute(terms, kTerms, kSame, group);
  check_rows(layer, terms.sizes(), *group);
  return tensor::redistribute(as_rows(terms), kTerms, kOwnRows, group)
      .view(with_rows(terms.sizes(), 1, group->size()));
}

/// A linear layer of all ranks' rows, of which each keeps its own for backward and gathers the rest again.
class GatheredLinear : public Function<GatheredLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const GroupPtr& group) {
    context->save_for_backward({rows, weight});
    context->saved_data["bias"] = bias.has_value();
    keep_group(*context, group);
    return at::linear(whole_of(rows, *group), weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    nn::refuse_create_graph("parallel.column_linear");
    comm::Group& group = kept_group(*context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &rows = saved[0], &weight = saved[1], &dy = grads[0];
    variable_list result(4);
    if (context->needs_input_grad(0)) {
      result[0] = tensor::redistribute(at::matmul(dy, weight), TensorPlacement::partial(),
                                       TensorPlacement::shard(0), group);
    }
    if (context->needs_input_grad(1)) result[1] = at::matmul(dy.t(), whole_of(rows, group));
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) result[2] = dy.sum(0);
    return result;
  }

 private:
  static at::Tensor whole_of(const at::Tensor& rows, comm::Group& group) {
    return tensor::redistribute(rows, TensorPlacement::shard(0), TensorPlacement::replicate(), group);
  }
};

/// Where each rank's part of a vocabulary begins, and its size, as nn::Joint takes them.
std::vector<int64_t> first_words(int64_t words, const comm::Group& group) {
  std::vector<int64_t> first;
  for (int64_t rank = 0; rank < group.size(); ++rank)
    first.push_back(plan::shard_range(words, group.size(), rank).begin);
  first.push_back(words);
  return first;
}

/// `what` as "targets". Ranks that read different batches would train on neither of them.
void check_same_batch(const char* layer, const char* what, const at::Tensor& read, comm::Group& group,
                      bool& compared) {
  if (group.size() == 1 || std::exchange(compared, true)) return;
  const at::Tensor values = read.detach().to(at::kCPU).contiguous();
  const uint64_t sizes = xxh3(values.sizes().data(), values.sizes().size() * sizeof(int64_t));
  const auto [upper, lower] = comm::in_halves(xxh3(values.const_data_ptr(), values.nbytes(), sizes));
  const auto ranks = comm::gather_scalars(group, {upper, lower});
  const auto other = std::ranges::find_if(ranks, [&](const auto& rank) { return rank != ranks.front(); });
  if (other == ranks.end()) return;
  compared = false;
  throw LogicError(
      "[parallel.{}] ranks {} and {} share the layer, but have different {}: here they are ({}); ranks of a "
      "tp "
      "group must read the same batch, that of Mesh::dp_rank",
      layer, group.ranks().front(), group.ranks()[static_cast<size_t>(other - ranks.begin())], what,
      fmt::join(read.sizes(), ", "));
}

}  // namespace

SplitRows::SplitRows(GroupPtr group) : group_(checked(group, "split_rows")) {}

at::Tensor SplitRows::forward(const at::Tensor& x) const {
  check_rows("split_rows", x.sizes(), *group_);
  return tensor::redistribute(as_rows(x), kSame, kOwnRows, group_)
      .view(with_rows(x.sizes(), 1, group_->size()));
}

at::Tensor SplitRows::join(const at::Tensor& rows) const {
  if (rows.dim() < 2) {
    throw LogicError("[parallel.split_rows] ({}) has no rows and features; pass what split layers give",
                     fmt::join(rows.sizes(), ", "));
  }
  return gathered(rows, group_);
}

ColumnLinear::ColumnLinear(int64_t in, int64_t out, GroupPtr group, const ColumnOptions& options)
    : in_(in), out_(out), group_(checked(group, "column_linear")), options_(options) {
  constexpr const char* kLayer = "column_linear";
  check_sizes(kLayer, in, out);
  if (options.packed < 1 || out % options.packed != 0 || (options.packed > 1 && options.uneven)) {
    throw ConfigError(
        "[parallel.{}] packed is {} for {} out features{}; pass the number of matrices of equal "
        "size that are in one",
        kLayer, options.packed, out, options.uneven ? ", which may be uneven" : "");
  }
  if (options.uneven) {
    check_words(kLayer, out, *group_);
  } else {
    check_cut(kLayer, "out features", out / options.packed, options.heads, *group_);
  }
  const torch::nn::Linear whole(torch::nn::LinearOptions(in, out).bias(options.bias));
  const int64_t held =
      options.uneven ? plan::shard_range(out, group_->size(), group_->rank()).size() : out / group_->size();
  weight = register_parameter("weight", piece_of(whole->weight, part_of({out, in}), {held, in}));
  if (options.bias) bias = register_parameter("bias", piece_of(whole->bias, part_of({out}), {held}));
}

plan::Part ColumnLinear::part_of(const plan::Shape& whole) const {
  plan::Part part = slice_of(whole, 0, *group_);
  if (options_.packed == 1 || part.is_whole()) return part;
  const int64_t rows = out_ / options_.packed;
  part.view = whole;
  part.view[0] = rows;
  part.view.insert(part.view.begin(), options_.packed);
  part.extent = part.view;
  part.extent[1] = rows / group_->size();
  part.start.insert(part.start.begin(), 0);
  part.start[1] = group_->rank() * part.extent[1];
  return part;
}

std::map<std::string, plan::Part> ColumnLinear::parts() const {
  if (group_->size() == 1) return {};
  std::map<std::string, plan::Part> parts = {{"weight", part_of({out_, in_})}};
  if (bias.defined()) parts.emplace("bias", part_of({out_}));
  return parts;
}

at::Tensor ColumnLinear::forward(const at::Tensor& x) const {
  check_features("column_linear", x, in_);
  if (options_.rows == Rows::kAll || group_->size() == 1) return at::linear(x, weight, nn::optional(bias));
  if (x.dim() < 2) check_rows("column_linear", x.sizes(), *group_);
  const at::Tensor y = GatheredLinear::apply(as_rows(x), weight, nn::optional(bias), group_);
  plan::Shape shape = with_rows(x.sizes(), group_->size(), 1);
  shape.back() = y.size(-1);
  return y.view(shape);
}

RowLinear::RowLinear(int64_t in, int64_t out, GroupPtr group, const RowOptions& options)
    : in_(in), out_(out), group_(checked(group, "row_linear")), options_(options) {
  check_sizes("row_linear", in, out);
  check_cut("row_linear", "in features", in, options.heads, *group_);
  const torch::nn::Linear whole(torch::nn::LinearOptions(in, out).bias(options.bias));
  weight = register_parameter(
      "weight", piece_of(whole->weight, slice_of({out, in}, 1, *group_), {out, in / group_->size()}));
  if (options.bias) bias = register_parameter("bias", whole->bias.detach().clone());
}

std::map<std::string, plan::Part> RowLinear::parts() const {
  if (group_->size() == 1) return {};
  return {{"weight", slice_of({out_, in_}, 1, *group_)}};
}

at::Tensor RowLinear::forward(const at::Tensor& x) const {
  check_features("row_linear", x, in_ / group_->size());
  const at::Tensor y = summed(at::linear(x, weight), options_.rows, group_, "row_linear");
  return bias.defined() ? y + bias : y;
}

VocabParallelEmbedding::VocabParallelEmbedding(int64_t words, int64_t width, GroupPtr group, Rows rows)
    : words_(words), group_(checked(group, "vocab_embedding")), rows_(rows) {
  check_sizes("vocab_embedding", words, width);
  check_words("vocab_embedding", words, *group_);
  const torch::nn::Embedding whole(words, width);
  const int64_t held = plan::shard_range(words, group_->size(), group_->rank()).size();
  weight = register_parameter("weight",
                              piece_of(whole->weight, slice_of({words, width}, 0, *group_), {held, width}));
}

std::map<std::string, plan::Part> VocabParallelEmbedding::parts() const {
  if (group_->size() == 1) return {};
  return {{"weight", slice_of({words_, weight.size(1)}, 0, *group_)}};
}

at::Tensor VocabParallelEmbedding::forward(const at::Tensor& indices) const {
  check_same_batch("vocab_embedding", "indices", indices, *group_, compared_);
  if (indices.is_cpu() && indices.numel() > 0) {
    const int64_t least = indices.min().item<int64_t>(), most = indices.max().item<int64_t>();
    if (least < 0 || most >= words_) {
      throw DataError("[parallel.vocab_embedding] indices are {} to {}, but there are {} words, from 0 on",
                      least, most, words_);
    }
  }
  const plan::Range mine = plan::shard_range(words_, group_->size(), group_->rank());
  const at::Tensor elsewhere = indices.lt(mine.begin).logical_or_(indices.ge(mine.end));
  const at::Tensor row = (indices - mine.begin).masked_fill_(elsewhere, 0);
  const at::Tensor terms = at::embedding(weight, row).masked_fill(elsewhere.unsqueeze(-1), 0.0);
  return summed(terms, rows_, group_, "vocab_embedding");
}

VocabParallelCrossEntropy::VocabParallelCrossEntropy(int64_t words, GroupPtr group)
    : words_(words), group_(checked(group, "vocab_cross_entropy")) {
  check_words("vocab_cross_entropy", words, *group_);
  joint_ = make_joint(group_, first_words(words, *group_));
}

at::Tensor VocabParallelCrossEntropy::forward(const at::Tensor& logits, const at::Tensor& targets) const {
  check_same_batch("vocab_cross_entropy", "targets", targets, *group_, compared_);
  check_features("vocab_cross_entropy", logits,
                 plan::shard_range(words_, group_->size(), group_->rank()).size());
  const at::Tensor loss = nn::cut_cross_entropy(logits, {.targets = targets}, joint_);
  return tensor::redistribute(loss, kRepeated, kSame, group_);
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t words,
                                        const GroupPtr& group) {
  return VocabParallelCrossEntropy(words, group).forward(logits, targets);
}

}  // namespace trireme::parallel
