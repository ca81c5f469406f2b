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

}  // namespace

void StagedModel::visit_weights(const Visitor& body) {
  const bool is_root = mesh_.world->rank() == 0;
  std::vector<parallel::DataParallel::Weights> readers;
  for (const Part& part : parts_) readers.emplace_back(*part.engine);
  for (const auto& [name, owners] : owners_) {
    std::vector<at::Tensor> rows;
    for (const Owner& owner : owners) {
      const auto here = std::ranges::find(stage_of_engine_, owner.stage);
      at::Tensor mine;
      if (here != stage_of_engine_.end())
        mine = readers[static_cast<size_t>(here - stage_of_engine_.begin())].whole(name);
      rows.push_back(on_root(mine, owner, at::kFloat));
    }
    if (is_root) body(name, rows.size() == 1 ? rows.front() : at::cat(rows));
  }
}

void StagedModel::visit_buffers(const Visitor& body) {
  for (const auto& [name, owner] : buffer_owners_) {
    const auto here = std::ranges::find(stage_of_engine_, owner.stage);
    at::Tensor mine;
    if (here != stage_of_engine_.end())
      mine = stages_[static_cast<size_t>(here - stage_of_engine_.begin())]->named_buffers()[name];
    const at::Tensor buffer = on_root(mine, owner, dtype_of_buffer(owner.shape));
    if (mesh_.world->rank() == 0) body(name, buffer);
  }
}

at::Tensor StagedModel::on_root(const at::Tensor& mine, const Owner& owner, at::ScalarType dtype) {
  const bool is_root = mesh_.world->rank() == 0;
  const int64_t from = plan_.schedule.rank_of(owner.stage, 0);
  const auto options = at::TensorOptions().device(mesh_.world->device()).dtype(dtype);
  at::Tensor weight = mine;
  if (mesh_.dp_rank == 0 && from != 0 && mesh_.pp_rank == from) {
    mesh_.pp->send(weight.to(options.device()).contiguous(), 0);
  } else if (is_root && from != 0) {
    weight = at::empty(owner.shape, options);
    mesh_.pp->recv(weight, from);
  }
  return is_root ? weight.to(at::kCPU).contiguous() : at::Tensor();
}

void StagedModel::save_weights(const std::string& path, const parallel::Notes& notes) {
  parallel::TensorInfos infos;
  for (const auto& [name, owners] : owners_) {
    auto& [shape, dtype] = infos[name] = {owners.front().shape, at::kFloat};
    for (size_t i = 1; i < owners.size(); ++i) shape.front() += owners[i].shape.front();
  }
  for (const auto& [name, owner] : buffer_owners_) infos[name] = {owner.shape, dtype_of_buffer(owner.shape)};
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
