#include "trireme/parallel/frozen_alike.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/comm/agree.h"

namespace trireme::parallel {
namespace {

/// A byte a parameter, in the order of units.
std::string bytes_of(const FrozenAlike::Flags& trainable) {
  std::string bytes;
  for (const auto& unit : trainable) {
    for (const bool requires_gradient : unit) bytes += requires_gradient ? '\1' : '\0';
  }
  return bytes;
}

std::vector<std::array<double, 2>> on_host(const at::Tensor& notes) {
  std::vector<std::array<double, 2>> rows;
  for (const auto& row : comm::to_numbers(notes)) rows.push_back({row.at(0), row.at(1)});
  return rows;
}

}  // namespace

/// The host waits for the copy, but not in steps that follow one with the same flags.
void FrozenAlike::follow(const Flags& trainable) {
  if (on_device_.defined() && trainable == noted_) return;
  noted_ = trainable;
  note_ = comm::in_halves(xxh3(bytes_of(trainable)));
  on_device_ = at::tensor({note_[0], note_[1]}, at::kDouble).to(ranks_.device());
}

const std::array<double, 2>& FrozenAlike::note(const Flags& trainable) {
  follow(trainable);
  return note_;
}

const at::Tensor& FrozenAlike::note_on_device(const Flags& trainable) {
  follow(trainable);
  return on_device_;
}

void FrozenAlike::compare(const std::vector<std::array<double, 2>>& notes, const Flags& trainable) const {
  if (std::ranges::adjacent_find(notes, std::ranges::not_equal_to()) != notes.end()) name_first(trainable);
}

void FrozenAlike::compare(const at::Tensor& notes, const Flags& trainable) {
  check_arrived();
  if (notes.is_cpu()) return compare(on_host(notes), trainable);
  const c10::Device device = notes.device();
  at::Tensor copy = at::empty(notes.sizes(), notes.options().device(at::kCPU).pinned_memory(true));
  copy.copy_(notes, /*non_blocking=*/true);
  c10::Event copied(device.type());
  copied.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  on_its_way_.emplace(std::move(copy), std::move(copied), trainable);
}

/// Every rank comes here in the same call, so that all throw together.
void FrozenAlike::check_arrived() {
  if (!on_its_way_) return;
  const OnItsWay arrived = std::move(*on_its_way_);
  on_its_way_.reset();
  arrived.copied.synchronize();
  compare(on_host(arrived.notes), arrived.trainable);
}

/// The names of all parameters, in the order of bytes_of().
std::vector<std::string> FrozenAlike::names() const {
  std::vector<std::string> all;
  for (const auto& unit : units_) {
    for (const auto& [name, leaf] : unit->params()) all.push_back(name);
  }
  return all;
}

/// The first and the last of many parameters, so that ranks whose changes differ most often say so.
std::string FrozenAlike::change(const Flags& before, const Flags& now) const {
  const std::string old = bytes_of(before), fresh = bytes_of(now);
  const std::vector<std::string> all = names();
  std::vector<size_t> changed;
  for (size_t i = 0; i < all.size(); ++i) {
    if (old[i] != fresh[i]) changed.push_back(i);
  }
  const std::string& first = all.at(changed.front());
  if (changed.size() == 1)
    return fmt::format(" ({} was {})", first, fresh[changed.front()] != 0 ? "thawed" : "frozen");
  return fmt::format(" ({} parameters, {} to {}, were frozen or thawed)", changed.size(), first,
                     all.at(changed.back()));
}

/// Ranks compare with the first one; what they find is the same text everywhere.
void FrozenAlike::name_first(const Flags& trainable) const {
  const std::string mine = bytes_of(trainable);
  const std::string firsts = comm::text_of(ranks_, 0, mine);
  double differs = -1.0;
  for (size_t i = 0; i < mine.size() && differs < 0.0; ++i) {
    if (mine[i] != firsts[i]) differs = static_cast<double>(i);
  }
  const auto found = comm::gather_scalars(ranks_, {differs});
  const auto other = std::ranges::find_if(found, [](const auto& rank) { return rank[0] >= 0.0; });
  const auto index = static_cast<size_t>(other->front());
  const int64_t root = ranks_.ranks().front(),
                rank = ranks_.ranks()[static_cast<size_t>(other - found.begin())];
  const bool root_trains = firsts[index] != 0;
  throw LogicError(
      "[parallel.backward] ranks have frozen different parameters: {} requires a gradient on rank {}, but "
      "not on rank {}; freeze and thaw the same parameters on all ranks, before the same step",
      names().at(index), root_trains ? root : rank, root_trains ? rank : root);
}

}  // namespace trireme::parallel
