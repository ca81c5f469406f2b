// What folders of Hugging Face and of DCP say of themselves: index, config.json, and where boxes begin.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tests/checkpoint/fuzz.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/model_layout.h"
#include "trireme/checkpoint/strict_json.h"
#include "trireme/plan/hugging_face.h"
#include "trireme/plan/model_facts.h"

namespace trireme::checkpoint::testing {
namespace {

using Json = nlohmann::json;

constexpr int64_t kDataBegin = 64;

template <typename Body>
bool is_accepted(const Body& body) {
  try {
    body();
    return true;
  } catch (const DataError&) {
    return false;
  }
}

const std::map<std::string, SafetensorsHeader>& files_of_two() {
  static const std::map<std::string, SafetensorsHeader> files = {
      {"a.safetensors", {.tensors = {{"x", {"F32", {2}, 0, 8}}, {"y", {"U8", {1}, 8, 9}}}, .metadata = {}}},
      {"b.safetensors", {.tensors = {{"z", {"I8", {}, 0, 1}}}, .metadata = {}}}};
  return files;
}

/// Whether what the index says of the two files is what they have.
bool is_true_of_two(const FilesIndex& index) {
  return std::ranges::all_of(files_of_two(), [&index](const auto& file) {
    const auto listed = index.find(file.first);
    if (listed == index.end()) return true;
    const auto& tensors = file.second.tensors;
    return listed->second.size() == tensors.size() &&
           std::ranges::all_of(listed->second, [&](const auto& name) { return tensors.contains(name); });
  });
}

bool take_files_index(const std::string& text) {
  const FilesIndex index = parse_files_index(text, "fuzz");
  Json map;
  for (const auto& [file, tensors] : index) {
    EXPECT_TRUE(is_file_name(file) && file.find('/') == std::string::npos) << file;
    for (const std::string& tensor : tensors) {
      EXPECT_FALSE(map.contains(tensor)) << tensor;
      map[tensor] = file;
    }
  }
  EXPECT_EQ(parse_files_index(Json{{"weight_map", map}}.dump(), "fuzz"), index);
  const bool accepted = is_accepted([&index] {
    ModelLayout layout("fuzz");
    for (const auto& [name, header] : files_of_two())
      layout.add_file("folder/" + name, header, kDataBegin, index);
    layout.check_boxes();
    EXPECT_EQ(layout.tensors().size(), 3u);
  });
  EXPECT_EQ(accepted, is_true_of_two(index));
  return true;
}

std::string yaml_of(const plan::ModelConfig& model) {
  plan::Config config;
  config.model = model;
  return plan::to_yaml({config, {}});
}

bool take_model_config(const std::string& text) {
  const Json config = parse_json(text, "fuzz");
  if (config.is_object()) {
    const plan::HuggingFaceNames names(config, {"wte.weight", "model.embed_tokens.weight"});
    EXPECT_TRUE(names("other.weight").has_value());
  }
  plan::ModelConfig model;
  try {
    model = plan::from_hugging_face(config, "fuzz");
  } catch (const ConfigError&) {
    return false;
  }
  const plan::ModelFacts facts = plan::describe(model, 1);
  EXPECT_GT(facts.params, 0);
  const Json again = plan::to_hugging_face(model, "float32");
  EXPECT_EQ(yaml_of(plan::from_hugging_face(again, "fuzz")), yaml_of(model));
  return true;
}

/// The largest tensor that is counted element by element.
constexpr int64_t kSmall = 4096;

/// Whether boxes make up a tensor, element by element.
bool covers(const SourceTensor& tensor, const std::vector<ModelLayout::Box>& boxes) {
  std::vector<int> counts(static_cast<size_t>(tensor.numel()), 0);
  for (const ModelLayout::Box& box : boxes) {
    for (int64_t i = 0; i < box.region.numel(); ++i) {
      int64_t rest = i, element = 0, stride = 1;
      for (size_t dim = tensor.shape.size(); dim-- > 0;) {
        element += (box.region.start[dim] + rest % box.region.extent[dim]) * stride;
        rest /= box.region.extent[dim];
        stride *= tensor.shape[dim];
      }
      ++counts.at(static_cast<size_t>(element));
    }
  }
  return std::ranges::all_of(counts, [](int count) { return count == 1; });
}

/// The header of a file whose entries have these shapes, with bytes enough for them. Throws DataError when a
/// safetensors file cannot have such an entry.
SafetensorsHeader header_of(const Json& entries) {
  if (!entries.is_object()) fail_json("fuzz", "a file is no object");
  SafetensorsHeader header;
  Json starts;
  int64_t end = 0;
  for (const auto& [name, entry] : entries.items()) {
    const Json sizes = value_of(entry, "shape", "fuzz");
    if (!sizes.is_array()) fail_json("fuzz", "a shape is no list");
    HeaderEntry& made = header.tensors[name];
    for (const Json& size : sizes) made.shape.push_back(count_of(Json{{"size", size}}, "size", "fuzz"));
    const auto numel = plan::checked_numel(made.shape);
    if (!numel || *numel > kSmall) fail_json("fuzz", "an entry is larger than its file");
    std::tie(made.dtype, made.begin, made.end) = std::tuple("U8", end, end + *numel);
    end = made.end;
    if (entry.contains(kDcpBoxStart)) starts[name] = {{kDcpBoxStart, entry.at(kDcpBoxStart)}};
  }
  if (!starts.is_null()) header.metadata[kDcpBoxes] = starts.dump();
  return parse_safetensors_header(format_safetensors_header(header), end, "fuzz");
}

bool take_boxes(const std::string& text) {
  const Json files = parse_json(text, "fuzz");
  if (!files.is_array()) return false;
  ModelLayout layout("fuzz");
  for (size_t i = 0; i < files.size(); ++i)
    layout.add_file(fmt::format("folder/{}.safetensors", i), header_of(files[i]), kDataBegin, {});
  const bool small = std::ranges::all_of(layout.tensors(), [](const auto& tensor) {
    const auto numel = plan::checked_numel(tensor.second.shape);
    return numel && *numel <= kSmall;
  });
  const bool accepted = is_accepted([&layout] { layout.check_boxes(); });
  bool covered = true;
  for (const auto& [name, tensor] : layout.tensors())
    covered = covered && small && covers(tensor, layout.boxes_of(name));
  if (small) {
    EXPECT_EQ(accepted, covered);
  }
  return true;
}

}  // namespace

FuzzTarget files_index_target() {
  return {.seeds = {R"({"metadata":{"total_size":10},"weight_map":{"x":"a.safetensors","y":"a.safetensors",)"
                    R"("z":"b.safetensors"}})",
                    R"({"weight_map":{"other":"model-00001-of-00002.safetensors"}})"},
          .words = {"\"weight_map\":{", "\"x\":", "\"z\":\"a.safetensors\",", "\"a.safetensors\"", "../", "/",
                    ".safetensors", "\\u0000", "\\u002e", "null", "{}", ",", "[]", "\"\""},
          .parse = take_files_index};
}

FuzzTarget model_config_target() {
  const plan::ModelConfig llama{.family = plan::ModelFamily::kLlama,
                                .n_layers = 2,
                                .d_model = 16,
                                .n_heads = 4,
                                .n_kv_heads = 2,
                                .d_ff = 24,
                                .vocab_size = 256,
                                .max_seq_len = 64,
                                .rope_theta = 1000.0,
                                .rope_scaling = plan::RopeScaling::kLlama3};
  plan::ModelConfig gpt2 = llama;
  gpt2.family = plan::ModelFamily::kGpt2;
  gpt2.n_kv_heads = gpt2.n_heads;
  return {.seeds = {plan::to_hugging_face(llama, "bfloat16").dump(),
                    plan::to_hugging_face(gpt2, "float32").dump(),
                    R"({"model_type":"llama","num_hidden_layers":1,"hidden_size":8,"num_attention_heads":2,)"
                    R"("intermediate_size":8,"vocab_size":300,"rope_parameters":{"rope_type":"default",)"
                    R"("rope_theta":5.0}})"},
          .words = {"\"model_type\":", "\"gpt2\"", "\"llama\"", "\"rope_parameters\":{",
                    "\"rope_scaling\":", "\"factor\":", "null", "true", "1e308", "-0.0", "[]", "{}", ",",
                    "\"head_dim\":", "\"architectures\":[\"LlamaModel\"],",
                    "\"n_inner\":", "\"num_key_value_heads\":"},
          .parse = take_model_config};
}

FuzzTarget boxes_target() {
  return {
      .seeds = {R"([{"w":{"shape":[2,3],"saved_offsets":[0,0]},"b":{"shape":[4],"saved_offsets":[0]}},)"
                R"({"w":{"shape":[1,3],"saved_offsets":[2,0]}}])",
                R"([{"w":{"shape":[2,2],"saved_offsets":[0,0]}},{"w":{"shape":[2,1],"saved_offsets":[0,2]}},)"
                R"({"w":{"shape":[1,3],"saved_offsets":[2,0]}}])",
                R"([{"s":{"shape":[],"saved_offsets":[]},"e":{"shape":[0,3],"saved_offsets":[0,0]}}])",
                R"([{"w":{"shape":[2,3]}},{"v":{"shape":[5]}}])"},
      .words = {"\"shape\":[0,9],", "\"saved_offsets\":[2,0]", "[0,0]", "{\"w\":", "\"b\":", "null", ",",
                "2305843009213693951", "2305843009213693952", "[]", "{}", "},{"},
      .parse = take_boxes};
}

}  // namespace trireme::checkpoint::testing
