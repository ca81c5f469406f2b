#pragma once
// Special tokens around those of a text.
#include <cstdint>
#include <optional>
#include <vector>

#include "trireme/text/json_view.h"

namespace trireme::text {

/// Tokens in order; nothing stands for those of the text.
using Template = std::vector<std::optional<int32_t>>;
/// Templates, each around what the one before it made.
using PostProcessor = std::vector<Template>;

std::vector<int32_t> post_process(const PostProcessor& processor, std::vector<int32_t> ids);

/// From a "post_processor" in tokenizer.json; what it says about pairs of texts is not used. Throws
/// ConfigError naming a component that there is not, and DataError for fields of wrong types.
PostProcessor post_processor_from(const JsonView& json);

}  // namespace trireme::text
