// Trains under FSDP, saves, and goes on from there when it is called again, on any number of ranks:
// trireme launch -n 2 ./fsdp_checkpoint FOLDER 6, then trireme launch -n 3 ./fsdp_checkpoint FOLDER 12
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

#include "residual_mlp.h"
#include "trireme/parallel/wrap.h"
#include "trireme/state/state_file.h"

namespace comm = trireme::comm;
namespace parallel = trireme::parallel;
namespace state = trireme::state;

/// Parameters, buffers and moments, in one file whatever shards them. The notes say what they were.
void save(parallel::DataParallel& engine, trireme::optim::Optimizer& optimizer, const std::string& path,
          int64_t step) {
  const std::string weights = parallel::weights_digest(engine);
  state::save_state(engine, optimizer, path, {{"step", std::to_string(step)}, {"weights", weights}});
  if (engine.mesh().world->rank() == 0) fmt::print("step {}: saved weights {}\n", step, weights);
}

/// Returns the step. Throws std::runtime_error when the weights are not those that were saved.
int64_t resume(parallel::DataParallel& engine, trireme::optim::Optimizer& optimizer,
               const std::string& path) {
  const state::Notes notes = state::load_state(engine, optimizer, path);
  const std::string weights = parallel::weights_digest(engine);
  if (engine.mesh().world->rank() == 0)
    fmt::print("step {}: {} ranks resume with weights {}\n", notes.at("step"), engine.mesh().world->size(),
               weights);
  if (weights != notes.at("weights"))
    throw std::runtime_error("the weights differ from those that were saved: " + notes.at("weights"));
  return std::stol(notes.at("step"));
}

double loss_of(ResidualMlp& net, const comm::Mesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto [x, y] = samples(-1, 64, mesh);
  return at::cross_entropy_loss(net.forward(x), y).item<double>();
}

/// The weights alone serve a network that no engine has, in one process: for inference, or from Python.
void export_weights(parallel::DataParallel& engine, ResidualMlp& net, const std::string& path) {
  state::save_weights(engine, path);
  double in_engine = 0.0;
  {
    const parallel::DataParallel::Held held(engine);
    in_engine = loss_of(net, engine.mesh());
  }
  ResidualMlp alone;
  state::load_weights(alone, path);
  alone.to(engine.mesh().world->device());
  const double on_its_own = loss_of(alone, engine.mesh());
  if (on_its_own != in_engine)
    throw std::runtime_error(
        fmt::format("{}: loss {} with an engine, {} without", path, in_engine, on_its_own));
  if (engine.mesh().world->rank() == 0)
    fmt::print("{}: loss {:.4f}, also without an engine\n", path, on_its_own);
}

int main(int argc, char** argv) try {
  if (argc != 3) throw std::invalid_argument("usage: fsdp_checkpoint FOLDER STEPS");
  const std::string folder = argv[1], state = folder + "/state.safetensors";
  const auto world = comm::World::join_environment();
  const auto mesh = comm::make_mesh(world, trireme::plan::MeshShape::fit({}, world->size()));
  at::manual_seed(1);
  ResidualMlp net;
  const auto engine = parallel::fully_shard(net, mesh);
  const auto optimizer = trireme::optim::adamw(engine->optimizer_params(), {.lr = 1e-3});
  int64_t step = std::filesystem::exists(state) ? resume(*engine, *optimizer, state) : 0;
  for (; step < std::stol(argv[2]); ++step) {
    const auto [x, y] = samples(step, 48, mesh);
    engine->backward(at::cross_entropy_loss(net.forward(x), y));
    engine->clip_grad_norm(1.0);
    engine->step(*optimizer);
  }
  save(*engine, *optimizer, state, step);
  export_weights(*engine, net, folder + "/weights.safetensors");
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
