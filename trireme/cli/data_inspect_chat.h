#pragma once
#include <string>

#include "trireme/data/tokenizer.h"
#include "trireme/plan/config.h"

namespace trireme::cli {

/// Prints what training on conversations would read from `path`: how many there are, how much of them counts
/// in the loss and does not fit into a window, and the first one as its template writes it. Throws as
/// data::marked_text().
void inspect_conversations(const std::string& path, const plan::DataConfig& config,
                           const data::Tokenizer& tokenizer, bool json);

}  // namespace trireme::cli
