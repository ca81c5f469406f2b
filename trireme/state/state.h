#pragma once
// What training holds, by name: parameters as fp32 masters under the module's names, buffers under theirs,
// and the optimizer's state as "optimizer.KIND.PARAMETER", such as "optimizer.exp_avg.head.weight", with the
// number of updates as "optimizer.step.PARAMETER". What communication hooks owe comes in sharded_state()
// alone. Names and ranges do not depend on policy, units or ranks, so what one layout has saved any other one
// can load. A parameter or buffer with several names comes once, by the first. Files: state_file.h.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/region.h"

namespace torch::optim {
class Optimizer;
}

namespace trireme::state {

/// Who else has the elements of a piece, with the same values.
enum class HeldBy {
  kReplicas,  ///< the ranks that DataParallel::replica() counts
  kAllRanks,  ///< every data-parallel rank
  kThisRank,
};

/// Elements of one named tensor that this rank holds.
struct StatePiece {
  std::string name;
  plan::Shape shape;    ///< of the whole tensor
  plan::Region region;  ///< of it
  /// (region.numel()) on the device; the memory that training uses, to be copied by who keeps it, but for
  /// optimizer state that is kept in fewer bits than fp32
  at::Tensor values;
  HeldBy held_by = HeldBy::kReplicas;
  bool passes_change_it = false;  ///< forward and backward passes do, not only updates
};

/// This rank's pieces: the part of the parameters that it updates, without copies of another stage's
/// (plan::Part::copy), and all buffers. The pieces of all ranks
/// cover every tensor; ranks that hold the same hold equal pieces, but for buffers that each rank changes by
/// itself. No communication, but for an update by a plain optimizer.step() (DataParallel::notice_update).
/// Throws LogicError between two averages of local SGD, when ranks have weights of their own.
std::vector<StatePiece> sharded_state(parallel::DataParallel& engine);
/// The same with the optimizer's state, of the engine's optimizer or one of torch over
/// DataParallel::optimizer_tensors(): AdamW, Adam, SGD, RMSprop or Adagrad. Throws LogicError that names the
/// type of any other.
std::vector<StatePiece> sharded_state(parallel::DataParallel& engine, optim::Optimizer& optimizer);
std::vector<StatePiece> sharded_state(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer);
/// Calls body with one piece of sharded_state() at a time: of state in fewer bits than fp32 only one fp32
/// copy is in memory.
void visit_sharded_state(parallel::DataParallel& engine, optim::Optimizer& optimizer,
                         const std::function<void(const StatePiece&)>& body);

/// Who gets whole tensors: with kRankZero data-parallel rank 0, of every stage of a pipeline.
enum class On { kEveryRank, kRankZero };

/// Whole CPU tensors by name, parameters in fp32: copies, gathered one unit at a time. With kRankZero other
/// ranks get none. Buffers are those of this rank. Collective. Throws LogicError between two averages of
/// local SGD, as state_file.h does.
std::map<std::string, at::Tensor> full_state(parallel::DataParallel& engine, On on = On::kEveryRank);
std::map<std::string, at::Tensor> full_state(parallel::DataParallel& engine, optim::Optimizer& optimizer,
                                             On on = On::kEveryRank);
std::map<std::string, at::Tensor> full_state(parallel::DataParallel& engine,
                                             torch::optim::Optimizer& optimizer, On on = On::kEveryRank);

}  // namespace trireme::state
