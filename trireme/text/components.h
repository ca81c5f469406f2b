#pragma once
// The parts of tokenizer.json that have a "type".
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/text/json_view.h"

namespace trireme::text {

/// `json` itself, or, for a Sequence, the parts in its array `key`, in order, and so on. Throws DataError
/// where sequences are nested more than 16 deep.
std::vector<JsonView> components_of(const JsonView& json, const char* key);

/// Throws ConfigError: the file at `part` asks for a `kind` that there is not.
[[noreturn]] void refuse_component(const JsonView& part, std::string_view kind,
                                   const std::vector<std::string>& known);

/// The row of `table` with the name in "type" of `part`.
template <typename Table>
const typename Table::value_type& named(const Table& table, const JsonView& part, std::string_view kind) {
  const std::string type = part.text_at("type");
  std::vector<std::string> known;
  for (const auto& row : table) {
    if (row.name == type) return row;
    known.emplace_back(row.name);
  }
  refuse_component(part, kind, known);
}

}  // namespace trireme::text
