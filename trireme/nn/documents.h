#pragma once
// Documents side by side in sequences of tokens, which attention keeps apart: a token attends to those of its
// own document alone, and positions begin at 0 in each.
#include <ATen/core/Tensor.h>

#include "trireme/nn/attention.h"

namespace trireme::nn {

/// The places of documents in sequences (B, T), whole ones wherever their tokens are. A document that goes
/// over from one sequence to the next is one document in each. Without tensors each sequence is one document.
struct Documents {
  /// (B, T) int32: the place in its sequence at which the document of each token begins.
  at::Tensor starts = {};
  /// (n + 1) int32, rising from 0 to B T: the ends of all n documents, with sequences one after another. Some
  /// may be empty. Read on a GPU alone.
  at::Tensor ends = {};

  bool are_apart() const { return starts.defined(); }
  /// On another device, enqueued on its current stream.
  Documents to(at::Device device) const;
};

/// The place of each token in its document, (B, T) int64.
at::Tensor places_in(const Documents& documents);
/// Rows of `table`, that of T places, for each token of (B, T): (B, T, head_dim / 2).
RopeTable rope_in(const Documents& documents, const RopeTable& table);

/// causal_attention() within documents, with qkv of whole sequences. `rope` is what rope_in() made, or holds
/// undefined tensors. Without documents: causal_attention().
at::Tensor attention_in_documents(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                                  double dropout, KeptAttention* kept, const Documents& documents);

/// The backend of attention within documents. CPU: kCpu, for fp64 kAten. GPU, bf16 and fp16 with heads of a
/// multiple of 8 up to 256 (192 on GPUs other than 8.0, 9.0 and 10.0) and without dropout: kFlash. All else:
/// kAten, which reads a mask (B, 1, T, T).
AttentionBackend document_attention_backend(at::Device device, at::ScalarType dtype, int64_t head_dim,
                                            double dropout);

}  // namespace trireme::nn
