#pragma once
// Where a model that knows nothing of engines and an engine that knows nothing of models meet.
#include "trireme/nn/model.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/config.h"

namespace trireme::train {

/// From now on the units of `model` run through `engine`, which notices by that when a forward pass begins.
/// Backward computes again what `memory` says: in the first block and every recompute_every-th after it,
/// everything or the outputs of norms and activations. The loss head, with which backward begins, is not
/// computed again. While the model trains, the linear layers of blocks are multiplied as `fp8` says, with
/// scales that `history` delays, unless it is null. `engine` and `history` must live as long as passes are
/// run.
void connect(nn::Model& model, parallel::DataParallel& engine, const plan::MemoryConfig& memory = {},
             const plan::Fp8Config& fp8 = {}, const nn::Fp8History* history = nullptr);

}  // namespace trireme::train
