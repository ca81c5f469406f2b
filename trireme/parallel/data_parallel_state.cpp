// What the engine holds, has sent and took, and how far it is within a step.
#include <algorithm>

#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {

void DataParallel::set_hook_state(size_t unit, const std::vector<HookState>& params) {
  units_.at(unit)->set_hook_state(params);
}

DataParallel::Replica DataParallel::replica() const {
  if (!options_.policy.shard_optimizer) return {mesh_.dp->rank(), mesh_.dp->size()};
  return {groups_.replicate->rank(), groups_.replicate->size()};
}

plan::StateBytes DataParallel::state_bytes() const {
  plan::StateBytes sum;
  for (const auto& unit : units_) sum += unit->state_bytes();
  return sum;
}

int64_t DataParallel::sent_bytes() const {
  int64_t bytes = 0;
  for (const comm::Group* group : groups()) {
    for (const auto& [kind, traffic] : group->traffic()) {
      if (kind != plan::Collective::kBroadcast) bytes += traffic.bytes;  // what ranks agree on once
    }
  }
  return bytes;
}

int64_t DataParallel::symmetric_bytes() const {
  int64_t bytes = 0;
  for (const comm::Group* group : groups()) bytes += group->symmetric_bytes();
  return bytes;
}

std::vector<comm::Group*> DataParallel::groups() const {
  std::vector<comm::Group*> all = {groups_.shard.get(), groups_.replicate.get(), groups_.after_forward.get()};
  if (mesh_.cp->size() > 1) all.push_back(mesh_.cp.get());
  if (mesh_.tp->size() > 1) all.insert(all.end(), {mesh_.tp.get(), mesh_.tp_gradients.get()});
  std::erase(all, nullptr);
  return all;
}

void DataParallel::measure(bool on) {
  shared_.unshard.measure(on);
  shared_.reduce.measure(on);
}

CommTimes DataParallel::take_times() {
  CommTimes times = shared_.unshard.take_times();
  times += shared_.reduce.take_times();
  return times;
}

/// For means ranks exchange the weights of their micro-batches at the end of a pass, which cannot be
/// recorded.
bool DataParallel::can_be_recorded() const {
  return use_from_ != UseFrom::kOperators && !programs_.pinned() && options_.hook.hook == Hook::kNone &&
         !handed_out_ && !mean_.exchanges() && plan::recording_obstacle(programs_.step()).empty();
}

void DataParallel::stay_in_place() {
  if (stays_ || setting().alone()) return;
  stays_ = true;
  for (const auto& unit : units_) unit->stay_in_place(setting());
  programs_.stay_in_place();
}

int64_t DataParallel::bytes_to_stay() const {
  int64_t sum = 0;
  if (stays_ || setting().alone()) return sum;
  for (const auto& unit : units_) sum += unit->bytes_to_stay();
  return sum;
}

DataParallel::Progress DataParallel::progress() const {
  Progress progress{{}, completion_.used(), executor_.reductions(), complete_, mean_.state()};
  for (const auto& unit : units_) progress.units.push_back(unit->progress());
  return progress;
}

void DataParallel::set_progress(const Progress& progress) {
  end_backward_range();
  for (size_t unit = 0; unit < units_.size(); ++unit) units_[unit]->set_progress(progress.units[unit]);
  completion_.set_used(progress.used);
  executor_.set_reductions_begun(progress.reductions);
  complete_ = progress.complete;
  mean_.set_state(progress.mean);
}

}  // namespace trireme::parallel
