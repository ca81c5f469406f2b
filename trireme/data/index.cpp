#include "trireme/data/index.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::data {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSchema = "trireme.tokens/1";
constexpr int64_t kMaxTokens = int64_t{1} << 48;  // keeps every size computed from it far from overflow

std::string index_path(const std::string& folder) {
  return folder + "/index.json";
}

/// The counts by name, in the order in which they are written.
struct CountName {
  const char* name;
  int64_t ConversationCounts::*count;
};
constexpr CountName kCounts[] = {{"conversations", &ConversationCounts::conversations},
                                 {"tokens", &ConversationCounts::tokens},
                                 {"counted", &ConversationCounts::counted},
                                 {"padding", &ConversationCounts::padding},
                                 {"cut", &ConversationCounts::cut},
                                 {"cut_tokens", &ConversationCounts::cut_tokens},
                                 {"cut_answers", &ConversationCounts::cut_answers},
                                 {"lost_answers", &ConversationCounts::lost_answers},
                                 {"left_out", &ConversationCounts::left_out}};

const char* dtype_name(int64_t stored_values) {
  return bytes_per_token(stored_values) == 2 ? "uint16" : "uint32";
}

Json split_json(const SplitEntry& split) {
  Json shards = Json::array();
  for (const ShardEntry& shard : split.shards) {
    shards.push_back({{"file", shard.file}, {"tokens", shard.tokens}, {"chunks", shard.chunks}});
  }
  return {{"tokens", split.tokens}, {"documents", split.documents}, {"shards", shards}};
}

Json index_json(const TokenIndex& index) {
  Json json{{"schema", kSchema},
            {"tokenizer", index.tokenizer},
            {"vocab_size", index.vocab_size},
            {"dtype", dtype_name(index.stored_values())},
            {"source",
             {{"path", index.source},
              {"files", index.source_files},
              {"bytes", index.source_bytes},
              {"not_utf8", {{"files", index.not_utf8_files}, {"first", index.first_not_utf8}}},
              {"val_fraction", index.val_fraction}}}};
  if (index.conversations) {
    for (const auto& [name, count] : kCounts) json["conversations"][name] = (*index.conversations).*count;
    if (index.kinds != kCountedKinds) json["conversations"]["kinds"] = index.kinds;
  }
  for (const auto& [name, split] : index.splits) json["splits"][name] = split_json(split);
  return json;
}

[[noreturn]] void bad_index(const std::string& path, std::string_view reason) {
  throw DataError("[data.index] {}: {}; delete the folder and prepare the data again", path, reason);
}

/// A file name that cannot lead out of the folder.
bool is_plain_name(const std::string& name) {
  const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_'; };
  return !name.empty() && name[0] != '.' && std::ranges::all_of(name, plain);
}

SplitEntry parse_split(const Json& json) {
  SplitEntry split{.tokens = json.at("tokens"), .documents = json.at("documents"), .shards = {}};
  for (const Json& shard : json.at("shards")) {
    split.shards.push_back({shard.at("file"), shard.at("tokens"), shard.at("chunks")});
  }
  return split;
}

TokenIndex parse_index(const Json& json) {
  const Json &source = json.at("source"), &not_utf8 = source.at("not_utf8");
  TokenIndex index{.tokenizer = json.at("tokenizer"),
                   .vocab_size = json.at("vocab_size"),
                   .source = source.at("path"),
                   .source_files = source.at("files"),
                   .source_bytes = source.at("bytes"),
                   .not_utf8_files = not_utf8.at("files"),
                   .first_not_utf8 = not_utf8.at("first"),
                   .val_fraction = source.at("val_fraction"),
                   .conversations = {},
                   .splits = {}};
  if (json.contains("conversations")) {
    index.conversations.emplace();
    for (const auto& [name, count] : kCounts)
      (*index.conversations).*count = json.at("conversations").at(name);
    index.kinds = json.at("conversations").value("kinds", kCountedKinds);
  }
  for (const auto& [name, split] : json.at("splits").items()) index.splits[name] = parse_split(split);
  return index;
}

void check_split(const std::string& path, const SplitEntry& split) {
  int64_t tokens = 0;
  for (const ShardEntry& shard : split.shards) {
    if (!is_plain_name(shard.file))
      bad_index(path, fmt::format("shard name '{}' is not a plain file name", shard.file));
    if (shard.tokens < 1 || shard.tokens > kMaxTokens || shard.chunks < 1 || shard.chunks > shard.tokens) {
      bad_index(path, fmt::format("{} has {} tokens in {} chunks", shard.file, shard.tokens, shard.chunks));
    }
    tokens += shard.tokens;
    if (tokens > kMaxTokens) break;
  }
  if (tokens != split.tokens)
    bad_index(path, fmt::format("its shards have {} tokens in all, but it says {}", tokens, split.tokens));
}

void check_index(const std::string& path, const TokenIndex& index) {
  if (index.vocab_size < 1) bad_index(path, fmt::format("vocab_size is {}", index.vocab_size));
  if (index.kinds != kCountedKinds && index.kinds != kKindsWithBegins)
    bad_index(path, fmt::format("its conversations have {} kinds of tokens", index.kinds));
  for (const char* name : {"train", "val"}) {
    if (!index.splits.contains(name)) bad_index(path, fmt::format("split '{}' is missing", name));
  }
  for (const auto& [name, split] : index.splits) check_split(path, split);
}

std::string read_text(const std::string& path) {
  if (is_special_file(path)) bad_index(path, "it is not a regular file");  // a pipe keeps its readers waiting
  try {
    return read_file(path);
  } catch (const EnvironmentError& error) {
    bad_index(path, error.what());
  }
}

}  // namespace

int64_t TokenIndex::documents() const {
  int64_t count = 0;
  for (const auto& [name, split] : splits) count += split.documents;
  return count;
}

ConversationCounts& ConversationCounts::operator+=(const ConversationCounts& other) {
  for (const auto& each : kCounts) this->*each.count += other.*each.count;
  return *this;
}

int64_t bytes_per_token(int64_t stored_values) {
  return stored_values <= 65536 ? 2 : 4;
}

void write_index(const std::string& folder, const TokenIndex& index) {
  // Paths may hold any byte; JSON may not.
  const std::string text = index_json(index).dump(2, ' ', false, Json::error_handler_t::replace);
  write_file_atomic(index_path(folder), text + "\n");
}

TokenIndex read_index(const std::string& folder) {
  const std::string path = index_path(folder);
  const std::string text = read_text(path);
  try {
    const Json json = Json::parse(text);
    const std::string schema = json.at("schema");
    if (schema != kSchema)
      bad_index(path, fmt::format("schema is '{}', but this version reads '{}'", schema, kSchema));
    TokenIndex index = parse_index(json);
    check_index(path, index);
    return index;
  } catch (const Json::exception& error) {
    bad_index(path, error.what());
  }
}

}  // namespace trireme::data
