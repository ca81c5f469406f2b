#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/tiny_training.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/state/state_file.h"

namespace trireme::train {
namespace {

std::string scratch(const std::string& name) {
  const auto folder = std::filesystem::temp_directory_path() / "trireme-weights-test";
  std::filesystem::create_directories(folder);
  return (folder / name).string();
}

TEST(Weights, OfShardedRunsLoadIntoAPlainModel) {
  const plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kLlama);
  const plan::ModelFacts facts = plan::describe(config, 8);
  const std::string path = scratch("sharded.safetensors");
  test::run_ranks(3, [&](std::shared_ptr<comm::World> world) {
    const auto sharded = nn::build(config);
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 3));
    parallel::DataParallel engine(*sharded, facts.units, mesh, {.policy = plan::find_policy("fsdp")},
                                  nn::InitialWeights(config, 5));
    state::save_weights(engine, path);
  });
  const auto loaded = nn::build(config);
  state::load_weights(*loaded, path);
  const auto expected = nn::build(config);
  nn::InitialWeights(config, 5).fill(*expected);
  for (const auto& entry : expected->named_parameters()) {
    EXPECT_TRUE(at::equal(entry.value(), loaded->named_parameters()[entry.key()])) << entry.key();
  }
}

TEST(Weights, OfAnotherModelAreRefused) {
  const std::string path = scratch("other.safetensors");
  checkpoint::SafetensorsWriter writer(path, {{"embed.weight", {at::kFloat, {2, 2}}}}, {});
  writer.write("embed.weight", at::ones({2, 2}));
  writer.commit();
  EXPECT_THROW(state::load_weights(*nn::build(test::tiny_model(plan::ModelFamily::kMlp)), path), DataError);
  EXPECT_THROW(state::load_weights(*nn::build(test::tiny_model(plan::ModelFamily::kGpt2)), path), DataError);
}

}  // namespace
}  // namespace trireme::train
