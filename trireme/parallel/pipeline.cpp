#include "trireme/parallel/pipeline.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/base/error_of.h"
#include "trireme/parallel/module_parameters.h"
#include "trireme/parallel/pipeline_recorder.h"
#include "trireme/parallel/stage_links.h"
#include "trireme/plan/stage_program.h"

namespace trireme::parallel {
namespace {

using plan::Placement;
using Kind = plan::ActionKind;

}  // namespace

/// The gradient of a stage that two ranks have is the sum of both.
comm::Mesh stage_mesh(const plan::Schedule& schedule, const comm::Mesh& mesh) {
  if (schedule.placement != Placement::kTwoWays) return mesh;
  const int64_t other = mesh.pp->size() - 1 - mesh.pp_rank;
  const auto both = [&](const std::vector<plan::Axis>& axes) {
    std::vector<int64_t> ranks;
    for (const int64_t pp_rank : {std::min(mesh.pp_rank, other), std::max(mesh.pp_rank, other)}) {
      auto place = mesh.shape.coordinates(mesh.world->rank());
      place[static_cast<size_t>(plan::Axis::kPp)] = pp_rank;
      const auto group = mesh.shape.group(mesh.shape.rank(place), axes);
      ranks.insert(ranks.end(), group.begin(), group.end());
    }
    return ranks;
  };
  // In the numbers of its axes a copy is a replica.
  std::array<int64_t, plan::kAxes> sizes{};
  for (size_t axis = 0; axis < plan::kAxes; ++axis)
    sizes[axis] = mesh.shape.size(static_cast<plan::Axis>(axis));
  sizes[static_cast<size_t>(plan::Axis::kPp)] /= 2;
  sizes[static_cast<size_t>(plan::Axis::kDpReplicate)] *= 2;
  comm::Mesh result = mesh;
  result.shape = plan::MeshShape(sizes);
  result.dp = mesh.world->make_group("both_ways",
                                     both({plan::Axis::kDpReplicate, plan::Axis::kDpShard, plan::Axis::kCp}));
  result.replicate = mesh.world->make_group("both_ways_replicate", both({plan::Axis::kDpReplicate}));
  result.stage = result.dp;
  if (mesh.tp->size() > 1)
    result.stage = mesh.world->make_group(
        "both_ways_stage",
        both({plan::Axis::kDpReplicate, plan::Axis::kDpShard, plan::Axis::kCp, plan::Axis::kTp}));
  result.dp_rank = result.dp->rank();
  return result;
}

Pipeline::Pipeline(plan::Schedule schedule, std::vector<Stage> stages, StageLoss loss, const comm::Mesh& mesh,
                   const PipelineOptions& options)
    : schedule_(std::move(schedule)), loss_(std::move(loss)), mesh_(mesh), options_(options) {
  check_mesh();
  agree_on_schedule();
  actions_ = plan::lower(schedule_, rank(), options_.ahead);
  check_sends();
  const auto refusal = error_of([&] {
    take_stages(std::move(stages));
    find_ties();
  });
  take_tied_copies(gather_unless_refused(refusal, tied_copies()));
  stage_mesh_ = stage_mesh(schedule_, mesh_);
  make_ties();
  make_engines_together();
  if (options_.program) {
    for (const auto& engine : engines_) engine->programs_.pin();
    take_program(*options_.program);
  } else {
    write_program();
  }
  links_ = std::make_unique<StageLinks>(*mesh_.world, mesh_.pp->ranks(), program_->actions);
  record(options_.record);
}

Pipeline::~Pipeline() {
  in_flight_.clear();
  end_engines();
}

/// One after the other: giving parameters back is collective where they are sharded.
void Pipeline::end_engines() {
  for (auto& engine : engines_) engine.reset();
  for (StageAtWork& stage : stages_) stage.engine.reset();
}

void Pipeline::check_mesh() const {
  const int64_t pp = mesh_.shape.size(plan::Axis::kPp);
  const auto ranks = static_cast<int64_t>(schedule_.ranks.size());
  if (pp == ranks) return;
  throw ConfigError(
      "[parallel.pipeline] the schedule {} has {} ranks, but the mesh ({}) gives {} to pp and {} to data "
      "parallelism; set parallel.pp={} or make the schedule for {} ranks",
      schedule_.name, ranks, mesh_.shape.to_string(), pp, mesh_.shape.dp_size(), ranks, pp);
}

/// A rank that waits until its message has left waits for the one that takes it.
void Pipeline::check_sends() const {
  if (!options_.blocking_sends) return;
  std::vector<plan::StageActions> programs;
  for (int64_t each = 0; each < std::ssize(schedule_.ranks); ++each)
    programs.push_back(plan::lower(schedule_, each, options_.ahead));
  try {
    plan::check_programs(schedule_, programs, plan::Sends::kWhenPosted);
  } catch (const LogicError& error) {
    throw ConfigError(
        "[parallel.pipeline] with sends that block, the ranks of {} would wait for each other: {}; do not "
        "block, or set PipelineOptions::ahead above {}",
        schedule_.name, error.what(), options_.ahead);
  }
}

void Pipeline::take_stages(std::vector<Stage> stages) {
  std::ranges::sort(stages, {}, &Stage::index);
  const std::vector<int64_t> wanted = schedule_.stages_of(rank());
  std::vector<int64_t> given;
  for (const Stage& stage : stages) given.push_back(stage.index);
  TRIREME_CHECK(wanted == given,
                "[parallel.pipeline] rank {} was given stages {}, but has {} of the {} stages of {}", rank(),
                fmt::join(given, ", "), fmt::join(wanted, ", "), schedule_.all_stages(), schedule_.name);
  for (Stage& stage : stages) {
    const bool is_part = schedule_.is_head_part(stage.index);
    TRIREME_CHECK(stage.module && (is_part ? stage.part != nullptr : stage.forward != nullptr),
                  "[parallel.pipeline] stage {} has no {}", stage.index,
                  !stage.module ? "module"
                  : is_part     ? "function of a part of the head"
                                : "forward function");
    stages_.push_back({std::move(stage)});
  }
  TRIREME_CHECK(loss_ || !makes_loss(stages_.back().index),
                "[parallel.pipeline] the last stage has no loss function");
  std::map<const c10::TensorImpl*, int64_t> owners;
  for (const StageAtWork& stage : stages_) {
    for (const ModuleParameter& param : module_parameters(*stage.module)) {
      const auto [owner, is_new] = owners.emplace(param.tensor.unsafeGetTensorImpl(), stage.index);
      TRIREME_CHECK(
          is_new,
          "[parallel.pipeline] stages {} and {} of rank {} have one parameter, which stage {} calls {}; "
          "give each stage a module of its own, and list copies that shall stay equal in "
          "PipelineOptions::tied",
          owner->second, stage.index, rank(), stage.index, param.name);
    }
  }
}

Pipeline::StageAtWork* Pipeline::stage_here(int64_t index) {
  const auto found = std::ranges::find(stages_, index, &StageAtWork::index);
  return found == stages_.end() ? nullptr : &*found;
}

/// What one rank refuses of its modules all do. Modules have their parameters back then.
void Pipeline::make_engines_together() {
  const auto mine = error_of([&] { make_engines(); });
  const auto refusal = error_of([&] { gather_unless_refused(mine, {}); });
  if (!refusal) return;
  end_engines();
  std::rethrow_exception(refusal);
}

void Pipeline::make_engines() {
  const std::string& policy = options_.data_parallel.policy;
  const bool shards = !policy.empty() && plan::find_policy(policy).shard_parameters;
  for (StageAtWork& stage : stages_) {
    if (!stage.engine && !stage.module->parameters().empty()) {
      stage.engine = shards ? fully_shard(*stage.module, stage_mesh_, options_.data_parallel)
                            : data_parallel(*stage.module, stage_mesh_, options_.data_parallel);
    }
    if (stage.engine) engines_.push_back(stage.engine);
  }
  round_ties_alike();
}

bool Pipeline::is_tied(int64_t stage) const {
  return std::ranges::any_of(options_.tied, [stage](const TiedParameter& tie) {
    return tie.stage == stage || tie.other_stage == stage;
  });
}

/// Whether the program is made of what engines do now.
bool Pipeline::is_written() const {
  return std::ranges::all_of(stages_, [](const StageAtWork& stage) {
    return !stage.engine || stage.engine->programs_.version() == stage.written_version;
  });
}

void Pipeline::write_program() {
  std::vector<plan::ProgramStage> stages;
  for (StageAtWork& stage : stages_) {
    plan::ProgramStage& part = stages.emplace_back();
    part.index = stage.index;
    part.tied = is_tied(stage.index);
    if (!stage.engine) continue;
    const EnginePrograms& programs = stage.engine->programs_;
    part.units = programs.units();
    mark_tied(stage, part.units);
    part.setting = programs.setting();
    part.order = programs.order();
  }
  take_program(plan::stage_program(schedule_, actions_, stages, plan::MessageBytes(), tied_elements()));
}

void Pipeline::take_program(plan::StepProgram program) {
  program_ = std::make_shared<const plan::StepProgram>(std::move(program));
  int64_t units = 0;
  for (StageAtWork& stage : stages_) {
    stage.first_unit = units;
    stage.last_backward.reset();
    if (!stage.engine) continue;
    units += std::ssize(stage.engine->programs_.units());
    stage.written_version = stage.engine->programs_.version();
  }
  TRIREME_CHECK(units == std::ssize(program_->units),
                "[parallel.pipeline] the program of rank {} is for {} units, but its stages have {}", rank(),
                program_->units.size(), units);
  for (const plan::Pass& pass : program_->passes) {
    StageAtWork& stage = *stage_here(pass.stage);
    if (pass.kind == plan::Pass::Kind::kBackward) stage.last_backward = pass.micro_batch;
    if (pass.kind == plan::Pass::Kind::kReduce) stage.last_backward.reset();
    if (pass.kind == plan::Pass::Kind::kUpdate && stage.engine)
      stage.engine->programs_.give_update({program_, &pass, stage.first_unit});
  }
}

void Pipeline::step(const Optimizers& optimizers) {
  check_usable();
  TRIREME_CHECK(optimizers.size() == engines_.size(),
                "[parallel.pipeline] {} optimizers for {} stages with parameters; make them by optimizers()",
                optimizers.size(), engines_.size());
  const PipelineRecorder::Span span(recorder_.get(), Kind::kUpdate);
  for (size_t i = 0; i < engines_.size(); ++i) engines_[i]->step(*optimizers[i]);
}

void Pipeline::flush() {
  links_->flush();
}

int64_t Pipeline::sent_bytes() const {
  int64_t bytes = links_->sent_bytes();
  for (const Tie& tie : ties_) {
    if (!tie.group) continue;
    const auto traffic = tie.group->traffic();
    const auto sums = traffic.find(plan::Collective::kAllReduce);
    if (sums != traffic.end()) bytes += sums->second.bytes;
  }
  return bytes;
}

int64_t Pipeline::buffer_bytes() const {
  return links_->buffer_bytes();
}

void Pipeline::skip_step() {
  for (const auto& engine : engines_) engine->skip_step();
}

Pipeline::Optimizers Pipeline::optimizers(
    const std::function<std::unique_ptr<optim::Optimizer>(std::vector<optim::FlatParam>)>& make) {
  Optimizers made;
  for (const auto& engine : engines_) made.push_back(make(engine->optimizer_params()));
  return made;
}

}  // namespace trireme::parallel
