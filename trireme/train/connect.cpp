#include "trireme/train/connect.h"

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "trireme/memory/recompute.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/model_facts.h"
#include "trireme/train/fp8.h"

namespace trireme::train {
namespace {

/// Names of the blocks that backward computes again, and of their halves. What comes before them and the head
/// are none.
std::set<std::string> recomputed_blocks(nn::Model& model, const plan::MemoryConfig& memory) {
  std::set<std::string> names;
  if (!plan::computes_blocks_again(memory.recompute)) return names;
  const std::vector<nn::Unit> units = model.units();
  const auto every = static_cast<size_t>(memory.recompute_every);
  for (size_t unit = 1; unit + 1 < units.size(); unit += every) {
    for (const char* half : {"", plan::kAttentionHalf, plan::kMlpHalf}) names.insert(units[unit].name + half);
  }
  return names;
}

nn::UnitForward again_in_backward(const nn::Unit& unit) {
  return [forward = unit.forward, draws = unit.draws, again = unit.again](const at::Tensor& x) {
    return memory::recomputed(x, forward, draws, again);
  };
}

/// The same, where the unit can, with the output of its attention kept.
nn::UnitForward again_but_for_attention(const nn::Unit& unit) {
  if (!unit.keeping) return again_in_backward(unit);
  return [keeping = unit.keeping, draws = unit.draws](const at::Tensor& x) {
    const auto pass = [&keeping, kept = std::make_shared<nn::KeptAttention>()](nn::Output output) {
      return [keeping, kept, output](const at::Tensor& in) { return keeping(in, output, *kept); };
    };
    return memory::recomputed(x, pass(nn::Output::kRead), draws, pass(nn::Output::kUnread));
  };
}

}  // namespace

void connect(nn::Model& model, parallel::DataParallel& engine, const plan::MemoryConfig& memory,
             const plan::Fp8Config& fp8, const nn::Fp8History* history) {
  model.recompute_cheap(memory.recompute == plan::Recompute::kCheap ? memory.recompute_every : 0);
  if (const auto recipe = recipe_of(fp8)) {
    const auto blocks = std::ssize(model.units()) - 2;  // without the embedding and the head
    model.use_fp8(
        *recipe, [fp8, blocks](int64_t block) { return multiplies_in_fp8(fp8, block, blocks); }, history,
        fp8.head);
  }
  const auto make_again =
      memory.recompute == plan::Recompute::kBlock ? again_in_backward : again_but_for_attention;
  model.set_unit_runner([&engine, make_again, again = recomputed_blocks(model, memory)](
                            const nn::Unit& unit, const at::Tensor& x, bool begins_pass) {
    return engine.run_unit(unit.name, x, again.contains(unit.name) ? make_again(unit) : unit.forward,
                           begins_pass);
  });
}

}  // namespace trireme::train
