#pragma once
// The joint of a model that is cut over the ranks of a mesh along tp, and the context of one whose sequences
// are split along cp.
#include <cstdint>
#include <vector>

#include "trireme/comm/mesh.h"
#include "trireme/nn/context.h"
#include "trireme/nn/joint.h"
#include "trireme/plan/token_split.h"

namespace trireme::parallel {

/// `vocabulary` as nn::Joint takes it, for the ranks of mesh.tp; null where there is one. Collectives run on
/// the stream that computes, in the order of the passes, which is the same on all of these ranks. Activations
/// travel in their own dtype, and are added up in fp32 in the order of ranks (tensor::redistribute()).
nn::JointPtr make_joint(const comm::Mesh& mesh, std::vector<int64_t> vocabulary);
/// The same for the ranks of a group, also for one of one rank.
nn::JointPtr make_joint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary);

/// The context of a model of whose sequences the ranks of mesh.cp have `tokens`; null where there is one. On
/// a GPU a ring passes keys and values on beside computation where `overlap` says so.
nn::ContextPtr make_context(const comm::Mesh& mesh, const plan::TokenSplit& tokens, bool overlap);

}  // namespace trireme::parallel
