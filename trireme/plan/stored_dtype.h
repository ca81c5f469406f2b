#pragma once
// Which dtypes files of weights hold, by name: the safetensors format's and torch's. So what cannot be saved
// is refused before it trains, by rooms that write no files.
#include <string_view>

namespace trireme::plan {

/// The format's name of a dtype that torch calls so ("F32" of "Float"); empty: the format has none.
std::string_view stored_dtype(std::string_view torch_name);

}  // namespace trireme::plan
