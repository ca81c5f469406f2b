#pragma once
#include <string>
#include <string_view>

namespace trireme::text {

/// `pattern`, of Oniguruma's Ruby syntax, in the syntax of PCRE2. Translates where the two differ for the
/// same text: \w and \b (marks and other alphabetic characters are of a word), \h (a hexadecimal digit),
/// names of scripts, {,n} and \uHHHH. Throws ConfigError for what it cannot translate: intersections
/// and nested sets, \W in a set, {n,m}+, POSIX classes but space, digit, upper and lower, and options but i
/// and x.
std::string to_pcre2(std::string_view pattern);

}  // namespace trireme::text
