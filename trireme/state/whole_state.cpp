#include "trireme/state/whole_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>

#include "trireme/base/error.h"

namespace trireme::state {

std::string optimizer_name(const std::string& kind, const std::string& param) {
  return kOptimizerPrefix + kind + "." + param;
}

ModuleBuffers module_buffers(const torch::nn::Module& module) {
  ModuleBuffers buffers;
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& entry : module.named_buffers()) {
    if (!entry.value().defined()) continue;
    const auto [known, is_new] = names.emplace(entry.value().unsafeGetTensorImpl(), entry.key());
    if (is_new) {
      buffers.tensors.emplace_back(entry.key(), entry.value());
    } else {
      buffers.aliases.emplace(entry.key(), known->second);
    }
  }
  return buffers;
}

WholeState::WholeState(parallel::DataParallel& engine, const OptimizerState* optimizer)
    : engine_(engine), optimizer_(optimizer), aliases_(engine.aliases()) {
  engine.notice_update();
  engine.check_together("state");
  engine.take_writes();
  for (const auto& unit : engine.units()) {
    for (const plan::FlatEntry& entry : unit->layout().entries()) {
      TRIREME_CHECK(
          entry.part.is_whole() || engine.mesh().tp->size() > 1,
          "[state.whole] the engine has a part of {}, [{}] of [{}], and no whole tensor of it; save "
          "sharded_state() of all engines",
          entry.name, fmt::join(entry.shape, ", "), fmt::join(entry.whole_shape(), ", "));
      declare(entry.name, {.shape = entry.whole_shape(), .dtype = at::kFloat});
    }
  }
  ModuleBuffers buffers = module_buffers(engine.module());
  aliases_.merge(buffers.aliases);
  for (const auto& [name, buffer] : buffers.tensors)
    declare(name, {.shape = buffer.sizes().vec(), .dtype = buffer.scalar_type()});
  if (optimizer != nullptr) agree();
}

void WholeState::declare(const std::string& name, StateTensor tensor) {
  TRIREME_CHECK(tensors_.emplace(name, std::move(tensor)).second,
                "[state.whole] two tensors of the training state are named {}; rename the one of the module",
                name);
}

/// A rank that owns no element of a parameter does not know what the optimizer has of it.
void WholeState::agree() {
  const size_t kinds = optimizer_->kinds().size();
  std::vector<double> mine;
  for (size_t unit = 0; unit < engine_.units().size(); ++unit) {
    for (size_t param = 0; param < engine_.units()[unit]->params().size(); ++param) {
      const ParamState state = optimizer_->get(unit, param);
      for (const at::Tensor& piece : state.pieces) mine.push_back(piece.defined() ? 1.0 : 0.0);
      mine.push_back(static_cast<double>(state.step));
    }
  }
  std::vector<double> all = mine;
  for (const auto& rank : comm::gather_scalars(*engine_.mesh().dp, mine)) {
    std::ranges::transform(all, rank, all.begin(), [](double a, double b) { return std::max(a, b); });
  }
  auto next = all.begin();
  for (const auto& unit : engine_.units()) {
    std::vector<Known>& params = known_.emplace_back();
    for (const plan::FlatEntry& entry : unit->layout().entries()) {
      Known& known = params.emplace_back();
      for (size_t kind = 0; kind < kinds; ++kind) {
        known.kinds.push_back(*next++ > 0.0);
        if (known.kinds.back())
          declare(optimizer_name(optimizer_->kinds()[kind], entry.name),
                  {.shape = entry.whole_shape(), .dtype = at::kFloat});
      }
      known.step = static_cast<int64_t>(*next++);
      if (known.step >= 0) declare(optimizer_name("step", entry.name), {.shape = {}, .dtype = at::kLong});
    }
  }
}

void WholeState::visit(const std::function<void(const std::string&, const at::Tensor&)>& body) const {
  const at::NoGradGuard no_grad;
  for (size_t unit = 0; unit < engine_.units().size(); ++unit) {
    const parallel::FlatUnit& flat = *engine_.units()[unit];
    {
      const at::Tensor master = flat.gather(flat.master());
      for (const plan::FlatEntry& entry : flat.layout().entries())
        body(entry.name,
             engine_.joined(entry, master.narrow(0, entry.offset, entry.numel).view(entry.shape)));
    }
    if (optimizer_ != nullptr) visit_optimizer(unit, body);
  }
  for (const auto& [name, buffer] : module_buffers(engine_.module()).tensors) body(name, buffer);
}

void WholeState::visit_optimizer(
    size_t unit, const std::function<void(const std::string&, const at::Tensor&)>& body) const {
  const parallel::FlatUnit& flat = *engine_.units()[unit];
  const auto& entries = flat.layout().entries();
  const plan::Range range = flat.optimizer_range();
  for (size_t kind = 0; kind < optimizer_->kinds().size(); ++kind) {
    const auto has = [&](const Known& known) { return known.kinds[kind]; };
    if (std::ranges::none_of(known_[unit], has)) continue;
    at::Tensor local = at::zeros({range.size()}, flat.master().options());
    for (size_t param = 0; param < entries.size(); ++param) {
      const plan::Range part = flat.owned_part(param);
      const at::Tensor piece = optimizer_->get(unit, param).pieces[kind];
      if (piece.defined() && part.size() > 0)
        local.narrow(0, part.begin - range.begin, part.size()).copy_(piece);
    }
    const at::Tensor whole = flat.gather(local);
    for (size_t param = 0; param < entries.size(); ++param) {
      const plan::FlatEntry& entry = entries[param];
      if (has(known_[unit][param]))
        body(optimizer_name(optimizer_->kinds()[kind], entry.name),
             engine_.joined(entry, whole.narrow(0, entry.offset, entry.numel).view(entry.shape)));
    }
  }
  for (size_t param = 0; param < entries.size(); ++param) {
    const int64_t step = known_[unit][param].step;
    if (step >= 0) body(optimizer_name("step", entries[param].name), at::scalar_tensor(step, at::kLong));
  }
}

}  // namespace trireme::state
