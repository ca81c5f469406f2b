#include "tests/text/gpt2_formats.h"

#include <nlohmann/json.hpp>

#include "trireme/text/byte_level.h"

namespace trireme::text::testing {
namespace {

/// RFC 4648 as it stands.
std::string base64(const std::string& bytes) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t group = 0;
    for (size_t k = 0; k < 3; ++k) {
      group = group << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    }
    for (size_t k = 0; k < 4; ++k) text += i + k > bytes.size() ? '=' : digits[group >> (18 - 6 * k) & 63];
  }
  return text;
}

}  // namespace

std::string merges_txt_of(const nlohmann::json& model) {
  std::string merges = "#version: 0.2\n";
  for (const nlohmann::json& merge : model["merges"]) {
    merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  }
  return merges;
}

std::string ranks_of_tiktoken(const nlohmann::json& model) {
  std::string lines;
  for (const auto& [token, id] : model["vocab"].items()) {
    if (token != "<|endoftext|>") lines += base64(*spelled_bytes(token)) + " " + id.dump() + "\n";
  }
  return lines;
}

}  // namespace trireme::text::testing
