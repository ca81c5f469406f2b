#pragma once
// What communication hooks remember, as named tensors of a training state. Of parameter P:
// "optimizer.owed.R.P" is what data-parallel rank R has yet to send, of P's shape; "optimizer.hook_steps.P"
// and "optimizer.hook_factor.P" are the same on all ranks. On other ranks than were saved rank r of M takes
// over what ranks r, r + M, ... owe, so nothing is lost. Private to parallel/*.cpp.
#include <vector>

#include "trireme/parallel/data_parallel.h"
#include "trireme/parallel/state.h"
#include "trireme/parallel/state_reader.h"

namespace trireme::parallel {

void add_hook_pieces(const FlatUnit& unit, int64_t dp_rank, std::vector<StatePiece>& pieces);
/// Looks for them in a file, which need not have any.
void allow_hook_state(StateReader& reader, const DataParallel& engine);
/// The engine's hook goes on from what was found.
void read_hook_state(const StateReader& reader, DataParallel& engine);

}  // namespace trireme::parallel
