// Layers and sequences that are cut between ranks, and meshes of several axes, against data parallelism.
#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

Arm mesh(const std::string& name, std::vector<std::string> keys) {
  return {.name = name, .keys = std::move(keys), .owed = Owed::kSameLosses};
}

Target cut(const std::string& axis, const std::string& name, const std::string& summary,
           std::vector<Arm> arms) {
  arms.insert(arms.begin(), {.name = "data parallel", .keys = {}});
  return on_language_model(
      {.name = name,
       .chapters = {kMeshes},
       .aliases = {axis},
       .summary = summary,
       .workload = {},
       .declared = {.difference = "parallel." + axis,
                    .expected = "less memory a rank; more time where the model fits without it",
                    .arms = std::move(arms)}});
}

Target hybrid_parallelism() {
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
  return {cut("tp", "tensor_parallel", "Layers cut in two, against data parallelism on as many ranks",
              {mesh("tp=2", {"parallel.tp=2"})}),
          cut("cp", "context_parallel", "Sequences cut in two, against data parallelism on as many ranks",
              {mesh("cp=2, ulysses", {"parallel.cp=2", "parallel.cp_kind=ulysses"}),
               mesh("cp=2, ring", {"parallel.cp=2", "parallel.cp_kind=ring"})}),
          hybrid_parallelism()};
}

}  // namespace trireme::bench
