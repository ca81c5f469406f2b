// The steps of docs/your_module.md, which takes its snippets from here: trireme launch -n 2 ./steps FOLDER
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <map>

#include "trireme/comm/mesh.h"
#include "trireme/parallel/wrap.h"
#include "trireme/state/state.h"
#include "trireme/state/state_file.h"

namespace comm = trireme::comm;
namespace optim = trireme::optim;
namespace parallel = trireme::parallel;
namespace state = trireme::state;
namespace plan = trireme::plan;
using torch::mse_loss;
using torch::softplus;
using torch::optim::AdamWOptions;
using Weights = std::map<std::string, at::Tensor>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(1);
    for (int i = 0; i < 4; ++i)
      blocks->push_back(
          torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::GELU(), torch::nn::Linear(64, 32)));
    register_module("blocks", blocks);
    register_module("head", head);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = x + block->as<torch::nn::Sequential>()->forward(x);
    return head(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{32, 8};
};
TORCH_MODULE(Net);

struct Batch {
  at::Tensor x, y;
  int64_t rows() const { return x.size(0); }
  std::vector<Batch> split(int64_t parts) const {
    std::vector<Batch> all;
    const auto xs = x.tensor_split(parts), ys = y.tensor_split(parts);
    for (size_t i = 0; i < xs.size(); ++i) all.push_back({xs[i], ys[i]});
    return all;
  }
};

/// Batch `number`, 12 rows of one and the same function.
Batch batch_of(uint64_t number) {
  torch::manual_seed(1000 + number);
  const at::Tensor x = at::randn({12, 32});
  return {x, x.narrow(1, 0, 8).sin() + x.narrow(1, 8, 8)};
}

/// The rows of five batches that are this rank's.
std::vector<Batch> batches_of(int64_t rank, int64_t ranks) {
  std::vector<Batch> mine;
  for (uint64_t number = 0; number < 5; ++number)
    mine.push_back(batch_of(number).split(ranks)[static_cast<size_t>(rank)]);
  return mine;
}

/// As many batches as the rank's number says, and one more.
struct Loader {
  explicit Loader(const comm::Mesh& mesh) : left(mesh.dp_rank + 1) {}
  bool has_next() const { return left > 0; }
  Batch next() { return batch_of(static_cast<uint64_t>(100 + left--)); }
  int64_t left;
};

Weights weights_of(const torch::nn::Module& module) {
  Weights weights;
  for (const auto& entry : module.named_parameters()) weights[entry.key()] = entry.value().detach().clone();
  return weights;
}

Weights single_process() {
  const std::vector<Batch> batches = batches_of(0, 1);
  // snippet: single
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    optimizer.zero_grad();
    const at::Tensor loss = mse_loss(net->forward(batch.x), batch.y);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
  }
  // end of snippet
  return weights_of(*net);
}

Weights ddp(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  // snippet: ddp
  Net net;
  const auto engine = parallel::data_parallel(*net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    const at::Tensor loss = mse_loss(net->forward(batch.x), batch.y);
    engine->backward(loss);
    engine->clip_grad_norm(1.0);
    engine->step(optimizer);
  }
  // end of snippet
  return state::full_state(*engine);
}

Weights fsdp(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  // snippet: fsdp
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    const at::Tensor loss = mse_loss(net->forward(batch.x), batch.y);
    engine->backward(loss);
    engine->clip_grad_norm(1.0);
    engine->step(optimizer);
  }
  // end of snippet
  if (mesh.world->rank() == 0) std::cout << engine->describe();
  return state::full_state(*engine);
}

Weights accumulation(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  // snippet: accumulation
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    const std::vector<Batch> parts = batch.split(2);
    engine->accumulate(mse_loss(net->forward(parts[0].x), parts[0].y));
    const at::Tensor loss = mse_loss(net->forward(parts[1].x), parts[1].y);
    engine->backward(loss);
    engine->clip_grad_norm(1.0);
    engine->step(optimizer);
  }
  // end of snippet
  return state::full_state(*engine);
}

/// Micro-batches of different sizes with their rows as weights.
Weights ragged(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    const Batch small{batch.x.narrow(0, 0, 1), batch.y.narrow(0, 0, 1)};
    const Batch large{batch.x.narrow(0, 1, batch.rows() - 1), batch.y.narrow(0, 1, batch.rows() - 1)};
    // snippet: ragged
    engine->accumulate(mse_loss(net->forward(small.x), small.y), small.rows());
    engine->backward(mse_loss(net->forward(large.x), large.y), large.rows());
    // end of snippet
    engine->clip_grad_norm(1.0);
    engine->step(optimizer);
  }
  return state::full_state(*engine);
}

/// The mean loss over the batches of all loaders, and over the same in one process.
std::pair<double, double> validation(const comm::Mesh& mesh) {
  Net net, alone;
  const auto engine = parallel::fully_shard(*net, mesh);
  Loader loader(mesh);
  // snippet: validation
  net->eval();
  double sum = 0.0, rows = 0.0;
  auto evaluation = engine->evaluate();  // or evaluate(parallel::Keep::kByUnit)
  while (evaluation.next(loader.has_next())) {
    const Batch batch = loader.next();
    sum += mse_loss(net->forward(batch.x), batch.y).item<double>() * static_cast<double>(batch.rows());
    rows += static_cast<double>(batch.rows());
  }
  const double loss = evaluation.mean(sum, rows);
  net->train();
  // end of snippet
  double wanted = 0.0, batches = 0.0;
  for (int64_t rank = 0; rank < mesh.dp->size(); ++rank) {
    for (int64_t left = rank + 1; left > 0; --left, ++batches) {
      const Batch batch = batch_of(static_cast<uint64_t>(100 + left));
      wanted += mse_loss(alone->forward(batch.x), batch.y).item<double>();
    }
  }
  return {loss, wanted / batches};
}

Weights groups(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh);
  // snippet: groups
  const auto is_bias = [](const std::string& name) { return name.ends_with("bias"); };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(engine->optimizer_tensors([&](const std::string& name) { return !is_bias(name); }),
                      std::make_unique<AdamWOptions>(AdamWOptions(1e-3).weight_decay(0.1)));
  groups.emplace_back(engine->optimizer_tensors(is_bias),
                      std::make_unique<AdamWOptions>(AdamWOptions(1e-3).weight_decay(0.0)));
  torch::optim::AdamW optimizer(groups);
  // end of snippet
  for (const Batch& batch : batches) {
    engine->backward(mse_loss(net->forward(batch.x), batch.y));
    engine->step(optimizer);
  }
  return state::full_state(*engine);
}

Weights our_optimizer(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh);
  // snippet: our_optimizer
  const auto optimizer =
      optim::adamw(engine->optimizer_params(optim::decay_matrices), {.lr = 1e-3, .weight_decay = 0.1});
  for (const Batch& batch : batches) {
    engine->backward(mse_loss(net->forward(batch.x), batch.y));
    optimizer->set_lr(1e-3);
    engine->step(*optimizer);
  }
  // end of snippet
  return state::full_state(*engine);
}

/// Stops after two batches, and goes on from the file under another policy.
Weights resumed(const comm::Mesh& mesh, const std::string& path) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  const auto train = [&](Net& net, parallel::DataParallel& engine, torch::optim::Optimizer& optimizer,
                         const Batch& batch) {
    engine.backward(mse_loss(net->forward(batch.x), batch.y));
    engine.clip_grad_norm(1.0);
    engine.step(optimizer);
  };
  {
    Net net;
    const auto engine = parallel::data_parallel(*net, mesh, {.policy = "zero2"});
    torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
    size_t step = 0;
    while (step < 2) train(net, *engine, optimizer, batches[step++]);
    // snippet: save
    state::save_state(*engine, optimizer, path, {{"step", std::to_string(step)}});
    // end of snippet
  }
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  size_t step = 0;
  // snippet: resume
  if (std::filesystem::exists(path))
    step = std::stoul(state::load_state(*engine, optimizer, path).at("step"));
  // end of snippet
  while (step < batches.size()) train(net, *engine, optimizer, batches[step++]);
  return state::full_state(*engine);
}

/// What a module without an engine reads from a file of weights.
Weights weights_from_file(const comm::Mesh& mesh, const std::string& path) {
  {
    Net net;
    const auto engine = parallel::fully_shard(*net, mesh);
    // snippet: weights
    state::save_weights(*engine, path);
    state::load_weights(*engine, path);
    // end of snippet
  }
  Net net;
  for (at::Tensor& parameter : net->parameters()) parameter.detach().zero_();
  // snippet: weights_alone
  state::load_weights(*net, path);
  // end of snippet
  return weights_of(*net);
}

/// How many steps ranks with different numbers of batches took.
int64_t uneven(const comm::Mesh& mesh) {
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  Loader loader(mesh);
  int64_t steps = 0;
  // snippet: uneven
  while (engine->any_rank(loader.has_next())) {
    if (loader.has_next()) {
      const Batch batch = loader.next();
      engine->backward(mse_loss(net->forward(batch.x), batch.y), batch.rows());
    } else {
      engine->shadow_micro_batch();
    }
    engine->step(optimizer);
    ++steps;
  }
  // end of snippet
  return steps;
}

Weights mixed_precision(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  // snippet: bf16
  Net net;
  const auto engine = parallel::fully_shard(*net, mesh, {.compute = at::kBFloat16});
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    const at::Tensor loss = mse_loss(net->forward(batch.x.to(at::kBFloat16)).to(at::kFloat), batch.y);
    engine->backward(loss);
    engine->clip_grad_norm(1.0);
    engine->step(optimizer);
  }
  // end of snippet
  return state::full_state(*engine);
}

/// The first block stays as it is, and the second one from the third step on.
Weights frozen(const comm::Mesh& mesh, size_t steps) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  const auto freeze = [](torch::nn::Module& part) {
    for (at::Tensor& parameter : part.parameters()) parameter.requires_grad_(false);
  };
  // snippet: frozen
  Net net;
  freeze(*net->blocks[0]);
  const auto engine = parallel::fully_shard(*net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  for (size_t step = 0; step < steps; ++step) {
    if (step == 2) freeze(*net->blocks[1]);
    engine->backward(mse_loss(net->forward(batches[step].x), batches[step].y));
    engine->step(optimizer);
  }
  // end of snippet
  return state::full_state(*engine);
}

void set_trainable(torch::nn::Module& part, bool on) {
  for (at::Tensor& parameter : part.parameters()) parameter.requires_grad_(on);
}

/// Weights of a generator that a discriminator judges, each with its engine.
Weights gan(const comm::Mesh& mesh) {
  const std::vector<Batch> batches = batches_of(mesh.dp_rank, mesh.dp->size());
  Net generator;
  torch::nn::Linear discriminator(8, 1);
  // snippet: gan
  const auto makes = parallel::fully_shard(*generator, mesh);
  const auto judges = parallel::data_parallel(*discriminator, mesh);
  torch::optim::AdamW maker(makes->optimizer_tensors(), AdamWOptions(1e-3));
  torch::optim::AdamW judge(judges->optimizer_tensors(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    const at::Tensor fake = generator(batch.x);
    judges->backward((softplus(discriminator(fake.detach())) + softplus(-discriminator(batch.y))).mean());
    judges->step(judge);
    set_trainable(*discriminator, false);
    makes->backward(softplus(-discriminator(fake)).mean());
    makes->step(maker);
    set_trainable(*discriminator, true);
  }
  // end of snippet
  return state::full_state(*makes);
}

/// The same in one process without engines.
Weights gan_in_one_process() {
  const std::vector<Batch> batches = batches_of(0, 1);
  Net generator;
  torch::nn::Linear discriminator(8, 1);
  torch::optim::AdamW maker(generator->parameters(), AdamWOptions(1e-3));
  torch::optim::AdamW judge(discriminator->parameters(), AdamWOptions(1e-3));
  for (const Batch& batch : batches) {
    const at::Tensor fake = generator(batch.x);
    judge.zero_grad();
    (softplus(discriminator(fake.detach())) + softplus(-discriminator(batch.y))).mean().backward();
    judge.step();
    maker.zero_grad();
    softplus(-discriminator(fake)).mean().backward();
    maker.step();
  }
  return weights_of(*generator);
}

// snippet: shared
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    register_module("in", in);
    out = register_parameter("out", in->weight);  // one tensor under two names
  }
  at::Tensor forward(const at::Tensor& tokens) { return torch::nn::functional::linear(in(tokens), out); }
  torch::nn::Embedding in{50, 16};
  at::Tensor out;
};
// end of snippet
TORCH_MODULE(Tied);

/// Whether both names are one parameter after training as they were before.
bool shared(const comm::Mesh& mesh) {
  Tied tied;
  const auto engine = parallel::fully_shard(*tied, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), AdamWOptions(1e-3));
  engine->backward(tied->forward(at::arange(10)).square().mean());
  engine->step(optimizer);
  return state::full_state(*engine).size() == 1 && engine->aliases().size() == 1;
}

bool failed = false;

void expect(bool holds, const std::string& what) {
  if (!holds) std::cerr << "failed: " << what << "\n";
  failed = failed || !holds;
}

bool close(const Weights& got, const Weights& wanted, double tolerance) {
  bool all = got.size() == wanted.size();
  for (const auto& [name, weight] : wanted)
    all = all && (got.at(name) - weight).norm().item<double>() <= tolerance * weight.norm().item<double>();
  return all;
}

void run(const comm::Mesh& mesh, const std::string& folder) {
  const Weights single = single_process(), sharded = fsdp(mesh);
  expect(close(ddp(mesh), single, 1e-5), "DDP trains as one process");
  expect(close(sharded, single, 1e-5), "FSDP trains as one process");
  expect(close(sharded, ddp(mesh), 0.0), "FSDP and DDP have the same bits");
  expect(close(accumulation(mesh), single, 1e-5), "micro-batches have the mean of the batch");
  expect(close(ragged(mesh), single, 1e-5), "weighted micro-batches have the mean of the batch");
  const auto [loss, wanted] = validation(mesh);
  expect(std::abs(loss - wanted) <= 1e-5 * wanted, "validation counts every row once");
  expect(close(groups(mesh), our_optimizer(mesh), 1e-5),
         "parameter groups of torch's optimizer and of ours agree");
  expect(close(resumed(mesh, folder + "/state"), sharded, 0.0), "a resumed run has the same bits");
  expect(close(weights_from_file(mesh, folder + "/weights"), weights_of(*Net()), 0.0),
         "weights load back unchanged");
  expect(uneven(mesh) == mesh.dp->size(), "uneven ranks end together");
  const Weights two = frozen(mesh, 2), five = frozen(mesh, 5);
  const std::string first = "blocks.0.0.weight", second = "blocks.1.0.weight", third = "blocks.2.0.weight";
  expect(at::equal(five.at(first), weights_of(*Net()).at(first)), "what was frozen before stays unchanged");
  expect(at::equal(five.at(second), two.at(second)),
         "what is frozen during training stays unchanged from then on");
  expect(!at::equal(five.at(third), two.at(third)), "the rest is trained");
  expect(close(gan(mesh), gan_in_one_process(), 1e-5), "a generator trains as in one process");
  expect(shared(mesh), "a tensor with two names is one parameter");
  expect(close(mixed_precision(mesh), single, 2e-2), "bf16 is near fp32");
}

int main(int argc, char** argv) try {
  // snippet: join
  const auto world = comm::World::join_environment();  // trireme launch, torchrun, mpirun or srun
  const auto mesh = comm::make_mesh(world, plan::MeshShape::fit({}, world->size()));
  // end of snippet
  run(mesh, argc > 1 ? argv[1] : ".");
  return failed ? 1 : 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
