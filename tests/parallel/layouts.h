#pragma once
// Layouts that a test goes through: policies, units and numbers of ranks that shall not differ in what a user
// sees.
#include <ATen/Parallel.h>

#include <string>
#include <vector>

#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"

namespace trireme::test {

struct Layout {
  const char* policy;
  bool one_unit = false;  ///< all blocks in one, or one bucket; else each block its own
  int64_t replicas = 1;

  std::string label(int64_t ranks, at::ScalarType compute = at::kFloat) const {
    return fmt::format("{}{}, {} replicas on {} ranks, {}", policy, one_unit ? " in one unit" : "", replicas,
                       ranks, c10::toString(compute));
  }
};

inline std::vector<Layout> layouts(int64_t ranks) {
  std::vector<Layout> all = {{"ddp"},        {"ddp", true},         {"zero1"}, {"zero2"}, {"fsdp"},
                             {"fsdp", true}, {"fsdp:shard_grad_op"}};
  if (ranks == 2) all.push_back({"fsdp:hybrid_shard", false, 2});
  return all;
}

inline comm::Mesh mesh_of(const std::shared_ptr<comm::World>& world, const Layout& layout) {
  plan::ParallelConfig axes;
  axes.dp_replicate = layout.replicas;
  return comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
}

inline std::unique_ptr<parallel::DataParallel> wrap_as(Net& net, const comm::Mesh& mesh, const Layout& layout,
                                                       at::ScalarType compute = at::kFloat) {
  parallel::WrapOptions options{.policy = layout.policy, .compute = compute, .reduce = compute};
  options.bucket_mib = layout.one_unit ? 25.0 : 0.0005;
  if (layout.one_unit && plan::find_policy(layout.policy).shard_parameters) options.blocks = {"blocks"};
  return wrap(net, mesh, options);
}

/// The backward pass of step `step` on this rank's rows.
inline void backward_of(const Net& net, parallel::DataParallel& engine, int64_t step) {
  const int64_t ranks = engine.mesh().dp->size();
  const auto rank = static_cast<size_t>(engine.mesh().dp_rank);
  const at::ScalarType dtype = engine.units()[0]->params().front().second.scalar_type();
  const at::Tensor x = inputs(step).chunk(ranks)[rank].to(dtype),
                   y = targets(step).chunk(ranks)[rank].to(dtype);
  const auto rows = static_cast<double>(x.size(0));
  engine.backward(loss_sum(net, x, y) / rows, rows);
}

/// Steps [first, last) of training with an optimizer of ours or of torch.
template <typename Optimizer>
void train_steps(const Net& net, parallel::DataParallel& engine, Optimizer& optimizer, int64_t first,
                 int64_t last) {
  for (int64_t step = first; step < last; ++step) {
    backward_of(net, engine, step);
    engine.step(optimizer);
  }
}

/// Whether both have the same bits under the same names.
inline void expect_equal(const Weights& got, const Weights& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (const auto& [name, weight] : wanted) {
    ASSERT_TRUE(got.contains(name)) << what << ": " << name;
    EXPECT_TRUE(at::equal(got.at(name), weight)) << what << ": " << name;
  }
}

/// The words that what `call` throws holds.
template <typename Thrown = std::exception, typename Call>
void expect_thrown(const Call& call, const std::vector<std::string>& words, const std::string& what = {}) {
  try {
    call();
    ADD_FAILURE() << what << ": nothing was thrown";
  } catch (const Thrown& error) {
    for (const auto& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << what << ": " << word << " in " << std::string(error.what()).substr(0, 600);
  }
}

}  // namespace trireme::test
