#include "trireme/nn/linear_parts.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "trireme/kernels/matmul.h"
#include "trireme/kernels/nf4.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/notes.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {

using kernels::Fp8Cast;
using kernels::Fp8Copies;
using kernels::Fp8Copy;
using kernels::Fp8Matrix;
using kernels::Fp8Scaling;
using kernels::Fp8Source;
using kernels::Fp8Span;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

/// One matrix over `parts` (rows_i, columns), if they follow each other in one storage; else undefined.
at::Tensor as_one_matrix(at::TensorList parts) {
  const at::Tensor& first = parts.front();
  int64_t rows = 0;
  for (const at::Tensor& part : parts) {
    const bool follows = part.is_contiguous() && part.is_alias_of(first) &&
                         part.storage_offset() == first.storage_offset() + rows * first.size(1);
    if (!follows) return {};
    rows += part.size(0);
  }
  return first.as_strided({rows, first.size(1)}, {first.size(1), 1});
}

/// The sizes of the weights as one matrix; their memory may not be there.
struct WeightSizes {
  int64_t rows = 0, columns;

  explicit WeightSizes(at::TensorList weights) : columns(weights.front().size(1)) {
    for (const at::Tensor& weight : weights) rows += weight.size(0);
  }
};

/// One matrix over weights that were lent in NF4, in memory that lasts as long as the product.
at::Tensor decoded(at::TensorList parts) {
  const WeightSizes sizes(parts);
  const at::Tensor whole =
      at::empty({sizes.rows, sizes.columns}, parts.front().options().requires_grad(false));
  int64_t row = 0;
  for (const at::Tensor& part : parts) {
    at::Tensor place = whole.narrow(0, row, part.size(0)).view(-1);
    kernels::nf4_decode(place, lent_nf4(part));
    row += part.size(0);
  }
  return whole;
}

at::Tensor joined(at::TensorList parts) {
  if (lent_nf4(parts.front()).defined()) return decoded(parts);
  if (parts.size() == 1) return parts.front();
  const at::Tensor whole = as_one_matrix(parts);
  return whole.defined() ? whole : at::cat(parts);
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.storage().nbytes() > 0;
}

Fp8Cast cast_of(const Fp8Recipe& recipe) {
  return {.scaling = recipe.scaling};
}
Fp8Cast weight_cast(const Fp8Recipe& recipe) {
  return {.scaling = recipe.scaling, .weight = true};
}
Fp8Cast gradient_cast(const Fp8Recipe& recipe) {
  return {.scaling = recipe.scaling, .format = recipe.gradients};
}

/// The weights as they are kept or `transposed`: lent, or cast here by `amax`, which is filled in if it is
/// not known.
Fp8Matrix weights_in_fp8(const LinearParams& params, at::Tensor& amax, bool transposed) {
  const Fp8Recipe& recipe = *params.fp8;
  if (const Fp8Matrix lent = lent_fp8(params.weights.front()); lent.defined() && has_memory(lent.values))
    return transposed ? kernels::fp8_transposed(lent) : lent;
  const InUse in_use{params.weights};
  const at::Tensor weight = joined(params.weights);
  if (!amax.defined()) amax = kernels::fp8_amax(weight, recipe.scaling);
  const Fp8Copies copies =
      kernels::fp8_cast(weight, amax, weight_cast(recipe),
                        transposed ? Fp8Copy::kTransposed : Fp8Copy::kPlain, recipe.layer.weight_seen());
  return transposed ? copies.transposed : copies.plain;
}

/// left^T @ right, the product of two factors over their rows.
struct FactorProduct {
  const Factor &left, &right;
  bool fast;

  /// into (features of left, features of right), plus `addend`, which may be it
  void operator()(at::Tensor& out, const at::Tensor& addend) const {
    if (left.columns.defined()) {
      kernels::fp8_matmul(out, left.columns, right.columns, fast, {}, addend);
    } else {
      kernels::matmul(out, left.rows.t(), right.rows, {}, addend);
    }
  }
  /// The product as a new tensor in the dtype of `like`.
  at::Tensor as_new(const at::Tensor& like) const {
    const auto features = [](const Factor& factor) {
      return factor.columns.defined() ? factor.columns.values.size(0) : factor.rows.size(1);
    };
    at::Tensor out = at::empty({features(left), features(right)}, like.options());
    (*this)(out, {});
    return out;
  }
};

/// `product` holds the gradients of `weights`, one after another by rows. Returns those that are not in place
/// afterwards, for backward to return.
variable_list accumulate_weight_grad(at::TensorList weights, const FactorProduct& product) {
  const bool first = std::ranges::all_of(weights, can_claim_gradient);
  std::vector<at::Tensor> grads;
  for (const at::Tensor& weight : weights) {
    grads.push_back(first ? claim_gradient(weight) : gradient_to_add_to(weight));
  }
  if (std::ranges::all_of(grads, [](const at::Tensor& grad) { return grad.defined(); })) {
    at::Tensor whole = grads.size() == 1 ? grads.front() : as_one_matrix(grads);
    if (whole.defined() && whole.is_contiguous()) {
      product(whole, first ? at::Tensor() : whole);
      return variable_list(weights.size());
    }
  }
  std::vector<int64_t> rows;
  for (const at::Tensor& weight : weights) rows.push_back(weight.size(0));
  variable_list reported = at::split_with_sizes(product.as_new(weights.front().detach()), rows);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!grads[i].defined()) continue;
    first ? grads[i].copy_(reported[i]) : grads[i].add_(reported[i]);
    reported[i] = at::Tensor();
  }
  for (size_t i = 0; i < weights.size(); ++i)
    if (!weights[i].requires_grad()) reported[i] = at::Tensor();
  return reported;
}

at::Tensor with_sizes_of_output(const at::Tensor& residual, int64_t rows, int64_t width) {
  return residual.defined() ? residual.reshape({rows, width}).contiguous() : at::Tensor();
}

/// SwiGLU is of what a linear layer has just written.
Fp8Source contiguous(const Fp8Source& source) {
  return source.is_swiglu() ? source : Fp8Source(source.x().contiguous());
}

}  // namespace

KeepInput keep_for_backward() {
  return at::GradMode::is_enabled() ? KeepInput::kYes : KeepInput::kNo;
}

KeepInput keep_for_backward(at::TensorList weights, const at::Tensor& bias) {
  const auto is_trained = [](const at::Tensor& param) { return param.defined() && param.requires_grad(); };
  return std::ranges::any_of(weights, is_trained) || is_trained(bias) ? keep_for_backward() : KeepInput::kNo;
}

at::Tensor readable(const at::Tensor& weight) {
  const InUse in_use{weight};
  return lent_nf4(weight).defined() ? decoded(weight) : weight;
}

at::Tensor as_rows(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

at::Tensor shaped(const at::Tensor& rows, const at::Tensor& like) {
  std::vector<int64_t> shape = like.sizes().vec();
  const int64_t before = like.numel() / std::max<int64_t>(1, like.size(-1));
  if (before > 0 && rows.size(0) != before) {
    int64_t& length = shape[shape.size() - 2];
    length = length * rows.size(0) / before;
  }
  shape.back() = rows.size(-1);
  return rows.view(shape);
}

namespace {

/// The rows that the layer multiplies: this rank's, or those of all ranks.
Fp8Source entered(const LinearParams& params, const Fp8Source& input) {
  return params.joints.before ? Fp8Source(params.joints.before->gather(input.computed().contiguous()))
                              : input;
}

/// Memory of what the joint sums next, or of a tensor that nobody sums.
at::Tensor empty_for(const JointPtr& joint, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::TensorOptions plain = options.requires_grad(false);
  return joint ? joint->empty(sizes, plain) : at::empty(sizes, plain);
}

/// Whether products of this layer are computed in pieces beside what the joint does. In FP8 they are not: a
/// scale may be of all rows.
bool overlaps(const LinearParams& params, const JointPtr& joint) {
  return joint && joint->overlaps_products() && !params.fp8;
}

/// all (size * n, in) @ weight + bias, with the product of this rank's rows first, while the others arrive.
at::Tensor arriving_product(const Joint& joint, const at::Tensor& mine, Arriving& arriving, at::Tensor& all,
                            const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& addend) {
  const int64_t count = mine.size(0), first = joint.rank() * count, rows = joint.size() * count;
  at::Tensor out = at::empty({rows, weight.size(1)}, mine.options());
  const auto multiply = [&](int64_t from, int64_t some, const at::Tensor& x) {
    if (some == 0) return;
    at::Tensor piece = out.narrow(0, from, some);
    kernels::matmul(piece, x, weight, bias, addend.defined() ? addend.narrow(0, from, some) : addend);
  };
  multiply(first, count, mine);
  all = arriving.take();
  const int64_t behind = first + count;
  multiply(0, first, all.narrow(0, 0, first));
  multiply(behind, rows - behind, all.narrow(0, behind, rows - behind));
  return out;
}

/// The sums of the ranks' products of x (size * n, in) for this rank's rows, (n, out) fp32. While ranks sum
/// up one piece of everybody's rows, the next is multiplied.
at::Tensor summed_in_pieces(const Joint& joint, const at::Tensor& x, const at::Tensor& weight) {
  constexpr int64_t kPieces = 2;
  const int64_t ranks = joint.size(), count = x.size(0) / ranks, width = weight.size(1),
                pieces = count % kPieces == 0 ? kPieces : 1, rows = count / pieces;
  at::Tensor sum = at::empty({count, width}, x.options().dtype(at::kFloat));
  std::vector<Arriving> arriving;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const at::Tensor partial = joint.empty({ranks * rows, width}, x.options());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      at::Tensor part = partial.narrow(0, rank * rows, rows);
      kernels::matmul(part, x.narrow(0, rank * count + piece * rows, rows), weight);
    }
    arriving.push_back(joint.begin_reduce_scatter(partial, sum.narrow(0, piece * rows, rows)));
  }
  for (Arriving& piece : arriving) piece.take();
  return sum;
}

/// The sums of all ranks' products for this rank's rows, with what is added once.
at::Tensor left(const LinearParams& params, at::Tensor sum, const at::TensorOptions& options,
                const at::Tensor& residual) {
  if (params.bias.defined()) sum.add_(params.bias);
  at::Tensor out = at::empty(sum.sizes(), options);
  return residual.defined() ? at::add_out(out, sum, residual.view(sum.sizes())) : out.copy_(sum);
}

/// Rows of the output where the layer multiplies `rows` of them.
int64_t rows_left(const LinearParams& params, int64_t rows) {
  return params.joints.after ? rows / params.joints.after->size() : rows;
}

}  // namespace

at::Tensor apply_linear(const LinearParams& params, const Fp8Source& given, const at::Tensor& residual,
                        LinearKept& kept, KeepInput keep, Output output) {
  const InUse in_use{params.weights, params.bias, given.x(), residual};
  const bool splits = params.joints.before != nullptr, sums = params.joints.after != nullptr;
  const WeightSizes sizes(params.weights);
  const int64_t width = params.in_out ? sizes.columns : sizes.rows;
  const bool read = output == Output::kRead, keeps = keep == KeepInput::kYes;
  if (splits && keeps) kept.input.rows = given.computed();
  if (splits) kept.input_amax.reset();  // that of this rank's rows
  if (read && !sums && overlaps(params, params.joints.before)) {
    const Joint& joint = *params.joints.before;
    const at::Tensor mine = given.computed().contiguous(), weight = joined(params.weights);
    Arriving arriving = joint.begin_gather(mine);
    at::Tensor all;
    return arriving_product(joint, mine, arriving, all, params.in_out ? weight : weight.t(), params.bias,
                            with_sizes_of_output(residual, joint.size() * mine.size(0), width));
  }
  const Fp8Source input = entered(params, given);
  const at::Tensor bias = sums ? at::Tensor() : params.bias,
                   addend = sums ? at::Tensor()
                                 : with_sizes_of_output(read ? residual : at::Tensor(), input.rows(), width);
  const auto unread = [&] {
    return at::empty({1, 1}, input.x().options()).expand({rows_left(params, input.rows()), width});
  };
  if (!params.fp8) {
    const at::Tensor rows = input.computed();
    if (keeps && !splits) kept.input.rows = rows;
    if (!read) return unread();
    const at::Tensor weight = joined(params.weights), factor = params.in_out ? weight : weight.t();
    if (overlaps(params, params.joints.after))
      return left(params, summed_in_pieces(*params.joints.after, rows.contiguous(), factor), rows.options(),
                  residual);
    if (!sums) return kernels::product(rows, factor, bias, addend);
    at::Tensor partial = params.joints.after->empty({rows.size(0), width}, rows.options());
    kernels::matmul(partial, rows, factor);
    return left(params, params.joints.after->reduce_scatter(partial), rows.options(), residual);
  }
  const Fp8Recipe& recipe = *params.fp8;
  const Fp8Source rows = contiguous(input);
  if (recipe.layer.amax.defined()) {
    kept.input_amax = recipe.layer.input_amax();
    kept.weight_amax = recipe.layer.weight_amax();
  }
  if (!kept.input_amax.defined()) kept.input_amax = kernels::fp8_amax(rows.x(), recipe.scaling);
  if (!read && splits) return unread();
  const Fp8Copy copy = !read ? Fp8Copy::kTransposed : keeps && !splits ? Fp8Copy::kBoth : Fp8Copy::kPlain;
  const Fp8Copies of_input =
      kernels::fp8_cast(rows, kept.input_amax, cast_of(recipe), copy, recipe.layer.input_seen());
  kept.input.columns = of_input.transposed;
  if (!read) return unread();
  at::Tensor out = empty_for(params.joints.after, {rows.rows(), width}, rows.x().options());
  kernels::fp8_matmul(out, of_input.plain, weights_in_fp8(params, kept.weight_amax, params.in_out),
                      recipe.fast_forward, bias, addend);
  return sums ? left(params, params.joints.after->reduce_scatter(out), out.options(), residual) : out;
}

namespace {

Factor factor_of(const Fp8Source& input, const std::optional<Fp8Recipe>& fp8, const at::Tensor& input_amax) {
  if (!fp8) return {input.computed(), {}};
  return {{},
          kernels::fp8_cast(contiguous(input), input_amax, cast_of(*fp8), Fp8Copy::kTransposed,
                            fp8->layer.input_seen())
              .transposed};
}

}  // namespace

Factor ArrivingFactor::take() {
  return rows_.pending() ? factor_of(rows_.take(), fp8_, input_amax_) : std::move(factor_);
}

ArrivingFactor begin_input_factor(const LinearParams& params, const LinearKept& kept) {
  const bool gathers = params.joints.before && kept.input.rows.defined();
  return gathers ? begin_input_factor(params, kept.input.rows, kept.input_amax) : ArrivingFactor(kept.input);
}

ArrivingFactor begin_input_factor(const LinearParams& params, const Fp8Source& given,
                                  const at::Tensor& input_amax) {
  if (!params.joints.before) return ArrivingFactor(factor_of(given, params.fp8, input_amax));
  return {params.joints.before->begin_gather(given.computed().contiguous()), params.fp8, input_amax};
}

OutputGradient output_gradient(const LinearParams& params, const at::Tensor& dy) {
  return output_gradient(params, as_rows(dy), noted_amax(dy, params.fp8), noted_column_sums(dy));
}

namespace {

/// With those over the rows that this rank has, where a bias was added to these alone.
OutputGradient left_gradient(LinearParams params, const at::Tensor& rows, at::Tensor sums) {
  if (is_reached(params.bias) && !sums.defined()) {
    sums = at::zeros({rows.size(1)}, rows.options());  // the kernel adds in fp32 and writes this dtype
    kernels::add_column_sums(sums, rows.contiguous());
    sums = sums.to(at::kFloat);
  }
  const at::Tensor mine = rows.contiguous();
  Arriving arriving = params.joints.after->begin_gather(mine);
  if (overlaps(params, params.joints.after)) {
    return {
        .rows = {}, .plain = {}, .columns = {}, .sums = sums, .mine = mine, .arriving = std::move(arriving)};
  }
  params.joints.after = nullptr;
  return output_gradient(params, Fp8Source(arriving.take()), {}, sums);
}

}  // namespace

OutputGradient output_gradient(const LinearParams& params, const Fp8Source& dy, const at::Tensor& amax,
                               const at::Tensor& sums) {
  if (params.joints.after) return left_gradient(params, dy.computed(), sums);
  if (!params.fp8) return {dy.computed(), {}, {}, sums};
  const Fp8Recipe& recipe = *params.fp8;
  const Fp8Source rows = contiguous(dy);
  const auto largest = [&] {
    if (recipe.layer.amax.defined()) return recipe.layer.gradient_amax();
    return amax.defined() ? amax : kernels::fp8_amax(rows.x(), recipe.scaling);
  };
  const bool for_weights = std::ranges::any_of(params.weights, is_reached);
  const Fp8Copies copies =
      kernels::fp8_cast(rows, largest(), gradient_cast(recipe),
                        for_weights ? Fp8Copy::kBoth : Fp8Copy::kPlain, recipe.layer.gradient_seen());
  const bool rows_are_read = is_reached(params.bias) && !sums.defined();
  return {rows_are_read ? rows.computed() : at::Tensor(), copies.plain, copies.transposed, sums};
}

namespace {

/// For all rows that the layer multiplies, which the joint before it sums next.
at::Tensor whole_input_gradient(const LinearParams& params, const at::Tensor& weight_amax, OutputGradient& dy,
                                const at::Tensor& addend) {
  if (!params.fp8) {
    const InUse in_use{params.weights};
    const at::Tensor weight = joined(params.weights), factor = params.in_out ? weight.t() : weight;
    if (dy.arriving.pending())
      return arriving_product(*params.joints.after, dy.mine, dy.arriving, dy.rows, factor, {}, addend);
    at::Tensor dx = empty_for(params.joints.before, {dy.rows.size(0), factor.size(1)}, dy.rows.options());
    kernels::matmul(dx, dy.rows, factor, {}, addend);
    return dx;
  }
  const WeightSizes sizes(params.weights);
  at::Tensor dx =
      empty_for(params.joints.before, {dy.plain.values.size(0), params.in_out ? sizes.rows : sizes.columns},
                params.weights.front().options());
  at::Tensor amax = weight_amax;
  kernels::fp8_matmul(dx, dy.plain, weights_in_fp8(params, amax, !params.in_out), params.fp8->fast_backward,
                      {}, addend);
  return dx;
}

}  // namespace

InputGradient begin_input_gradient(const LinearParams& params, const at::Tensor& weight_amax,
                                   OutputGradient& dy, const at::Tensor& addend) {
  const at::Tensor added = addend.defined() ? as_rows(addend).contiguous() : at::Tensor();
  if (!params.joints.before) return InputGradient(whole_input_gradient(params, weight_amax, dy, added));
  const at::Tensor dx = whole_input_gradient(params, weight_amax, dy, {});
  return {params.joints.before->begin_reduce_scatter(dx), added, dx.scalar_type()};
}

at::Tensor InputGradient::take() {
  if (whole_.defined()) return std::exchange(whole_, {});
  const at::Tensor sum = sum_.take();
  return (addend_.defined() ? sum + addend_ : sum).to(dtype_);
}

variable_list add_parameter_gradients(const LinearParams& params, const Factor& input, const Factor& dy) {
  const InUse in_use{input.rows, dy.rows};
  variable_list reported(params.weights.size());
  if (input.defined() && std::ranges::any_of(params.weights, is_reached)) {
    const bool fast = params.fp8 && params.fp8->fast_backward;
    reported = accumulate_weight_grad(
        params.weights, params.in_out ? FactorProduct{input, dy, fast} : FactorProduct{dy, input, fast});
  }
  if (is_reached(params.bias)) {
    GradTarget target(params.bias, dy.sums.defined() ? GradTarget::kAsItIs : GradTarget::kZeroed);
    if (!dy.sums.defined()) {
      kernels::add_column_sums(target.tensor(), dy.rows.contiguous());
    } else {
      target.adds() ? target.tensor().add_(dy.sums) : target.tensor().copy_(dy.sums);
    }
    reported.push_back(target.reported());
  } else {
    reported.emplace_back();
  }
  return reported;
}

namespace {

// The tensors that a linear layer saves: those of its function, then its weights and as many others, and
// numbers about them.
constexpr std::ptrdiff_t kSavedBehindWeights = 8;
constexpr size_t kNumbers = 7;
constexpr const char* kFunctionTensors = "linear.function_tensors";
constexpr const char* kAboutLinears = "linear.numbers";

std::array<int64_t, kNumbers> numbers_of(const LinearParams& params) {
  const Fp8Recipe recipe = params.fp8.value_or(Fp8Recipe());
  return {static_cast<int64_t>(params.weights.size()),
          params.in_out,
          params.fp8.has_value(),
          static_cast<int64_t>(recipe.scaling),
          static_cast<int64_t>(recipe.gradients),
          recipe.fast_forward,
          recipe.fast_backward};
}

/// The span of the scales of activations: square blocks are for weights alone.
Fp8Span span_of_input(const Fp8Recipe& recipe) {
  switch (recipe.scaling) {
    case Fp8Scaling::kTensor:
      return Fp8Span::kTensor;
    case Fp8Scaling::kRow:
      return Fp8Span::kRow;
    case Fp8Scaling::kBlock:
      break;
  }
  return Fp8Span::kRowBlock;
}

}  // namespace

namespace {

/// Joints in an autograd context, which keeps no pointers of ours.
struct JointsHolder : torch::CustomClassHolder {
  explicit JointsHolder(Joints kept) : joints(std::move(kept)) {}
  Joints joints;
};

std::string joints_key(size_t index) {
  return "linear.joints." + std::to_string(index);
}

}  // namespace

void keep_joints(AutogradContext& context, const Joints& joints, size_t index) {
  if (!joints.before && !joints.after) return;
  context.saved_data[joints_key(index)] = at::IValue::make_capsule(c10::make_intrusive<JointsHolder>(joints));
}

Joints kept_joints(AutogradContext& context, size_t index) {
  const auto found = context.saved_data.find(joints_key(index));
  if (found == context.saved_data.end()) return {};
  return static_cast<JointsHolder&>(*found->second.toCapsule()).joints;
}

void save(AutogradContext& context, variable_list saved, std::initializer_list<SavedLinear> linears) {
  size_t index = 0;
  context.saved_data[kFunctionTensors] = static_cast<int64_t>(saved.size());
  std::vector<int64_t> numbers;
  for (const auto& [params, kept] : linears) {
    keep_joints(context, params.joints, index++);
    const auto about = numbers_of(params);
    numbers.insert(numbers.end(), about.begin(), about.end());
    const Fp8Layer layer = params.fp8 ? params.fp8->layer : Fp8Layer();
    saved.insert(saved.end(), params.weights.begin(), params.weights.end());
    const variable_list behind = {params.bias,
                                  kept.input.rows,
                                  kept.input.columns.values,
                                  kept.input.columns.scale,
                                  kept.input_amax,
                                  kept.weight_amax,
                                  layer.amax,
                                  layer.seen};
    saved.insert(saved.end(), behind.begin(), behind.end());
  }
  context.saved_data[kAboutLinears] = numbers;
  context.save_for_backward(std::move(saved));
}

Restored restore(AutogradContext& context) {
  const variable_list all = context.get_saved_variables();
  const std::vector<int64_t> numbers = context.saved_data[kAboutLinears].toIntVector();
  auto next = all.begin() + context.saved_data[kFunctionTensors].toInt();
  Restored restored{.saved = {all.begin(), next}, .linears = {}};
  for (auto about = numbers.begin(); about != numbers.end(); about += kNumbers) {
    const auto weights = next, behind = weights + about[0];
    next = behind + kSavedBehindWeights;
    RestoredLinear& linear = restored.linears.emplace_back();
    linear.joints = kept_joints(context, restored.linears.size() - 1);
    linear.weights = {weights, behind};
    linear.bias = behind[0];
    linear.in_out = about[1] != 0;
    linear.kept = {
        .input = {behind[1], {behind[2], behind[3]}}, .input_amax = behind[4], .weight_amax = behind[5]};
    if (about[2] == 0) continue;
    linear.fp8 = Fp8Recipe{.scaling = static_cast<Fp8Scaling>(about[3]),
                           .gradients = static_cast<kernels::Fp8Format>(about[4]),
                           .fast_forward = about[5] != 0,
                           .fast_backward = about[6] != 0,
                           .layer = {.amax = behind[6], .seen = behind[7]}};
    linear.kept.input.columns.span = span_of_input(*linear.fp8);
  }
  return restored;
}

}  // namespace trireme::nn
