#include "trireme/comm/pair_groups.h"

#include <algorithm>

#include "trireme/base/text.h"
#include "trireme/comm/group.h"

namespace trireme::comm {

PairGroups::~PairGroups() {
  for (Pair& pair : pairs_) pair.group.reset();
}

std::string PairGroups::unused(int64_t from, int64_t to) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const Pair& pair : pairs_) {
    if (pair.from == from && pair.to == to && !pair.in_use) names.push_back(pair.name);
  }
  return join(names, "\n");
}

std::shared_ptr<Group> PairGroups::take(const std::string& senders, const std::string& receivers) {
  const std::vector<std::string> there = split(receivers, '\n');
  for (const std::string& name : split(senders, '\n')) {
    if (name.empty() || std::ranges::find(there, name) == there.end()) continue;
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(pairs_, name, &Pair::name);
    if (found == pairs_.end()) continue;
    found->in_use = true;
    return found->group;
  }
  return {};
}

void PairGroups::add(const std::string& name, int64_t from, int64_t to, std::shared_ptr<Group> group) {
  const std::lock_guard lock(mutex_);
  pairs_.push_back({name, from, to, std::move(group), true});
}

void PairGroups::give_back(const std::shared_ptr<Group>& group, bool can_go_on) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(pairs_, group, &Pair::group);
  if (found == pairs_.end()) return;
  found->in_use = false;
  if (!can_go_on) pairs_.erase(found);
}

void PairGroups::abandon() {
  const std::lock_guard lock(mutex_);
  static_cast<void>(new std::vector<Pair>(std::move(pairs_)));
  pairs_.clear();
}

}  // namespace trireme::comm
