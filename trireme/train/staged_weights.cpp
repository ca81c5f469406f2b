// The weights of a model in stages, on rank 0 as those of one model.
#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/hash.h"
#include "trireme/parallel/state_file.h"
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

void StagedModel::visit_weights(const Visitor& body) {
  const bool is_root = mesh_.world->rank() == 0;
  std::vector<parallel::DataParallel::Weights> readers;
  for (const Part& part : parts_) readers.emplace_back(*part.engine);
  for (const auto& [name, all] : saved_params_) {
    at::Tensor whole;
    for (const Saved& saved : all) {
      const auto here = std::ranges::find(stage_of_engine_, saved.stage);
      at::Tensor mine;
      if (here != stage_of_engine_.end())
        mine = readers[static_cast<size_t>(here - stage_of_engine_.begin())].whole(name);
      const at::Tensor held = on_root(mine, saved, at::kFloat);
      if (is_root) put(held, saved.part, whole);
    }
    if (is_root) body(name, whole);
  }
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
    mesh_.pp->send(weight.to(options.device()).contiguous(), 0);
  } else if (is_root && from != 0) {
    weight = at::empty(saved.shape, options);
    mesh_.pp->recv(weight, from);
  }
  return is_root ? weight.to(at::kCPU).contiguous() : at::Tensor();
}

void StagedModel::save_weights(const std::string& path, const parallel::Notes& notes) {
  parallel::TensorInfos infos;
  for (const auto& [name, all] : saved_params_)
    infos[name] = {all.front().part.whole_of(all.front().shape), at::kFloat};
  for (const auto& [name, saved] : saved_buffers_) infos[name] = {saved.shape, dtype_of_buffer(saved.shape)};
  const auto visit = [this](const Visitor& body) {
    visit_weights(body);
    visit_buffers(body);
  };
  parallel::save_weights(*mesh_.all, infos, visit, path, notes);
}

std::string StagedModel::weights_digest() {
  StreamingHash hash;
  visit_weights(
      [&](const std::string&, const at::Tensor& weight) { hash.update(weight.data_ptr(), weight.nbytes()); });
  const auto [upper, lower] = comm::in_halves(hash.digest());
  const auto words = comm::gather_scalars(*mesh_.all, {upper, lower});
  return hex64(comm::from_halves(words[0][0], words[0][1]));
}

}  // namespace trireme::train
