// Layers and sequences that are cut between ranks, and meshes of several axes, against data parallelism.
#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

Target cut(const std::string& axis, const std::string& name, std::vector<std::string> aliases,
           const std::string& summary) {
  return on_language_model(
      {.name = name,
       .chapters = {kMeshes},
       .aliases = std::move(aliases),
       .summary = summary,
       .workload = {},
       .declared = {
           .difference = "parallel." + axis,
           .expected = "less memory a rank; more time where the model fits without it",
           .arms = {{.name = "data parallel", .keys = {}},
                    {.name = axis + "=2", .keys = {"parallel." + axis + "=2"}, .owed = Owed::kSameLosses}}}});
}

Target hybrid_parallelism() {
  const auto mesh = [](const std::string& name, std::vector<std::string> keys) {
    return Arm{.name = name, .keys = std::move(keys), .owed = Owed::kSameLosses};
  };
  return on_language_model(
      {.name = "hybrid_parallelism",
       .chapters = {kAdvanced},
       .aliases = {"hybrid", "3d"},
       .summary = "Meshes of two axes, against data parallelism alone",
       .workload = {"pipeline.micro_batches=0"},
       .declared = {.difference = "the mesh",
                    .expected = "data parallelism alone takes the least time where the model fits",
                    .arms = {{.name = "dp", .keys = {}},
                             mesh("tp=2 x dp", {"parallel.tp=2"}),
                             mesh("pp=2 x dp", {"parallel.pp=2"}),
                             mesh("tp=2 x pp=2 x dp", {"parallel.tp=2", "parallel.pp=2"})}},
       .ranks = {4, 8}});
}

}  // namespace

std::vector<Target> mesh_targets() {
  return {
      cut("tp", "tensor_parallel", {"tp"}, "Layers cut in two, against data parallelism on as many ranks"),
      cut("cp", "context_parallel", {"cp"},
          "Sequences cut in two, against data parallelism on as many ranks"),
      hybrid_parallelism()};
}

}  // namespace trireme::bench
