// A transformer of one's own in pipeline stages whose layers are cut over ranks, against the plain one in one
// process.
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <string>
#include <vector>

#include "tests/parallel/own_transformer.h"
#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/schedule.h"

namespace trireme::test {
namespace {

using comm::World;
using parallel::Rows;

/// Half of a CutTransformer: what comes before its second block, or the rest.
struct Half : torch::nn::Module {
  Half(std::shared_ptr<CutTransformer> of, bool is_first) : net(std::move(of)), first(is_first) {
    if (first) register_module("words", net->words);
    if (first) register_module("places", net->places);
    register_module("block", net->blocks->ptr(first ? 0 : 1));
    if (!first) register_module("norm", net->norm);
    if (!first) register_module("head", net->head);
  }
  at::Tensor forward(at::Tensor x) {
    if (first) {
      x = net->words->forward(x) + net->places(at::arange(x.size(1)));
      if (net->splits) x = net->split.forward(x);
    }
    x = net->blocks->ptr(first ? 0 : 1)->as<CutTransformer::Block>()->forward(x);
    return first ? x : net->head->forward(net->norm(x));
  }
  std::shared_ptr<CutTransformer> net;
  bool first;
};

/// The name of a parameter of a half in the whole.
std::string name_in_whole(const std::string& name, bool first) {
  return name.starts_with("block.") ? "blocks." + std::string(first ? "0" : "1") + name.substr(5) : name;
}

struct PlainSteps {
  Weights weights;
  std::vector<double> losses, norms;
};

PlainSteps plain_steps() {
  const auto net = seeded([] { return std::make_shared<PlainTransformer>(); });
  PlainSteps made;
  for (int64_t step = 0; step < kSteps; ++step) {
    net->zero_grad();
    const at::Tensor loss = net->loss(words_at(step), drawn_words(step, 900));
    loss.backward();
    made.losses.push_back(loss.item<double>());
    made.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5));
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : net->parameters()) param.sub_(param.grad() * 0.3);
  }
  made.weights = copies(parameters_of(*net));
  return made;
}

TEST(OwnTransformer, TrainsInStagesOfCutLayersAsThePlainOne) {
  const PlainSteps plain = plain_steps();
  for (const Rows rows : {Rows::kAll, Rows::kSplit}) {
    for (const char* policy : {"ddp", "fsdp"}) {
      run_ranks(4, [&](std::shared_ptr<World> world) {
        plan::ParallelConfig axes;
        axes.pp = axes.tp = 2;
        const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit(axes, 4));
        const auto schedule = plan::make_schedule(plan::ScheduleName::k1F1B, {2, 2});
        const bool first = mesh.pp_rank == 0;
        const auto net = seeded([&] { return std::make_shared<CutTransformer>(mesh.tp, rows); });
        const auto half = std::make_shared<Half>(net, first);
        const auto loss = [&](const at::Tensor& logits, const at::Tensor& wanted) {
          return net->cross_entropy.forward(logits, wanted);
        };
        parallel::Pipeline pipeline(schedule, {parallel::make_stage(mesh.pp_rank, half)}, loss, mesh,
                                    {.data_parallel = {.policy = policy}});
        const auto optimizers =
            pipeline.optimizers([](auto params) { return optim::build(descent(0.3), std::move(params)); });
        for (int64_t step = 0; step < kSteps; ++step) {
          const auto at_step = static_cast<size_t>(step);
          const at::Tensor mean = pipeline.forward_backward(words_at(step), drawn_words(step, 900));
          EXPECT_NEAR(mean.item<double>(), plain.losses[at_step], 1e-5 * plain.losses[at_step]);
          EXPECT_NEAR(pipeline.clip_grad_norm(0.5), plain.norms[at_step], 1e-4 * plain.norms[at_step]);
          pipeline.step(optimizers);
        }
        for (const auto& [name, weight] : weights_of(*pipeline.engines().front())) {
          const std::string whole = name_in_whole(name, first);
          EXPECT_LT(relative_error(weight, plain.weights.at(whole)), 1e-5) << policy << ": " << whole;
        }
      });
    }
  }
}

}  // namespace
}  // namespace trireme::test
