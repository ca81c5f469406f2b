#include "trireme/plan/cut_work.h"

#include <algorithm>
#include <utility>

namespace trireme::plan {

CutWork::CutWork(const std::vector<StagePart>& parts, std::vector<int64_t> first,
                 const std::vector<int64_t>& ranks, double spread_flops)
    : first_(std::move(first)),
      share_(3.0 * spread_flops / static_cast<double>(cuts())),
      work_(cuts()),
      of_stage_(cuts()) {
  for (const StagePart& part : parts) of_part_.push_back(work_of(part));
  for (const int64_t rank : ranks) rank_of_.push_back(static_cast<size_t>(rank));
  stages_of_.resize(std::ranges::max(rank_of_) + 1);
  of_rank_.resize(stages_of_.size());
  for (size_t stage = 0; stage < cuts(); ++stage) stages_of_[rank_of_[stage]].push_back(stage);
  for (size_t stage = 0; stage < cuts(); ++stage) measure(stage);
}

void CutWork::measure(size_t stage) {
  PassWork work;
  for (int64_t part = first_[stage]; part < first_[stage + 1]; ++part)
    work += of_part_[static_cast<size_t>(part)];
  work_[stage] = work;
  of_stage_[stage] = work.all() + share_;
  double& of_rank = of_rank_[rank_of_[stage]];
  of_rank = 0.0;
  for (const size_t held : stages_of_[rank_of_[stage]]) of_rank += of_stage_[held];
}

bool CutWork::move(const CutMove& one, const CutMove& other) {
  first_[one.cut] += one.by;
  first_[other.cut] += other.by;
  const auto fits = [this](size_t cut) {
    return first_[cut - 1] < first_[cut] && first_[cut] < first_[cut + 1];
  };
  if (!fits(one.cut) || !fits(other.cut)) {
    first_[one.cut] -= one.by;
    first_[other.cut] -= other.by;
    return false;
  }
  for (const CutMove& moved : {one, other}) {
    if (moved.by == 0) continue;
    measure(moved.cut - 1);
    measure(moved.cut);
  }
  return true;
}

double CutWork::most_beside(const CutMove& one, const CutMove& other) const {
  const auto beside = [this](size_t cut) {
    return std::max(of_rank_[rank_of_[cut - 1]], of_rank_[rank_of_[cut]]);
  };
  return std::max(beside(one.cut), beside(other.cut));
}

}  // namespace trireme::plan
