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

/// `vocabulary` as nn::Joint takes it, for the ranks of mesh.tp; null where there is one. Activations travel
/// in their own dtype, and are added up in fp32 in the order of ranks (tensor::redistribute_into()). GPUs of
/// one host read them in each other's memory. `beside`: products are in pieces
/// (nn::Joint::overlaps_products()), and collectives on a GPU have a stream of their own, all of them in the
/// order of the passes.
nn::JointPtr make_joint(const comm::Mesh& mesh, std::vector<int64_t> vocabulary, bool beside = false);
/// The joint of the ranks of a group, also of one rank.
nn::JointPtr make_joint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary,
                        bool beside = false);

/// The context of a model of whose sequences the ranks of mesh.cp have `tokens`; null where there is one. On
/// a GPU a ring passes keys and values on beside computation where `overlap` says so.
nn::ContextPtr make_context(const comm::Mesh& mesh, const plan::TokenSplit& tokens, bool overlap);

}  // namespace trireme::parallel
