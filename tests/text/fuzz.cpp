#include "tests/text/fuzz.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>
#include <set>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"
#include "tests/text/fuzz_tool.h"
#include "tests/text/gpt2_formats.h"
#include "trireme/text/chat_template.h"
#include "trireme/text/load.h"
#include "trireme/text/regex.h"

namespace trireme::text::testing {
namespace {

using Words = std::vector<std::string>;
using nlohmann::json;

constexpr size_t kFewTokens = 70;  // of a seed: what is read at all is read sooner

/// A folder in memory where there is one: a disk writes a file that is replaced at once.
std::filesystem::path quick_folder() {
  const std::filesystem::path memory = "/dev/shm";
  return std::filesystem::exists(memory) ? memory : std::filesystem::temp_directory_path();
}

json few_tokens(const json& vocab) {
  if (vocab.is_array()) return json(vocab.begin(), vocab.begin() + std::min(vocab.size(), kFewTokens));
  json few = json::object();
  for (const auto& [token, id] : vocab.items()) {
    if (id.get<size_t>() < kFewTokens || token.starts_with("<0x4")) few[token] = id;
  }
  return few;
}

/// The tokenizer with few of its tokens, and the merges of these.
json small_tokenizer(json file) {
  json& model = file["model"];
  model["vocab"] = few_tokens(model["vocab"]);
  if (!model.contains("merges")) return file;
  const json& vocab = model["vocab"];
  json merges = json::array();
  for (const json& merge : model["merges"]) {
    const auto left = merge[0].get<std::string>(), right = merge[1].get<std::string>();
    if (vocab.contains(left) && vocab.contains(right) && vocab.contains(left + right))
      merges.push_back(merge);
  }
  model["merges"] = merges;
  return file;
}

/// The model with its first pieces.
std::string small_model(const std::string& bytes) {
  std::string small;
  protozero::pbf_writer writer(small);
  protozero::pbf_reader message(bytes);
  for (size_t pieces = 0; message.next();) {
    const auto tag = message.tag();
    const auto view = message.get_view();
    if (tag != 1 || pieces++ < kFewTokens) writer.add_bytes(tag, view.data(), view.size());
  }
  return small;
}

Words seeds_that_end(const std::string& end) {
  Words seeds;
  for (const std::string& name : tokenizers_in(fixtures())) {
    const std::string file = file_of(fixtures(), name);
    if (!file.ends_with(end)) continue;
    const std::string bytes = fuzz_seed(file);
    seeds.push_back(end == ".json" ? small_tokenizer(json::parse(bytes)).dump() : small_model(bytes));
  }
  return seeds;
}

void use_tokenizer(const Tokenizer& tokenizer) {
  for (const std::string& text : fuzz_samples()) {
    const std::vector<int32_t> ids = tokenizer.encode(text, true);
    for (const int32_t id : ids) ASSERT_LT(id, tokenizer.vocab_size());
    tokenizer.decode(ids);
  }
}

/// `files`: name and seed of each, of which one is damaged at a time. `loaded` is what is then loaded.
void fuzz_folder(const std::vector<std::pair<std::string, std::string>>& files, const std::string& loaded,
                 const Words& words, uint64_t executions) {
  const trireme::testing::Scratch scratch(quick_folder());
  for (const auto& [name, seed] : files) scratch.write(name, seed);
  use_tokenizer(load_tokenizer(scratch.path(loaded)));
  bool goes_on = true;
  for (uint64_t i = 0; i < executions && goes_on; ++i) {
    FuzzDraws draws(i);
    const auto& [name, seed] = draws.one_of(files);
    scratch.write(name, damaged(seed, words, {seed}, draws));
    goes_on = fuzz_once(i, [&] { use_tokenizer(load_tokenizer(scratch.path(loaded))); });
    if (files.size() > 1) scratch.write(name, seed);
  }
}

/// `seeds` of one kind, each of which is accepted as it is.
void fuzz_files(const std::string& name, const Words& seeds, const Words& words, uint64_t executions) {
  const trireme::testing::Scratch scratch(quick_folder());
  for (const std::string& seed : seeds) use_tokenizer(load_tokenizer(scratch.write(name, seed)));
  bool goes_on = true;
  for (uint64_t i = 0; i < executions && goes_on; ++i) {
    FuzzDraws draws(i);
    const std::string path = scratch.write(name, damaged(draws.one_of(seeds), words, seeds, draws));
    goes_on = fuzz_once(i, [&] { use_tokenizer(load_tokenizer(path)); });
  }
}

json gpt2_model() {
  return json::parse(fuzz_seed(fixtures() + "/gpt2.json"))["model"];
}

}  // namespace

void fuzz_tokenizer_json(uint64_t executions) {
  const Words words = {"null",
                       "true",
                       "{}",
                       "[]",
                       R"("type":"Sequence",)",
                       R"("id":0,)",
                       R"({"Regex":"(a*)*"})",
                       R"("BPE")",
                       R"("Unigram")",
                       R"("WordPiece")",
                       R"("")",
                       R"(\ud800)",
                       R"("byte_fallback":true,)"};
  fuzz_files("tokenizer.json", seeds_that_end(".json"), words, executions);
}

void fuzz_sentencepiece(uint64_t executions) {
  const Words words = {std::string("\x0a\x00", 2),
                       "\x12\x02\x18\x02",
                       "\x1a\x02\x18\x00",
                       "\xff\xff\xff\xff\x0f",
                       "\x18\x04",
                       "\x18\x06",
                       "\xe2\x96\x81",
                       "<0x41>"};
  fuzz_files("tokenizer.model", seeds_that_end(".model"), words, executions);
}

void fuzz_gpt2_files(uint64_t executions) {
  const json model = small_tokenizer({{"model", gpt2_model()}})["model"];
  fuzz_folder({{"vocab.json", model["vocab"].dump()}, {"merges.txt", merges_txt_of(model)}}, "",
              {"\n", " ", "a a\n", "\"\":1,", "\"<|endoftext|>\":3,"}, executions);
}

void fuzz_tiktoken(uint64_t executions) {
  fuzz_folder({{"qwen.tiktoken", ranks_of_tiktoken(gpt2_model())}}, "qwen.tiktoken",
              {"\n", "=", " 0\n", "IQ== 7\n"}, executions);
}

void fuzz_chat_templates(uint64_t executions) {
  const Words words = {"{{",
                       "}}",
                       "{%",
                       "%}",
                       "{%-",
                       "for x in messages",
                       "endfor",
                       "if",
                       "else",
                       "range(9)",
                       "namespace(a=1)",
                       "|tojson",
                       "|length",
                       "|trim",
                       "[::-1]",
                       "loop.index",
                       "messages",
                       "is defined",
                       "~",
                       " in ",
                       "not ",
                       "'",
                       "**",
                       "//"};
  Words seeds;
  for (const auto& entry : std::filesystem::directory_iterator(fixtures() + "/chat")) {
    if (entry.path().extension() == ".jinja") seeds.push_back(fuzz_seed(entry.path()));
  }
  std::sort(seeds.begin(), seeds.end());
  const auto messages =
      nlohmann::ordered_json::parse(R"([{"role":"system","content":"s"},{"role":"user","content":"a\n"},)"
                                    R"({"role":"assistant","content":"<b> \u00e9"}])");
  bool goes_on = !seeds.empty();
  for (uint64_t i = 0; i < executions && goes_on; ++i) {
    FuzzDraws draws(i);
    const std::string source = damaged(draws.one_of(seeds), words, seeds, draws);
    goes_on = fuzz_once(i, [&] {
      const ChatTemplate chat(source, "fuzz");
      for (const bool prompts : {false, true}) {
        const ChatText written = chat.render(messages, prompts);
        for (const Span& span : written.generated) ASSERT_LE(span.end, written.text.size());
      }
    });
  }
}

void fuzz_patterns(uint64_t executions) {
  const Words words = {"\\p{L}",  "\\p{Han}", "(?i:",     "(?=",   "(?!",     "(?<=", "(?>",
                       "[^",      "]",        ")",        "{2,5}", "{,3}",    "++",   "*?",
                       "\\u00e9", "\\h",      "\\w",      "\\b",   "^",       "$",    "\\1",
                       "(?<n>",   "\\k<n>",   "[a-z&&b]", "(a+)+", "\\x{41}", "|",    ".*"};
  const Words seeds = {"'s|'t|'re| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
                       "(?i:'s|'t)|[^\\r\\n\\p{L}]?\\p{L}+|\\p{N}{1,3}", "\\w+|\\b'|[\\p{Han}a]+",
                       "(a|b)*c{,2}(?<x>d)", "^\\h+$|x++y"};
  bool goes_on = true;
  for (uint64_t i = 0; i < executions && goes_on; ++i) {
    FuzzDraws draws(i);
    const std::string pattern = damaged(draws.one_of(seeds), words, seeds, draws);
    goes_on = fuzz_once(i, [&] {
      const Regex regex(pattern);
      for (const std::string& text :
           {std::string("Hello, wor\xcc\x81ld 12 \xe4\xb8\xad"), std::string(40, 'a') + "\n "}) {
        std::vector<Span> matches;
        regex.find_all(text, matches);
        size_t end = 0;
        for (const Span& match : matches) {
          ASSERT_LE(end, match.begin);
          ASSERT_LE(match.begin, match.end);
          end = match.end;
        }
        ASSERT_LE(end, text.size());
      }
    });
  }
}

}  // namespace trireme::text::testing
