#pragma once
// What communication hooks remember, as named tensors of a training state. Of parameter P:
// "optimizer.owed.R.P" is what data-parallel rank R has yet to send, of P's shape; "optimizer.hook_steps.P"
// and "optimizer.hook_factor.P" are the same on all ranks. When another number of ranks loads it, rank r of M
// takes over what ranks r, r + M, ... owed, so nothing is lost. Private to parallel/*.cpp.
#include <vector>

#include "trireme/parallel/data_parallel.h"
#include "trireme/parallel/state.h"
#include "trireme/parallel/state_reader.h"

namespace trireme::parallel {

void add_hook_pieces(const FlatUnit& unit, int64_t dp_rank, std::vector<StatePiece>& pieces);
/// Lets a file have these tensors; it need not.
void allow_hook_state(StateReader& reader, const DataParallel& engine);
/// Sets the engine's hook to the tensors that the file has.
void read_hook_state(const StateReader& reader, DataParallel& engine);

}  // namespace trireme::parallel
