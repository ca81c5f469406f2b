#pragma once
// What communication hooks remember, as named tensors of a training state. Of parameter P:
// "optimizer.owed.R.P" is what data-parallel rank R has yet to send, of P's shape; "optimizer.hook_steps.P"
// and "optimizer.hook_factor.P" are the same on all ranks. When another number of ranks loads it, rank r of M
// takes over what ranks r, r + M, ... owed, so nothing is lost. Private to state/*.cpp.
#include <vector>

#include "trireme/parallel/data_parallel.h"
#include "trireme/state/state.h"
#include "trireme/state/state_reader.h"

namespace trireme::state {

void add_hook_pieces(const parallel::FlatUnit& unit, int64_t dp_rank, std::vector<StatePiece>& pieces);
/// Lets a file have these tensors; it need not.
void allow_hook_state(StateReader& reader, const parallel::DataParallel& engine);
/// Sets the engine's hook to the tensors that the file has.
void read_hook_state(const StateReader& reader, parallel::DataParallel& engine);

}  // namespace trireme::state
