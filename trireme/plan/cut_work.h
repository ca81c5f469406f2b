#pragma once
// The work of stages and of the ranks that hold them, while the cuts between stages move.
#include <cstdint>
#include <vector>

#include "trireme/plan/stages.h"

namespace trireme::plan {

/// A cut, the number of the stage that begins there, and by how many parts it moves.
struct CutMove {
  size_t cut = 1;
  int64_t by = 0;
};

/// A move costs what the stages beside its cuts have parts. Work is added up in the order of parts, as
/// cut_at() does, so that equal stages compare as equal wherever their cuts have been before.
class CutWork {
 public:
  /// `ranks`: the rank of each stage. `spread_flops`: as cut_at() takes them.
  CutWork(const std::vector<StagePart>& parts, std::vector<int64_t> first, const std::vector<int64_t>& ranks,
          double spread_flops);

  /// Moves both; false, and nothing is moved, where a stage would be left without a part.
  bool move(const CutMove& one, const CutMove& other);
  void undo(const CutMove& one, const CutMove& other) { move({one.cut, -one.by}, {other.cut, -other.by}); }
  /// The most that a rank has which holds a stage beside one of the two.
  double most_beside(const CutMove& one, const CutMove& other) const;

  size_t cuts() const { return first_.size() - 1; }  ///< and the number of stages
  const std::vector<int64_t>& first() const { return first_; }
  const std::vector<PassWork>& work() const { return work_; }  ///< by stage, without a share of the head
  const std::vector<double>& of_stages() const { return of_stage_; }
  const std::vector<double>& of_ranks() const { return of_rank_; }

 private:
  void measure(size_t stage);

  std::vector<PassWork> of_part_;
  std::vector<int64_t> first_;
  std::vector<size_t> rank_of_;
  std::vector<std::vector<size_t>> stages_of_;  ///< by rank, in rising order
  double share_;                                ///< of a head that is spread, all passes
  std::vector<PassWork> work_;
  std::vector<double> of_stage_, of_rank_;  ///< all passes
};

}  // namespace trireme::plan
