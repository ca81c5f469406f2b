// What ranks of a pipeline tell each other beside messages: that they have the same schedule and batches, and
// what one of them refuses or has failed at.
#include <ATen/ATen.h>

#include <atomic>
#include <functional>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/comm/agree.h"
#include "trireme/nn/deferred_gradients.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/parallel/stage_links.h"

namespace trireme::parallel {
namespace {

using plan::Action;
using plan::Message;
using Kind = plan::ActionKind;

std::string failure_key(const std::vector<int64_t>& ranks, int64_t number) {
  return fmt::format("pipeline/{}/{}/failure", hex64(xxh3(fmt::format("{}", fmt::join(ranks, ",")))), number);
}

/// Equal for equal schedules, and exact as a double.
double fingerprint(const plan::Schedule& schedule) {
  const std::string text = fmt::format("{}{}{}", static_cast<int>(schedule.placement), schedule.spread_head,
                                       plan::to_csv(schedule));
  return static_cast<double>(std::hash<std::string>()(text) >> 12);
}

/// Equal for equal weights, and exact as a double; -1: none.
double fingerprint(const std::vector<double>& weights) {
  if (weights.empty()) return -1.0;
  const std::string_view bytes(reinterpret_cast<const char*>(weights.data()),
                               weights.size() * sizeof(double));
  return static_cast<double>(std::hash<std::string_view>()(bytes) >> 12);
}

/// `rows` are what each rank was given, as Pipeline::agree() gathers it. Ranks of a pipeline have the same
/// weights, and as many rows of targets as of inputs; whoever sees a difference throws, which are all.
void check_alike(const std::vector<std::vector<double>>& rows, const comm::Mesh& mesh) {
  constexpr size_t kInputs = 0, kTargets = 1, kWeights = 2, kCount = 3;
  struct PipelineRows {
    std::optional<size_t> any, inputs, targets;  ///< the first rank of it, and the first with either
  };
  // Ranks along cp have other tokens, and so other weights: each has a pipeline of its own.
  const plan::MeshShape data = mesh.shape.of_engine();
  std::vector<PipelineRows> pipelines(static_cast<size_t>(data.dp_size()));
  const auto& ranks = mesh.all->ranks();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i][kCount] != rows[0][kCount]) {
      throw LogicError(
          "[parallel.pipeline] rank {} was given {} micro-batches, rank {} {}; give all ranks as many, with "
          "a "
          "weight of 0 where there is nothing more",
          ranks[i], rows[i][kCount], ranks[0], rows[0][kCount]);
    }
    PipelineRows& here = pipelines[static_cast<size_t>(data.dp_rank(ranks[i]))];
    if (!here.any) here.any = i;
    if (!here.inputs && rows[i][kInputs] >= 0.0) here.inputs = i;
    if (!here.targets && rows[i][kTargets] >= 0.0) here.targets = i;
  }
  const auto check_samples = [&](std::optional<size_t> inputs, std::optional<size_t> targets) {
    if (!inputs || !targets || rows[*inputs][kInputs] < 0.0 || rows[*targets][kTargets] < 0.0) return;
    if (rows[*inputs][kInputs] == rows[*targets][kTargets]) return;
    throw ConfigError(
        "[parallel.pipeline] rank {} was given {} rows of inputs, and rank {} {} of targets; give both the "
        "same samples",
        ranks[*inputs], rows[*inputs][kInputs], ranks[*targets], rows[*targets][kTargets]);
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const PipelineRows& here = pipelines[static_cast<size_t>(data.dp_rank(ranks[i]))];
    const size_t first = *here.any;
    if (rows[i][kWeights] != rows[first][kWeights]) {
      const char* const how = rows[i][kWeights] < 0.0 || rows[first][kWeights] < 0.0 ? "no" : "other";
      const bool first_has = rows[first][kWeights] >= 0.0;
      throw LogicError(
          "[parallel.pipeline] rank {} was given weights of micro-batches, and rank {} of the same pipeline "
          "{} ones; give all of them the same",
          ranks[first_has ? first : i], ranks[first_has ? i : first], how);
    }
    check_samples(i, here.targets);
    check_samples(here.inputs, i);
  }
}

}  // namespace

/// Ranks that run different schedules would wait for each other in vain. They also agree on a place of this
/// pipeline's own to tell why a step has failed.
void Pipeline::agree_on_schedule() {
  static std::atomic<int64_t> made = 0;  // ranks that are threads count together
  int64_t number = made++;
  failure_key_ = failure_key(mesh_.all->ranks(), number);
  if (mesh_.all->size() == 1) return;
  const auto rows = comm::gather_scalars(
      *mesh_.all, {static_cast<double>(number), fingerprint(schedule_), static_cast<double>(options_.ahead)});
  for (size_t i = 0; i < rows.size(); ++i) {
    number = std::max(number, static_cast<int64_t>(rows[i][0]));
    if (rows[i][1] == rows[0][1] && rows[i][2] == rows[0][2]) continue;
    throw ConfigError(
        "[parallel.pipeline] rank {} was given another schedule, or other receive buffers than rank {}; "
        "this one has {} of {} micro-batches and {} ahead; give all ranks the same",
        mesh_.all->ranks()[i], mesh_.all->ranks()[0], schedule_.name, schedule_.micro_batches,
        options_.ahead);
  }
  failure_key_ = failure_key(mesh_.all->ranks(), number);
}

void Pipeline::check_usable() const {
  if (broken_.empty()) return;
  throw LogicError(
      "[parallel.pipeline] rank {}: a step has failed and ranks are at different places ({}); start again "
      "from "
      "saved weights",
      mesh_.world->rank(), broken_);
}

void Pipeline::check_batch(const Batch& batch, const plan::Schedule& schedule) const {
  const int64_t rank = mesh_.world->rank();
  const auto count = static_cast<size_t>(schedule.micro_batches);
  const auto check_count = [&](const std::vector<at::Tensor>& given, bool used, const char* what) {
    const auto there = static_cast<size_t>(std::ranges::count_if(given, &at::Tensor::defined));
    TRIREME_CHECK(
        !used || (there == count && given.size() == count),
        "[parallel.pipeline] rank {} was given {} micro-batches of {}, the schedule has {}; give as "
        "many",
        rank, there, what, count);
  };
  check_count(batch.inputs, stages_.front().index == 0, "inputs");
  check_count(batch.targets, batch.has_targets && uses_targets(), "targets");
  TRIREME_CHECK(batch.weights.empty() || batch.weights.size() == count,
                "[parallel.pipeline] rank {} was given {} weights for {} micro-batches", rank,
                batch.weights.size(), count);
}

/// Ranks that go on while another one refuses would wait for it until the deadline. On a GPU the host would
/// wait for the device in each step, so it tells others that have begun instead.
void Pipeline::agree(Before what, const Batch& batch, const std::exception_ptr& refusal) {
  const bool forwards = what == Before::kForwards;
  const bool alone = mesh_.all->size() == 1;
  const bool each_step = options_.agrees_each_step.value_or(mesh_.world->device().is_cpu());
  if (alone || !(forwards || !step_agreed_ || each_step)) {
    if (refusal && !alone) fail(fmt::format("rank {} refuses a step", mesh_.world->rank()), refusal);
    if (refusal) std::rethrow_exception(refusal);
    return;
  }
  const double count = forwards ? static_cast<double>(batch.inputs.size()) : 0.0;  // a step checks it
  std::vector<double> mine = {static_cast<double>(batch.rows[0]), static_cast<double>(batch.rows[1]),
                              fingerprint(batch.weights), count};
  const auto given = std::ssize(mine);
  const std::vector<double> frozen = frozen_ties();
  mine.insert(mine.end(), frozen.begin(), frozen.end());
  auto rows = gather_unless_refused(refusal, std::move(mine));
  check_alike(rows, mesh_);
  if (forwards) return;  // no gradients
  for (auto& row : rows) row.erase(row.begin(), row.begin() + given);
  check_ties(rows, mesh_.all->ranks());
}

std::vector<std::vector<double>> Pipeline::gather_unless_refused(const std::exception_ptr& refusal,
                                                                 std::vector<double> mine) {
  return comm::gather_or_throw(*mesh_.all, std::move(mine), refusal, "parallel.pipeline");
}

/// A message names the stage that takes it, or the part of the head that it is from.
int64_t Pipeline::maker_of(const Action& message) const {
  switch (message.message) {
    case Message::kActivation:
      return message.stage - 1;
    case Message::kGradient:
      return message.stage + 1;
    case Message::kPart:
      return message.stage;
    case Message::kHidden:
    case Message::kTotals:
      break;
  }
  return schedule_.stages - 1;
}

/// "stage 2 on rank 2 in 'forward 2F3', on (4, 8) Float of stage 1".
std::string Pipeline::in_words(const Action* action) const {
  if (action == nullptr) return fmt::format("rank {} at the end of a step", mesh_.world->rank());
  std::string text = fmt::format("stage {} on rank {} in '{}'",
                                 action->kind == Kind::kSend ? maker_of(*action) : action->stage,
                                 mesh_.world->rank(), plan::stage_text(*action));
  const auto pass = in_flight_.find({action->stage, action->micro_batch});
  if (action->kind == Kind::kForward && action->stage > 0 && pass != in_flight_.end()) {
    const at::Tensor& input = pass->second.input;
    text += fmt::format(", on ({}) {} of stage {}", fmt::join(input.sizes(), ", "),
                        c10::toString(input.scalar_type()), action->stage - 1);
  }
  return text;
}

/// Ranks that wait for this one are told why, and that it will not come.
void Pipeline::fail(const std::string& where, const std::exception_ptr& error) {
  const auto [code, cause] = comm::code_and_text(error);
  std::string text = fmt::format("[parallel.pipeline] {}: {}", where, cause);
  const std::string told = mesh_.world->announced(failure_key_);
  if (told.empty()) {
    mesh_.world->announce(failure_key_, text);
  } else {
    text += fmt::format("; before that: {}", told);
  }
  broken_ = text;
  in_flight_.clear();
  arrived_.clear();
  leaving_.clear();
  deferred_.clear();
  batch_ = {};
  finish_ = {};
  for (const auto& engine : engines_) engine->skip_step();
  // While the error is on its way, so that links do not wait until everything has left.
  struct Close {
    ~Close() { links.close(); }
    StageLinks& links;
  } const close{*links_};
  if (code == ExitCode::kCommunication) throw CommError("{}", text);
  throw Error(code, text);
}

}  // namespace trireme::parallel
