#include "trireme/state/state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/state/hook_state.h"
#include "trireme/state/local_state.h"
#include "trireme/state/whole_state.h"

namespace trireme::state {
namespace {

using Body = std::function<void(const StatePiece&)>;

void visit_pieces(parallel::DataParallel& engine, const OptimizerState* optimizer, const Body& body) {
  engine.notice_update();
  engine.check_together("sharded_state");
  engine.take_writes();
  for (size_t unit = 0; unit < engine.units().size(); ++unit) {
    const parallel::FlatUnit& flat = *engine.units()[unit];
    for (size_t param = 0; param < flat.params().size(); ++param) {
      const plan::FlatEntry& entry = flat.layout().entries()[param];
      const plan::Range part = flat.owned_part(param);
      if (part.size() == 0 || entry.part.copy > 0) continue;
      const plan::Region region = entry.region(part);
      body({entry.name, entry.whole_shape(), region,
            flat.master().narrow(0, part.begin - flat.optimizer_range().begin, part.size())});
      if (optimizer == nullptr) continue;
      const ParamState state = optimizer->get(unit, param);
      const bool local = flat.reduces_locally() && engine.mesh().dp->size() > 1;
      for (size_t kind = 0; kind < state.pieces.size(); ++kind) {
        if (!state.pieces[kind].defined()) continue;
        const std::string& word = optimizer->kinds()[kind];
        body({local ? local_name(engine.mesh().dp->rank(), word, entry.name)
                    : optimizer_name(word, entry.name),
              entry.whole_shape(), region, state.pieces[kind],
              local ? HeldBy::kThisRank : HeldBy::kReplicas});
      }
      if (state.step >= 0 && part.begin == entry.offset && entry.part.first_element() == 0)
        body({optimizer_name("step", entry.name),
              {},
              plan::Region::whole({}),
              at::full({1}, state.step, at::kLong)});
    }
    if (optimizer == nullptr) continue;
    std::vector<StatePiece> owed;
    add_hook_pieces(flat, engine.mesh().dp->rank(), owed);
    std::ranges::for_each(owed, body);
  }
  for (const auto& [name, buffer] : module_buffers(engine.module()).tensors)
    body({.name = name,
          .shape = buffer.sizes().vec(),
          .region = plan::Region::whole(buffer.sizes().vec()),
          .values = buffer.detach().reshape({-1}),
          .held_by = HeldBy::kAllRanks,
          .passes_change_it = true});
}

std::vector<StatePiece> pieces_of(parallel::DataParallel& engine, const OptimizerState* optimizer) {
  std::vector<StatePiece> pieces;
  visit_pieces(engine, optimizer, [&](const StatePiece& piece) { pieces.push_back(piece); });
  return pieces;
}

std::map<std::string, at::Tensor> whole_tensors(parallel::DataParallel& engine,
                                                const OptimizerState* optimizer, On on) {
  std::map<std::string, at::Tensor> tensors;
  const bool keeps = on == On::kEveryRank || engine.is_writer();
  WholeState(engine, optimizer).visit([&](const std::string& name, const at::Tensor& tensor) {
    if (keeps)
      tensors.emplace(name, tensor.detach().to(at::kCPU, tensor.scalar_type(), false, /*copy=*/true));
  });
  return tensors;
}

}  // namespace

std::vector<StatePiece> sharded_state(parallel::DataParallel& engine) {
  return pieces_of(engine, nullptr);
}

std::vector<StatePiece> sharded_state(parallel::DataParallel& engine, optim::Optimizer& optimizer) {
  return pieces_of(engine, state_of(engine, optimizer).get());
}

void visit_sharded_state(parallel::DataParallel& engine, optim::Optimizer& optimizer, const Body& body) {
  visit_pieces(engine, state_of(engine, optimizer).get(), body);
}

std::vector<StatePiece> sharded_state(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer) {
  return pieces_of(engine, state_of(engine, optimizer).get());
}

std::map<std::string, at::Tensor> full_state(parallel::DataParallel& engine, On on) {
  return whole_tensors(engine, nullptr, on);
}

std::map<std::string, at::Tensor> full_state(parallel::DataParallel& engine, optim::Optimizer& optimizer,
                                             On on) {
  return whole_tensors(engine, state_of(engine, optimizer).get(), on);
}

std::map<std::string, at::Tensor> full_state(parallel::DataParallel& engine,
                                             torch::optim::Optimizer& optimizer, On on) {
  return whole_tensors(engine, state_of(engine, optimizer).get(), on);
}

}  // namespace trireme::state
