// The weights of a model in stages, on rank 0 as those of one model.
#include <ATen/ATen.h>

#include "trireme/base/hash.h"
#include "trireme/base/heartbeat.h"
#include "trireme/plan/adapter.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/trained_model.h"

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

/// Ranks that have all of the model hash it themselves: they may have read different files.
std::string digest_of(const StreamingHash& hash, const comm::Mesh& mesh) {
  if (mesh.pp->size() == 1) return hex64(hash.digest());
  const auto [upper, lower] = comm::in_halves(hash.digest());
  const auto words = comm::gather_scalars(*mesh.all, {upper, lower});
  return hex64(comm::from_halves(words[0][0], words[0][1]));
}

}  // namespace

void TrainedModel::load_weights(const std::string& path) {
  for (const TrainedStage& stage : stages_) state::load_weights(*stage.engine, path, load_options());
}

void TrainedModel::load_base(const std::string& path) {
  for (const TrainedStage& stage : stages_) state::load_frozen(*stage.engine, path, load_options());
}

void TrainedModel::load_adapter(const std::string& folder, const std::string& base) {
  std::vector<std::shared_ptr<parallel::DataParallel>> engines;
  for (const TrainedStage& stage : stages_) engines.push_back(stage.engine);
  train::load_adapter(*mesh_.all, engines, config_.model, facts_, folder, base);
}

TrainedModel::Readers TrainedModel::readers() {
  Readers readers;
  for (const TrainedStage& stage : stages_) readers.emplace_back(*stage.engine);
  return readers;
}

at::Tensor TrainedModel::whole(const std::string& name, Readers& readers, at::ScalarType dtype) {
  beat();
  at::Tensor whole;
  for (const StagePlan::Saved& saved : plan_.params.at(name)) {
    at::Tensor mine;
    for (size_t i = 0; i < stages_.size(); ++i)
      if (stages_[i].index == saved.stage) mine = readers[i].whole(name);
    const at::Tensor held = on_root(mine, saved, dtype);
    if (held.defined()) put(held, saved.part, whole);
  }
  return whole;
}

void TrainedModel::visit_weights(bool frozen, const Body& body) {
  Readers readers = this->readers();
  for (const auto& [name, all] : plan_.params)
    if (all.front().frozen == frozen) body(name, whole(name, readers));
}

void TrainedModel::visit_buffers(const Body& body) {
  for (const auto& [name, saved] : plan_.buffers) {
    at::Tensor mine;
    for (const TrainedStage& stage : stages_)
      if (stage.index == saved.stage) mine = stage.module->named_buffers()[name];
    body(name, on_root(mine, saved, dtype_of_buffer(saved.shape)));
  }
}

at::Tensor TrainedModel::on_root(const at::Tensor& mine, const StagePlan::Saved& saved,
                                 at::ScalarType dtype) {
  const bool is_root = in_one_piece() || mesh_.world->rank() == 0;
  const int64_t from = *plan_.holders[static_cast<size_t>(saved.stage)].begin();
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

AdaptedModel TrainedModel::adapted() {
  const auto readers = std::make_shared<Readers>(this->readers());
  return {.config = config_.model,
          .facts = facts_,
          .visit_frozen = [this](const Body& body) { visit_weights(/*frozen=*/true, body); },
          .visit_trained = [this](const Body& body) { visit_weights(/*frozen=*/false, body); },
          .trained = [this, readers](const std::string& name) { return whole(name, *readers); }};
}

void TrainedModel::save_adapter(const std::string& folder, const std::string& base) {
  train::save_adapter(*mesh_.all, adapted(), folder, base);
}

void TrainedModel::save_weights(const std::string& path, const state::Notes& notes) {
  if (plan::has_adapters(config_)) return save_merged(*mesh_.all, adapted(), path, notes);
  // Units come one by one, and the writer alone has copies on its host.
  if (in_one_piece()) return state::save_weights(engine(), path, notes);
  state::TensorInfos infos;
  for (const auto& [name, all] : plan_.params)
    infos[name] = {all.front().part.whole_of(all.front().shape), at::kFloat};
  for (const auto& [name, saved] : plan_.buffers) infos[name] = {saved.shape, dtype_of_buffer(saved.shape)};
  const auto visit = [this](const Body& body) {
    visit_weights(/*frozen=*/false, body);
    visit_buffers(body);
  };
  state::save_weights(*mesh_.all, infos, visit, path, notes);
}

/// Weights are hashed in the order of the units of the whole model, whatever the stages.
std::string TrainedModel::base_digest() {
  StreamingHash hash;
  Readers readers = this->readers();
  const at::ScalarType dtype = dtype_of(config_.precision.compute);
  for (const plan::UnitSpec& unit : facts_.units) {
    for (const plan::ParamSpec& param : unit.frozen()) {
      const at::Tensor values = whole(param.name, readers, dtype);
      if (!values.defined()) continue;
      const at::Tensor rounded = values.to(dtype);
      hash.update(rounded.data_ptr(), rounded.nbytes());
    }
  }
  return digest_of(hash, mesh_);
}

std::string TrainedModel::weights_digest() {
  StreamingHash hash;
  visit_weights(/*frozen=*/false, [&](const std::string&, const at::Tensor& weight) {
    if (weight.defined()) hash.update(weight.data_ptr(), weight.nbytes());
  });
  return digest_of(hash, mesh_);
}

}  // namespace trireme::train
