// Ring attention on ranks as threads: the output and the gradient of attention over whole sequences, the same
// bits every time, and the bytes that are planned.
#include "trireme/nn/ring_attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/comm/mesh.h"
#include "trireme/nn/attention_part.h"
#include "trireme/parallel/tensor_joint.h"

namespace trireme {
namespace {

using nn::AttentionPart;
using nn::AttentionShape;
using nn::RopeTable;
using test::relative_error;

/// Inputs for whole sequences, the same on every rank.
struct Problem {
  Problem(const AttentionShape& of, int64_t length, at::ScalarType dtype) : shape(of) {
    const int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    const at::Generator seeded = at::detail::createCPUGenerator(7);
    qkv = at::randn({2, length, width}, seeded).to(dtype);
    d_output = at::randn({2, length, shape.heads * shape.head_dim}, seeded).to(dtype);
    rope = nn::make_rope_table(length, shape.head_dim, 1e4, at::kCPU);
  }
  AttentionShape shape;
  at::Tensor qkv, d_output;
  RopeTable rope;
};

struct Attended {
  at::Tensor output, d_qkv;
};

/// The attention of the tokens of `split`; null: of all.
Attended attention(const Problem& problem, const plan::TokenSplit& split, const nn::ContextPtr& context,
                   nn::KeptAttention* kept = nullptr) {
  const at::Tensor leaf = nn::tokens_of(problem.qkv, split).clone().requires_grad_();
  const at::Tensor output =
      nn::attention_in_context(leaf * 1, problem.shape, problem.rope, 0.0, kept, context);
  output.backward(nn::tokens_of(problem.d_output, split).contiguous());
  return {output.detach(), leaf.grad()};
}

int64_t sent(const comm::Group& group) {
  int64_t bytes = 0;
  for (const auto& [kind, traffic] : group.traffic()) bytes += traffic.bytes;
  return bytes;
}

/// Calls body(context, split, group) on ranks of a ring.
template <typename Body>
void on_ring(int64_t ranks, const Body& body) {
  test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
    plan::ParallelConfig parallel;
    parallel.cp = ranks;
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit(parallel, ranks));
    const plan::TokenSplit split{mesh.cp_rank, ranks, /*zigzag=*/true};
    body(parallel::make_context(mesh, split, /*overlap=*/true), split, *mesh.cp);
  });
}

void expect_whole(const Attended& got, const Attended& whole, const plan::TokenSplit& split, double bound,
                  const std::string& what) {
  EXPECT_LT(relative_error(got.output, nn::tokens_of(whole.output, split)), bound) << what;
  EXPECT_LT(relative_error(got.d_qkv, nn::tokens_of(whole.d_qkv, split)), bound) << what << ": gradient";
}

TEST(RingAttention, IsAttentionOverWholeSequences) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const int64_t length : {int64_t{1}, int64_t{5}, int64_t{24}}) {
      for (const AttentionShape& shape :
           {AttentionShape{4, 2, 8}, AttentionShape{3, 3, 16}, AttentionShape{6, 1, 36}}) {
        const Problem problem(shape, 2 * ranks * length, at::kFloat);
        const Attended whole = attention(problem, {}, nullptr);
        on_ring(ranks, [&](const nn::ContextPtr& context, const plan::TokenSplit& split, comm::Group&) {
          expect_whole(attention(problem, split, context), whole, split, 1e-5,
                       fmt::format("{} ranks, pieces of {}, {} heads", ranks, length, shape.heads));
        });
      }
    }
  }
}

TEST(RingAttention, RoundsInBf16WhatTravelsAndWhatIsReturned) {
  const Problem narrow({4, 2, 16}, 96, at::kBFloat16);
  Problem wide = narrow;
  wide.qkv = narrow.qkv.to(at::kFloat);
  wide.d_output = narrow.d_output.to(at::kFloat);
  const Attended exact = attention(wide, {}, nullptr), one = attention(narrow, {}, nullptr);
  on_ring(4, [&](const nn::ContextPtr& context, const plan::TokenSplit& split, comm::Group&) {
    const Attended got = attention(narrow, split, context);
    EXPECT_EQ(got.output.scalar_type(), at::kBFloat16);
    expect_whole(got, exact, split, 1.5 * relative_error(one.d_qkv, exact.d_qkv), "bf16");
  });
}

TEST(RingAttention, RepeatsItsBits) {
  const Problem problem({4, 2, 8}, 64, at::kFloat);
  on_ring(4, [&](const nn::ContextPtr& context, const plan::TokenSplit& split, comm::Group&) {
    const Attended once = attention(problem, split, context), again = attention(problem, split, context);
    EXPECT_TRUE(at::equal(once.output, again.output));
    EXPECT_TRUE(at::equal(once.d_qkv, again.d_qkv));
  });
}

/// Output that was kept is neither computed nor communicated again.
TEST(RingAttention, SendsWhatIsPlanned) {
  plan::Config config;
  config.model.n_heads = 4;
  config.model.n_kv_heads = 2;
  config.model.d_model = 4 * 8;
  config.parallel.cp = 3;
  const Problem problem({4, 2, 8}, 48, at::kFloat);
  const plan::AttentionBytes bytes =
      plan::attention_bytes(config, plan::CpKind::kRing, config.model, /*tokens=*/2 * 48 / 3);
  on_ring(3, [&](const nn::ContextPtr& context, const plan::TokenSplit& split, comm::Group& group) {
    nn::KeptAttention kept;
    const int64_t before = sent(group);
    const Attended first = attention(problem, split, context, &kept);
    EXPECT_EQ(sent(group) - before, bytes.forward + bytes.backward);
    const int64_t between = sent(group);
    const Attended second = attention(problem, split, context, &kept);
    EXPECT_EQ(sent(group) - between, bytes.backward);
    EXPECT_TRUE(at::equal(first.d_qkv, second.d_qkv));
  });
}

/// Two parts of keys, merged as the ring merges them, are the whole; on a CPU double precision has no kernel
/// and takes products of matrices.
TEST(AttentionPart, PartsMakeTheWholeByKernelAndByProducts) {
  const int64_t queries = 21, keys = 34, first = 13;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Generator seeded = at::detail::createCPUGenerator(3);
    const auto heads_of = [&](int64_t tokens, int64_t heads) {
      return at::randn({2, tokens, heads, 20}, seeded, at::TensorOptions(dtype));
    };
    const at::Tensor query = heads_of(queries, 6), d_output = heads_of(queries, 6);
    const at::Tensor key = heads_of(keys, 2), value = heads_of(keys, 2);
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& x : {query, key, value}) leaves.push_back(x.to(at::kDouble).requires_grad_());
    const at::Tensor scores =
        at::matmul(leaves[0].transpose(1, 2), leaves[1].repeat_interleave(3, 2).permute({0, 2, 3, 1})) /
        std::sqrt(20.0);
    const at::Tensor output =
        at::matmul(at::softmax(scores, -1), leaves[2].repeat_interleave(3, 2).transpose(1, 2))
            .transpose(1, 2);
    output.backward(d_output.to(at::kDouble));
    const at::Tensor whole = output.detach().to(dtype),
                     log_sums = scores.detach().logsumexp(-1).to(at::kFloat);
    at::Tensor d_query = at::zeros_like(query), merged = at::zeros({2, queries, 6, 20}, at::kDouble);
    for (const auto& [begin, size] : {std::pair(int64_t{0}, first), std::pair(first, keys - first)}) {
      const AttentionPart part{query, key.narrow(1, begin, size), value.narrow(1, begin, size)};
      const nn::PartOutput made = nn::attend(part);
      merged += made.output.to(at::kDouble) *
                (made.log_sums - log_sums).exp().transpose(1, 2).unsqueeze(-1).to(at::kDouble);
      const nn::PartGradients gradients = nn::attend_backward(part, d_output, whole, log_sums);
      d_query += gradients.query;
      EXPECT_LT(relative_error(gradients.key, leaves[1].grad().narrow(1, begin, size)), 1e-5);
      EXPECT_LT(relative_error(gradients.value, leaves[2].grad().narrow(1, begin, size)), 1e-5);
    }
    EXPECT_LT(relative_error(merged, output.detach()), 1e-5);
    EXPECT_LT(relative_error(d_query, leaves[0].grad()), 1e-5);
  }
}

}  // namespace
}  // namespace trireme
