// What concerns the gradients of several stages at once: tied parameters and the norm.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/parallel/module_parameters.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/pipeline.h"

namespace trireme::parallel {
namespace {

at::Tensor find_parameter(const Stage& stage, const std::string& name) {
  for (const ModuleParameter& param : module_parameters(*stage.module)) {
    if (param.name == name) return param.tensor;
  }
  throw LogicError("[parallel.pipeline] stage {} has no parameter {}, which is to be tied", stage.index,
                   name);
}

int64_t rows_of(const at::Tensor& parameter) {
  return parameter.dim() > 0 ? parameter.size(0) : 1;
}

/// A copy of a tied parameter.
struct CopySize {
  int64_t numel = -1, rows = -1;
};

void check_sizes(const TiedParameter& tie, const CopySize& first, const CopySize& other) {
  if (!tie.first_row) {
    TRIREME_CHECK(
        first.numel == other.numel,
        "[parallel.pipeline] {} of stage {} has {} elements, and {} of stage {}, to which it is tied, {}; "
        "make both as large, or say of which rows the other is a copy (TiedParameter::first_row)",
        tie.name, tie.stage, first.numel, tie.other_name, tie.other_stage, other.numel);
    return;
  }
  const int64_t row = *tie.first_row;
  TRIREME_CHECK(row >= 0 && other.rows >= 1 && row <= first.rows - other.rows,
                "[parallel.pipeline] {} of stage {} has {} rows, and {} of stage {} is tied to those from {} "
                "to {}; name rows that are there",
                tie.name, tie.stage, first.rows, tie.other_name, tie.other_stage, row, row + other.rows);
  TRIREME_CHECK(first.numel / first.rows == other.numel / other.rows,
                "[parallel.pipeline] a row of {} of stage {} has {} elements, and one of {} of stage {}, to "
                "which it is tied, {}; make rows of both as large",
                tie.name, tie.stage, first.numel / first.rows, tie.other_name, tie.other_stage,
                other.numel / other.rows);
}

/// `has` are whether each rank was given an engine for its copies: a number of 0 or 1 for each. Of copies
/// with engines the giver has made the values equal, and of others the pipeline does.
void check_engines(const TiedParameter& tie, const std::vector<double>& has) {
  TRIREME_CHECK(
      std::ranges::adjacent_find(has, std::ranges::not_equal_to()) == has.end(),
      "[parallel.pipeline] {} of stage {} is tied to {} of stage {}, and an engine was given for one "
      "of the two copies and not for the other; give both stages one (Stage::engine) on all ranks, "
      "or neither of them",
      tie.name, tie.stage, tie.other_name, tie.other_stage);
}

/// Sums of two copies at a time would leave one of three behind.
void check_apart(const TiedParameter& tie, int64_t rows, const TiedParameter& later, int64_t later_rows) {
  const auto is_other_of = [](const TiedParameter& one, int64_t stage, const std::string& name) {
    return one.other_stage == stage && one.other_name == name;
  };
  const bool chained = is_other_of(tie, later.stage, later.name) || is_other_of(later, tie.stage, tie.name) ||
                       is_other_of(tie, later.other_stage, later.other_name);
  TRIREME_CHECK(!chained,
                "[parallel.pipeline] {} of stage {} is tied to {} of stage {}, and {} of stage {} to {} of "
                "stage {}: a copy would have two others; tie all copies to one first parameter, each to rows "
                "of its own",
                tie.name, tie.stage, tie.other_name, tie.other_stage, later.name, later.stage,
                later.other_name, later.other_stage);
  if (tie.stage != later.stage || tie.name != later.name) return;
  const int64_t begin = tie.first_row.value_or(0), later_begin = later.first_row.value_or(0);
  TRIREME_CHECK(begin + rows <= later_begin || later_begin + later_rows <= begin,
                "[parallel.pipeline] rows {} to {} of {} of stage {} are tied to {} of stage {}, and rows {} "
                "to {} to {} of stage {}; tie each row to one other copy",
                begin, begin + rows, tie.name, tie.stage, tie.other_name, tie.other_stage, later_begin,
                later_begin + later_rows, later.other_name, later.other_stage);
}

}  // namespace

void Pipeline::find_ties() {
  const plan::CommHook hook = options_.data_parallel.hook.hook;
  TRIREME_CHECK(
      options_.tied.empty() || plan::keeps_copies_equal(hook),
      "[parallel.pipeline] hook {} with tied parameters: the gradients of the copies would be compressed "
      "differently, and the copies would drift apart; use none, fp16 or local_sgd",
      hook);
  for (const TiedParameter& tie : options_.tied) {
    for (const int64_t stage : {tie.stage, tie.other_stage}) {
      TRIREME_CHECK(stage >= 0 && stage < schedule_.all_stages(),
                    "[parallel.pipeline] {} of stage {} is tied to {} of stage {}, but the {} stages of {} "
                    "are numbered from 0; name stages that are there",
                    tie.name, tie.stage, tie.other_name, tie.other_stage, schedule_.all_stages(),
                    schedule_.name);
    }
    Tie& here = ties_.emplace_back();
    const Stage *const first = stage_here(tie.stage), *const other = stage_here(tie.other_stage);
    if (first != nullptr) here.first = find_parameter(*first, tie.name);
    if (other != nullptr) here.other = find_parameter(*other, tie.other_name);
  }
}

std::vector<double> Pipeline::tied_copies() {
  std::vector<double> copies;
  const auto add = [&](const at::Tensor& copy, int64_t stage) {
    const bool here = copy.defined();
    copies.push_back(here ? static_cast<double>(copy.numel()) : -1.0);
    copies.push_back(here ? static_cast<double>(rows_of(copy)) : -1.0);
    copies.push_back(here ? (stage_here(stage)->engine ? 1.0 : 0.0) : -1.0);
  };
  for (size_t i = 0; i < ties_.size(); ++i) {
    add(ties_[i].first, options_.tied[i].stage);
    add(ties_[i].other, options_.tied[i].other_stage);
  }
  return copies;
}

void Pipeline::take_tied_copies(const std::vector<std::vector<double>>& by_rank) {
  constexpr size_t kNumel = 0, kRows = 1, kEngine = 2, kColumns = 3;  // of a copy
  const auto most = [&](size_t column) {
    double found = -1.0;
    for (const std::vector<double>& copies : by_rank) found = std::max(found, copies[column]);
    return static_cast<int64_t>(found);
  };
  for (size_t tie = 0; tie < options_.tied.size(); ++tie) {
    const size_t at_first = 2 * tie * kColumns, at_other = at_first + kColumns;
    const CopySize first{most(at_first + kNumel), most(at_first + kRows)},
        other{most(at_other + kNumel), most(at_other + kRows)};
    check_sizes(options_.tied[tie], first, other);
    std::vector<double> has_engine;
    for (const std::vector<double>& copies : by_rank) {
      for (const size_t at : {at_first, at_other})
        if (copies[at + kEngine] >= 0.0) has_engine.push_back(copies[at + kEngine]);
    }
    check_engines(options_.tied[tie], has_engine);
    ties_[tie].rows = options_.tied[tie].first_row ? other.rows : first.rows;
  }
  for (size_t tie = 0; tie < ties_.size(); ++tie) {
    for (size_t later = tie + 1; later < ties_.size(); ++later)
      check_apart(options_.tied[tie], ties_[tie].rows, options_.tied[later], ties_[later].rows);
  }
}

at::Tensor Pipeline::tied_rows(size_t tie, const at::Tensor& first) const {
  const auto& row = options_.tied[tie].first_row;
  return row ? first.narrow(0, *row, ties_[tie].rows) : first;
}

/// Copies on two ranks need a group of the two. Where a rank has both, no other does, or both directions of a
/// model in two ways do. Otherwise the lower ranks of both stages make one group then, and the higher ones
/// another: they have the same place in the sums of their stages, whose order decides about the last bit.
void Pipeline::make_ties() {
  for (size_t i = 0; i < ties_.size(); ++i) {
    const TiedParameter& tie = options_.tied[i];
    Tie& here = ties_[i];
    const Stage *const first = stage_here(tie.stage), *const other = stage_here(tie.other_stage);
    if (first != nullptr && other != nullptr) {
      const at::NoGradGuard no_grad;
      if (!other->engine) here.other.detach().copy_(tied_rows(i, here.first.detach()));
    } else if (first != nullptr || other != nullptr) {
      const bool lower = 2 * rank() < mesh_.pp->size();
      const auto rank_of = [&](int64_t stage) {
        const auto [low, high] =
            std::minmax({schedule_.rank_of(stage, 0), schedule_.rank_of(stage, schedule_.micro_batches - 1)});
        return mesh_.pp->ranks()[static_cast<size_t>(lower ? low : high)];
      };
      here.group = mesh_.world->make_group("tied", {rank_of(tie.stage), rank_of(tie.other_stage)});
      if ((first != nullptr ? first : other)->engine) continue;  // its values may have no memory now
      start_equal(*here.group, first != nullptr ? tied_rows(i, here.first.detach()) : here.other.detach());
    }
  }
}

void Pipeline::round_ties_alike() {
  for (size_t i = 0; i < ties_.size(); ++i) {
    const TiedParameter& tie = options_.tied[i];
    Stage* const other = stage_here(tie.other_stage);
    if (other == nullptr || !other->engine) continue;
    if (!tie.first_row && tie.name == tie.other_name) continue;  // the same part of the same parameter
    const int64_t width = ties_[i].other.numel() / std::max<int64_t>(1, rows_of(ties_[i].other));
    other->engine->round_as(tie.other_name, tie.name, tie.first_row.value_or(0) * width);
  }
}

/// The values of `mine` are those of the tie's first stage. A copy travels: threads of the backend may hold
/// what they have sent a moment longer, and the parameter is wrapped next, when nobody else may have its
/// memory.
void Pipeline::start_equal(comm::Group& group, const at::Tensor& mine) const {
  const at::NoGradGuard no_grad;
  at::Tensor values = at::empty(mine.sizes(), mine.options().device(mesh_.world->device())).copy_(mine);
  group.broadcast(values, 0);
  mine.copy_(values);
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

/// Copies that are frozen have no gradients.
bool Pipeline::sums(const Tie& tie) const {
  const at::Tensor& mine = tie.first.defined() ? tie.first : tie.other;
  return mine.defined() && mine.requires_grad();
}

void Pipeline::mark_tied(const StageAtWork& stage, std::vector<plan::ProgramUnit>& units) const {
  for (size_t i = 0; i < ties_.size(); ++i) {
    const TiedParameter& tie = options_.tied[i];
    if (!sums(ties_[i])) continue;
    for (const auto& [index, name] : {std::pair(tie.stage, tie.name), {tie.other_stage, tie.other_name}})
      if (index == stage.index) units[stage.engine->place_of(name).first].tied = true;
  }
}

/// The elements of sums that travel.
std::vector<int64_t> Pipeline::tied_elements() const {
  std::vector<int64_t> elements;
  for (const Tie& tie : ties_) {
    if (!sums(tie) || !tie.group) continue;
    const at::Tensor& mine = tie.first.defined() ? tie.first : tie.other;
    elements.push_back(mine.numel() / std::max<int64_t>(1, rows_of(mine)) * tie.rows);
  }
  return elements;
}

/// Before data-parallel ranks reduce: both copies get the sum of what their stages have accumulated.
void Pipeline::sum_tied() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < options_.tied.size(); ++i) {
    const TiedParameter& tie = options_.tied[i];
    Stage *const first = stage_here(tie.stage), *const other = stage_here(tie.other_stage);
    if (!sums(ties_[i])) continue;
    at::Tensor of_first, of_other;
    if (first != nullptr) of_first = tied_rows(i, first->engine->accumulated_gradient(tie.name));
    if (other != nullptr) of_other = other->engine->accumulated_gradient(tie.other_name);
    if (first != nullptr && other != nullptr) {
      of_other.copy_(of_first.add_(of_other));
    } else {
      at::Tensor& mine = first != nullptr ? of_first : of_other;
      ties_[i].group->all_reduce(mine, comm::ReduceOp::kSum);
    }
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
  TRIREME_CHECK(max_norm > 0.0, "[parallel.clip_grad_norm] max_norm is {}; give a positive number",
                number_text(max_norm));
  const double norm = grad_norm(), factor = optim::clip_factor(norm, max_norm);
  for (const auto& engine : engines_) engine->scale_gradient(factor);
  return norm;
}

}  // namespace trireme::parallel
