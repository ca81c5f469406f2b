// What concerns the gradients of several stages at once: tied parameters and the norm.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/parallel/module_parameters.h"
#include "trireme/parallel/pipeline.h"

namespace trireme::parallel {
namespace {

at::Tensor find_parameter(const Stage& stage, const std::string& name) {
  for (const ModuleParameter& param : module_parameters(*stage.module)) {
    if (param.name == name) return param.tensor;
  }
  throw LogicError("[parallel.pipeline] stage {} has no parameter {}, which is to be tied", stage.index,
                   name);
}

void check_same_size(const TiedParameter& tie, int64_t numel, int64_t other_numel) {
  TRIREME_CHECK(
      numel == other_numel,
      "[parallel.pipeline] {} of stage {} has {} elements, and {} of stage {}, to which it is tied, {}",
      tie.name, tie.stage, numel, tie.other_name, tie.other_stage, other_numel);
}

}  // namespace

void Pipeline::find_ties() {
  for (const TiedParameter& tie : options_.tied) {
    for (const int64_t stage : {tie.stage, tie.other_stage}) {
      TRIREME_CHECK(stage >= 0 && stage < schedule_.stages,
                    "[parallel.pipeline] {} of stage {} is tied to {} of stage {}, but the {} stages of {} "
                    "are numbered from 0; name stages that are there",
                    tie.name, tie.stage, tie.other_name, tie.other_stage, schedule_.stages, schedule_.name);
    }
    Tie& here = ties_.emplace_back();
    const Stage *const first = stage_here(tie.stage), *const other = stage_here(tie.other_stage);
    if (first != nullptr) here.first = find_parameter(*first, tie.name);
    if (other != nullptr) here.other = find_parameter(*other, tie.other_name);
  }
}

std::vector<double> Pipeline::tied_sizes() const {
  std::vector<double> sizes(2 * options_.tied.size(), -1.0);
  for (size_t tie = 0; tie < ties_.size(); ++tie) {
    if (ties_[tie].first.defined()) sizes[2 * tie] = static_cast<double>(ties_[tie].first.numel());
    if (ties_[tie].other.defined()) sizes[2 * tie + 1] = static_cast<double>(ties_[tie].other.numel());
  }
  return sizes;
}

void Pipeline::check_tied_sizes(const std::vector<std::vector<double>>& by_rank) const {
  for (size_t tie = 0; tie < options_.tied.size(); ++tie) {
    double first = -1.0, other = -1.0;
    for (const std::vector<double>& sizes : by_rank) {
      first = std::max(first, sizes[2 * tie]);
      other = std::max(other, sizes[2 * tie + 1]);
    }
    check_same_size(options_.tied[tie], static_cast<int64_t>(first), static_cast<int64_t>(other));
  }
}

/// Copies on two ranks need a group of the two. Where a rank has both, no other does, or both directions of a
/// model in two ways do.
void Pipeline::make_ties() {
  for (size_t i = 0; i < ties_.size(); ++i) {
    const TiedParameter& tie = options_.tied[i];
    Tie& here = ties_[i];
    const Stage *const first = stage_here(tie.stage), *const other = stage_here(tie.other_stage);
    if (first != nullptr && other != nullptr) {
      const at::NoGradGuard no_grad;
      if (!other->engine) here.other.detach().copy_(here.first);
    } else if (first != nullptr || other != nullptr) {
      const auto rank_of = [&](int64_t stage) {
        return mesh_.pp->ranks()[static_cast<size_t>(schedule_.rank_of(stage, 0))];
      };
      here.group = mesh_.world->make_group("tied", {rank_of(tie.stage), rank_of(tie.other_stage)});
      const Stage& stage = first != nullptr ? *first : *other;
      start_equal(*here.group, first != nullptr ? here.first : here.other, stage.engine != nullptr);
    }
  }
}

/// The values of `mine`, which is an engine's already or not, are those of the tie's first stage.
void Pipeline::start_equal(comm::Group& group, const at::Tensor& mine, bool has_engine) const {
  const at::NoGradGuard no_grad;
  if (has_engine) return;
  at::Tensor values = mine.detach().to(mesh_.world->device()).contiguous();
  group.broadcast(values, 0);
  mine.detach().copy_(values);
}

std::vector<double> Pipeline::frozen_ties() const {
  std::vector<double> frozen;
  for (const Tie& tie : ties_) {
    for (const at::Tensor& copy : {tie.first, tie.other})
      frozen.push_back(!copy.defined() ? -1.0 : copy.requires_grad() ? 0.0 : 1.0);
  }
  return frozen;
}

/// A rank that sums waits for the other one, and copies of which one alone is updated are no copies any more.
void Pipeline::check_ties(const std::vector<std::vector<double>>& by_rank,
                          const std::vector<int64_t>& ranks) const {
  struct Copy {
    size_t rank, column;
  };
  for (size_t tie = 0; tie < ties_.size(); ++tie) {
    std::optional<Copy> trained, frozen;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      for (const size_t column : {2 * tie, 2 * tie + 1}) {
        const double is_frozen = by_rank[rank][column];
        if (is_frozen >= 0.0) (is_frozen > 0.0 ? frozen : trained) = {rank, column};
      }
    }
    if (!trained || !frozen) continue;
    const auto in_words = [&](const Copy& copy) {
      const TiedParameter& names = options_.tied[tie];
      const bool first = copy.column == 2 * tie;
      return fmt::format("{} of stage {} on rank {}", first ? names.name : names.other_name,
                         first ? names.stage : names.other_stage, ranks[copy.rank]);
    };
    throw LogicError(
        "[parallel.pipeline] {} is frozen, and {}, to which it is tied, is not; set requires_grad of both "
        "alike, on all ranks",
        in_words(*frozen), in_words(*trained));
  }
}

/// Before data-parallel ranks reduce: both copies get the sum of what their stages have accumulated.
void Pipeline::sum_tied() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < options_.tied.size(); ++i) {
    const TiedParameter& tie = options_.tied[i];
    Stage *const first = stage_here(tie.stage), *const other = stage_here(tie.other_stage);
    if (first == nullptr && other == nullptr) continue;
    if (!(first != nullptr ? ties_[i].first : ties_[i].other).requires_grad()) continue;
    if (first != nullptr && other != nullptr) {
      at::Tensor sum = first->engine->accumulated_gradient(tie.name),
                 copy = other->engine->accumulated_gradient(tie.other_name);
      copy.copy_(sum.add_(copy));
      continue;
    }
    at::Tensor mine = first != nullptr ? first->engine->accumulated_gradient(tie.name)
                                       : other->engine->accumulated_gradient(tie.other_name);
    ties_[i].group->all_reduce(mine, comm::ReduceOp::kSum);
  }
}

/// Of two copies of a stage, the one of the first direction does.
bool Pipeline::counts_in_norm(const Stage& stage) const {
  return stage.engine && schedule_.rank_of(stage.index, 0) == rank();
}

double Pipeline::grad_norm() const {
  std::vector<double> squares(static_cast<size_t>(schedule_.all_stages()), 0.0);
  for (const StageAtWork& stage : stages_) {
    if (!stage.engine) continue;
    std::vector<std::string> counted_elsewhere;
    for (const TiedParameter& tie : options_.tied) {
      if (tie.other_stage == stage.index) counted_elsewhere.push_back(tie.other_name);
    }
    const double norm = stage.engine->grad_norm(counted_elsewhere);
    if (counts_in_norm(stage)) squares[static_cast<size_t>(stage.index)] = norm * norm;
  }
  double sum = 0.0;
  const auto by_rank = comm::gather_scalars(*mesh_.pp, squares);
  for (size_t stage = 0; stage < squares.size(); ++stage) {
    for (const auto& rank : by_rank) sum += rank[stage];
  }
  return std::sqrt(sum);
}

double Pipeline::clip_grad_norm(double max_norm) {
  TRIREME_CHECK(max_norm > 0.0, "[parallel.clip_grad_norm] max_norm is {}; give a positive number", max_norm);
  const double norm = grad_norm(), factor = optim::clip_factor(norm, max_norm);
  for (const auto& engine : engines_) engine->scale_gradient(factor);
  return norm;
}

}  // namespace trireme::parallel
