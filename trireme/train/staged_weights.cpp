// The weights of a model in stages, on rank 0 as those of one model.
#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/hash.h"
#include "trireme/parallel/state_file.h"
#include "trireme/plan/adapter.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/staged_model.h"

namespace trireme::train {
namespace {

/// Counts, which have no shape, and statistics.
at::ScalarType dtype_of_buffer(const std::vector<int64_t>& shape) {
  return shape.empty() ? at::kLong : at::kFloat;
}

/// Writes what a stage holds of a parameter to its place in the whole one.
void put(const at::Tensor& held, const plan::Part& part, at::Tensor& whole) {
  if (part.is_whole()) {
    whole = held;
    return;
  }
  if (!whole.defined()) whole = at::empty(part.whole, held.options());
  at::Tensor box = whole;
  for (int64_t dim = 0; dim < held.dim(); ++dim)
    box = box.narrow(dim, part.start[static_cast<size_t>(dim)], held.size(dim));
  box.copy_(held);
}

}  // namespace

StagedModel::Readers StagedModel::readers() {
  Readers readers;
  for (const Part& part : parts_) readers.emplace_back(*part.engine);
  return readers;
}

at::Tensor StagedModel::whole(const std::string& name, Readers& readers, at::ScalarType dtype) {
  at::Tensor whole;
  for (const Saved& saved : saved_params_.at(name)) {
    const auto here = std::ranges::find(stage_of_engine_, saved.stage);
    at::Tensor mine;
    if (here != stage_of_engine_.end())
      mine = readers[static_cast<size_t>(here - stage_of_engine_.begin())].whole(name);
    const at::Tensor held = on_root(mine, saved, dtype);
    if (mesh_.world->rank() == 0) put(held, saved.part, whole);
  }
  return whole;
}

void StagedModel::visit_weights(bool frozen, const Visitor& body) {
  Readers readers = this->readers();
  for (const auto& [name, all] : saved_params_)
    if (all.front().frozen == frozen) body(name, whole(name, readers));
}

AdaptedModel StagedModel::adapted() {
  const auto readers = std::make_shared<Readers>(this->readers());
  return {.config = config_.model,
          .facts = facts_,
          .visit_frozen = [this](const AdaptedModel::Body& body) { visit_weights(/*frozen=*/true, body); },
          .visit_trained = [this](const AdaptedModel::Body& body) { visit_weights(/*frozen=*/false, body); },
          .trained = [this, readers](const std::string& name) { return whole(name, *readers); }};
}

void StagedModel::visit_buffers(const Visitor& body) {
  for (const auto& [name, saved] : saved_buffers_) {
    const auto here = std::ranges::find(stage_of_engine_, saved.stage);
    at::Tensor mine;
    if (here != stage_of_engine_.end())
      mine = stages_[static_cast<size_t>(here - stage_of_engine_.begin())]->named_buffers()[name];
    const at::Tensor buffer = on_root(mine, saved, dtype_of_buffer(saved.shape));
    if (mesh_.world->rank() == 0) body(name, buffer);
  }
}

at::Tensor StagedModel::on_root(const at::Tensor& mine, const Saved& saved, at::ScalarType dtype) {
  const bool is_root = mesh_.world->rank() == 0;
  const int64_t from = plan_.schedule.rank_of(saved.stage, 0);
  const auto options = at::TensorOptions().device(mesh_.world->device()).dtype(dtype);
  at::Tensor weight = mine;
  if (mesh_.stage->rank() == 0 && from != 0 && mesh_.pp_rank == from) {
    mesh_.pp->send(weight.to(options.device(), dtype).contiguous(), 0);
  } else if (is_root && from != 0) {
    weight = at::empty(saved.shape, options);
    mesh_.pp->recv(weight, from);
  }
  return is_root ? weight.to(at::kCPU).contiguous() : at::Tensor();
}

void StagedModel::save_weights(const std::string& path, const parallel::Notes& notes) {
  if (plan::has_adapters(config_)) return save_merged(*mesh_.all, adapted(), path, notes);
  parallel::TensorInfos infos;
  for (const auto& [name, all] : saved_params_)
    infos[name] = {all.front().part.whole_of(all.front().shape), at::kFloat};
  for (const auto& [name, saved] : saved_buffers_) infos[name] = {saved.shape, dtype_of_buffer(saved.shape)};
  const auto visit = [this](const Visitor& body) {
    visit_weights(/*frozen=*/false, body);
    visit_buffers(body);
  };
  parallel::save_weights(*mesh_.all, infos, visit, path, notes);
}

std::string StagedModel::shared(const StreamingHash& hash) const {
  const auto [upper, lower] = comm::in_halves(hash.digest());
  const auto words = comm::gather_scalars(*mesh_.all, {upper, lower});
  return hex64(comm::from_halves(words[0][0], words[0][1]));
}

/// In the order of the units of the whole model, as an engine of all of them has it.
std::string StagedModel::base_digest() {
  StreamingHash hash;
  Readers readers = this->readers();
  const at::ScalarType dtype = engine_options(config_, mesh_, fp8_history()).compute;
  for (const plan::UnitSpec& unit : facts_.units) {
    for (const plan::ParamSpec& param : unit.frozen()) {
      const at::Tensor values = whole(param.name, readers, dtype);
      if (mesh_.world->rank() != 0) continue;
      const at::Tensor rounded = values.to(dtype);
      hash.update(rounded.data_ptr(), rounded.nbytes());
    }
  }
  return shared(hash);
}

std::string StagedModel::weights_digest() {
  StreamingHash hash;
  visit_weights(/*frozen=*/false, [&](const std::string&, const at::Tensor& weight) {
    if (weight.defined()) hash.update(weight.data_ptr(), weight.nbytes());
  });
  return shared(hash);
}

}  // namespace trireme::train
