#pragma once
// The places of documents in batches of text, by the token that ends each of them.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "trireme/data/token_samples.h"

namespace trireme::data {

/// The places of documents in sequences (B, T). A document that goes over from one sequence to the next is
/// one document in each.
struct DocumentTable {
  /// (B, T) int32: the place in its sequence at which the document of each token begins.
  at::Tensor starts = {};
  /// (n + 1) int32, rising from 0 to B T: the ends of all n documents, with sequences one after another.
  at::Tensor ends = {};
};

/// The table of tokens (B, T) int64 on the CPU, of which `end_token` is the last of each document; in pinned
/// memory where that is asked for.
DocumentTable document_table(const at::Tensor& tokens, int64_t end_token, bool pin_memory = false);

/// The table of these samples, whose tokens (B, T) are: by TokenSamples::document_begins() of those that know
/// it, else by the end token.
DocumentTable document_table(const TokenSamples& samples, std::span<const int64_t> indices,
                             const at::Tensor& tokens, int64_t end_token, bool pin_memory = false);

}  // namespace trireme::data
