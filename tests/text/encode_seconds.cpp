// encode_seconds FILE [PATTERN]: encodes texts on request, for bench/tokenizer_speed.py. FILE is a
// tokenizer.json, or with PATTERN tiktoken's. Reads lines "THREADS PATH" from stdin, where PATH is a JSON
// array of texts; answers each with a line of seconds, the number of tokens and a checksum of all ids.
#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/text/load.h"

namespace trireme::text {
namespace {

void answer(const Tokenizer& tokenizer, int64_t threads, const std::vector<std::string>& texts) {
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  const auto begin = std::chrono::steady_clock::now();
  const auto ids = encode_batch(tokenizer, views, threads);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  StreamingHash hash;
  size_t tokens = 0;
  for (const auto& one : ids) {
    hash.update(one.data(), one.size() * sizeof one[0]);
    tokens += one.size();
  }
  std::cout << elapsed.count() << " " << tokens << " " << hex64(hash.digest()) << std::endl;
}

int serve(const std::vector<std::string>& arguments) {
  const Tokenizer tokenizer = arguments.size() > 2 ? tokenizer_from_tiktoken(arguments[1], arguments[2])
                                                   : load_tokenizer(arguments.at(1));
  std::string known_path, path;
  std::vector<std::string> texts;
  for (int64_t threads = 0; std::cin >> threads >> path;) {
    if (path != known_path)
      texts = nlohmann::json::parse(std::ifstream(path)).get<std::vector<std::string>>();
    known_path = path;
    answer(tokenizer, threads, texts);
  }
  return 0;
}

}  // namespace
}  // namespace trireme::text

int main(int argc, char** argv) {
  try {
    return trireme::text::serve({argv, argv + argc});
  } catch (const trireme::Error& error) {
    std::cerr << error.what() << "\n";
    return static_cast<int>(error.exit_code());
  }
}
