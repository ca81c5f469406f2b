# For doxygen: the lines behind "#pragma once" describe their file; what is indented in them is code.
/^#pragma once/,/^$\|^[^/#]\|^#include/ {
  s,^#pragma once,/// @file,
  s,^//   ,///     ,
  s,^// ,/// ,
  s,^//$,///,
}
# Doxygen takes a specialisation in a namespace that it has not seen for an error.
/^struct fmt::formatter/,/^};/d
