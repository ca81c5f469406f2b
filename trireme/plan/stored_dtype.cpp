#include "trireme/plan/stored_dtype.h"

#include <algorithm>
#include <array>

namespace trireme::plan {
namespace {

struct StoredName {
  std::string_view stored, torch;
};
constexpr auto kStoredNames = std::to_array<StoredName>({{"F64", "Double"},
                                                         {"F32", "Float"},
                                                         {"F16", "Half"},
                                                         {"BF16", "BFloat16"},
                                                         {"I64", "Long"},
                                                         {"I32", "Int"},
                                                         {"I16", "Short"},
                                                         {"I8", "Char"},
                                                         {"U64", "UInt64"},
                                                         {"U32", "UInt32"},
                                                         {"U16", "UInt16"},
                                                         {"U8", "Byte"},
                                                         {"BOOL", "Bool"},
                                                         {"C64", "ComplexFloat"},
                                                         {"F8_E4M3", "Float8_e4m3fn"},
                                                         {"F8_E5M2", "Float8_e5m2"},
                                                         {"F8_E8M0", "Float8_e8m0fnu"},
                                                         {"F8_E4M3FNUZ", "Float8_e4m3fnuz"},
                                                         {"F8_E5M2FNUZ", "Float8_e5m2fnuz"},
                                                         {"F4", "Float4_e2m1fn_x2"}});

}  // namespace

std::string_view stored_dtype(std::string_view torch_name) {
  const auto* const found = std::ranges::find(kStoredNames, torch_name, &StoredName::torch);
  return found == kStoredNames.end() ? std::string_view() : found->stored;
}

}  // namespace trireme::plan
