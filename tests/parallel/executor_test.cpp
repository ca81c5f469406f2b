// What the engine does is what was planned: the same actions in the same order, and memory for the same
// buffers at each of them.
#include "trireme/parallel/executor.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/support/engine_on_model.h"
#include "tests/support/planned_step.h"
#include "tests/support/spawn.h"
#include "tests/support/tiny_training.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::parallel {
namespace {

using plan::ActionKind;
using plan::Role;

struct Case {
  std::string policy;
  at::ScalarType compute = at::kFloat;
  bool tied = true;
  ReduceWhen reduce_when = ReduceWhen::kOncePerStep;
  int64_t ranks = 2;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* policy : {"ddp", "zero1", "zero2", "zero3", "fsdp:shard_grad_op"}) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      for (const bool tied : {true, false}) {
        all.push_back({policy, compute, tied});
        all.push_back({policy, compute, tied, ReduceWhen::kEveryMicroBatch});
      }
    }
    all.push_back({policy, at::kBFloat16, false, ReduceWhen::kOncePerStep, 1});
    all.push_back({policy, at::kFloat, true, ReduceWhen::kOncePerStep, 3});
  }
  return all;
}

plan::ModelConfig model_of(const Case& run) {
  plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kLlama);
  config.tie_embeddings = run.tied;
  return config;
}

plan::EngineSetting setting_of(const Case& run) {
  const int64_t bytes = run.compute == at::kFloat ? 4 : 2;
  return {.policy = plan::find_policy(run.policy),
          .mesh = plan::MeshShape({1, 1, run.ranks, 1, 1}),
          .compute_bytes = bytes,
          .wire_bytes = bytes,
          .accumulation = 2,
          .reduces_once = run.reduce_when == ReduceWhen::kOncePerStep};
}

Options engine_options(const Case& run) {
  return {.policy = plan::find_policy(run.policy),
          .compute = run.compute,
          .reduce = run.compute,
          .device = at::kCPU,
          .reduce_when = run.reduce_when};
}

std::string name_of(const Case& run) {
  return fmt::format("{} {} {} {} on {}", run.policy, c10::toString(run.compute),
                     run.tied ? "tied" : "untied", run.reduce_when, run.ranks);
}

void run_case(const Case& run, const std::function<void(test::EngineOnModel& trained)>& body) {
  at::set_num_threads(1);
  const plan::ModelConfig config = model_of(run);
  const plan::ModelFacts facts = plan::describe(config, 8);
  test::run_ranks(run.ranks, [&](std::shared_ptr<comm::World> world) {
    SCOPED_TRACE(name_of(run));
    test::EngineOnModel trained(config, facts, world, engine_options(run), /*seed=*/1);
    body(trained);
  });
}

void pass(test::EngineOnModel& trained, int64_t step, bool last) {
  const at::Tensor tokens = test::tiny_tokens(step, 2, 37);
  const at::Tensor loss = trained.model->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
  last ? trained.engine.backward(loss) : trained.engine.accumulate(loss);
}

TEST(Executor, DoesWhatIsPlannedForModelsThatAnnounceTheirUnits) {
  for (const Case& run : cases()) {
    const plan::ModelFacts facts = plan::describe(model_of(run), 8);
    const plan::StepProgram planned = test::planned_step(facts.units, setting_of(run));
    plan::verify(planned);
    run_case(run, [&](test::EngineOnModel& trained) {
      EXPECT_EQ(plan::to_text(trained.engine.program()), plan::to_text(planned)) << "before the first step";
      const auto optimizer = optim::build({.lr = 1e-3}, trained.engine.optimizer_params());
      for (int64_t step = 0; step < 2; ++step) {
        pass(trained, step, false);
        pass(trained, step, true);
        trained.engine.step(*optimizer);
      }
      EXPECT_EQ(plan::to_text(trained.engine.program()), plan::to_text(planned)) << "as it was recorded";
    });
  }
}

/// What units hold now, beside what they keep from step to step.
struct Held {
  int64_t parameters = 0, gradients = 0;
  bool operator==(const Held&) const = default;
};

Held held_by(const DataParallel& engine, bool gathers) {
  Held held;
  for (const FlatUnit* unit : engine.units()) {
    const plan::StateBytes state = unit->state_bytes();
    if (gathers && unit->is_whole())
      held.parameters += static_cast<int64_t>(unit->params().front().second.storage().nbytes());
    held.gradients += state.gradients;
  }
  return held;
}

/// The same as planned: gradients with what their sum over the ranks takes.
Held planned_at(const plan::StepProgram& program, ActionKind kind, int64_t micro_batch,
                const std::string& unit, bool gathers) {
  const auto action = std::ranges::find_if(program.actions, [&](const plan::Action& candidate) {
    return candidate.kind == kind && candidate.micro_batch == micro_batch && candidate.unit >= 0 &&
           program.units[static_cast<size_t>(candidate.unit)].name == unit;
  });
  const auto held = plan::held_bytes(program)[static_cast<size_t>(action - program.actions.begin())];
  int64_t reduced = 0;
  for (const plan::Buffer& buffer : program.buffers) {
    if (buffer.role == Role::kReduced && !buffer.part_of) reduced += buffer.bytes;
  }
  return {gathers ? held[Role::kParameters] : 0, held[Role::kGradients] + reduced};
}

TEST(Executor, HoldsWhatTheProgramSaysWheneverAUnitRuns) {
  for (const Case& run : cases()) {
    const plan::ModelFacts facts = plan::describe(model_of(run), 8);
    const plan::EngineSetting setting = setting_of(run);
    const plan::StepProgram program = test::planned_step(facts.units, setting);
    run_case(run, [&](test::EngineOnModel& trained) {
      DataParallel& engine = trained.engine;
      int64_t step = 0, micro_batch = 0, checks = 0;
      const auto check = [&](ActionKind kind, const std::string& unit) {
        if (step == 0) return;  // in which what stays gets its memory
        ++checks;
        const Held held = held_by(engine, setting.gathers());
        const Held planned = planned_at(program, kind, micro_batch, unit, setting.gathers());
        EXPECT_EQ(held.parameters, planned.parameters)
            << fmt::format("{} of {} in m{}", kind, unit, micro_batch);
        EXPECT_EQ(held.gradients, planned.gradients)
            << fmt::format("{} of {} in m{}", kind, unit, micro_batch);
      };
      trained.model->set_unit_runner([&](const nn::Unit& unit, const at::Tensor& x, bool begins_pass) {
        const auto watched = [&, unit](const at::Tensor& in) {
          check(ActionKind::kForward, unit.name);
          const at::Tensor out = unit.forward(in);
          return begins_pass
                     ? out
                     : nn::call_after_backward(out, [&, unit] { check(ActionKind::kBackward, unit.name); });
        };
        return engine.run_unit(unit.name, x, watched, begins_pass);
      });
      const auto optimizer = optim::build({.lr = 1e-3}, engine.optimizer_params());
      for (step = 0; step < 2; ++step) {
        for (micro_batch = 0; micro_batch < 2; ++micro_batch) pass(trained, step, micro_batch == 1);
        engine.step(*optimizer);
      }
      const auto units = std::ssize(facts.units);
      EXPECT_EQ(checks, 2 * (units + units - 1)) << "each unit in each pass, and the root in forward only";
    });
  }
}

/// Every unit is gathered before the one in front of it computes.
plan::StepProgram gathering_one_ahead(plan::EngineSetting setting, const std::vector<plan::UnitSpec>& units) {
  setting.beside = true;
  setting.prefetch = 1;
  return test::planned_step(units, setting);
}

TEST(Executor, FollowsAProgramThatItIsGiven) {
  const Case run{.policy = "fsdp:shard_grad_op", .tied = false};
  const plan::ModelFacts facts = plan::describe(model_of(run), 8);
  std::string planned;
  for (const bool given : {false, true}) {
    run_case(run, [&](test::EngineOnModel& trained) {
      DataParallel& engine = trained.engine;
      if (given) engine.run_program(gathering_one_ahead(setting_of(run), facts.units), 2);
      int64_t ahead = 0;  // blocks that ran while the next one was whole
      trained.model->set_unit_runner([&](const nn::Unit& unit, const at::Tensor& x, bool begins_pass) {
        const auto watched = [&, unit](const at::Tensor& in) {
          const auto here =
              std::ranges::find(engine.units(), unit.name, &FlatUnit::name) - engine.units().begin();
          const auto next = static_cast<size_t>(here) + 1;
          if (here > 0 && next < engine.units().size() && engine.units()[next]->is_whole()) ++ahead;
          return unit.forward(in);
        };
        return engine.run_unit(unit.name, x, watched, begins_pass);
      });
      const auto optimizer = optim::build({.lr = 1e-3}, engine.optimizer_params());
      for (int64_t step = 0; step < 2; ++step) {
        pass(trained, step, false);
        pass(trained, step, true);
        engine.step(*optimizer);
      }
      const auto units = std::ssize(facts.units);
      // The second micro-batch of a step begins with what the first has left whole.
      EXPECT_EQ(ahead >= 2 * (units - 2), given) << ahead << " times ahead";
      const std::string digest = weights_digest(engine);
      if (engine.mesh().world->rank() != 0) return;
      if (!given) planned = digest;
      EXPECT_EQ(digest, planned);
    });
  }
}

TEST(Executor, AProgramOfOtherUnitsIsRefusedAndOneThatIsGivenKeepsItsTrainedParameters) {
  const Case run{.policy = "zero2", .tied = false};
  const plan::ModelFacts facts = plan::describe(model_of(run), 8);
  run_case(run, [&](test::EngineOnModel& trained) {
    plan::StepProgram program = test::planned_step(facts.units, setting_of(run));
    plan::StepProgram other = program;
    other.units.back().numel += 8;
    EXPECT_THROW(trained.engine.run_program(other, 2), LogicError);
    trained.engine.run_program(program, 2);
    pass(trained, 0, false);
    trained.model->parameters().front().set_requires_grad(false);
    EXPECT_THROW(pass(trained, 0, true), LogicError);
  });
}

}  // namespace
}  // namespace trireme::parallel
