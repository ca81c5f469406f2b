// Folders of others, by hand: what transformers and DCP write is read in tests/nn/hugging_face_test.cpp.
#include "trireme/checkpoint/model_folder.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/checkpoint/saved.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/new_folder.h"
#include "trireme/checkpoint/tensor_file.h"
#include "trireme/plan/model_facts.h"

namespace trireme::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using testing::message_of;
using testing::Scratch;

/// Tensors of numbers that count up from 0.
class Numbers : public Source {
 public:
  explicit Numbers(std::map<std::string, SourceTensor> tensors) : Source("numbers") {
    tensors_ = std::move(tensors);
  }
  const std::map<std::string, std::string>& metadata() const override { return none_; }
  void read(const std::string& name, const plan::Region& region, void* out) const override {
    const SourceTensor& tensor = tensors_.at(name);
    for (plan::RunCursor cursor(tensor.shape, region); !cursor.done(); cursor.next()) {
      for (int64_t i = 0; i < cursor.run().length; ++i)
        static_cast<float*>(out)[cursor.run().local + i] = static_cast<float>(cursor.run().begin + i);
    }
  }

 private:
  std::map<std::string, std::string> none_;
};

/// A folder with a file of each list of tensors, every one F32 [3, 4].
struct Fixture {
  Scratch scratch;
  std::string path = scratch.path("model");
  Fixture() { fs::create_directory(path); }
  void file(const std::string& name, const std::vector<std::string>& tensors) const {
    std::map<std::string, SourceTensor> infos;
    for (const std::string& tensor : tensors) infos[tensor] = {"F32", {3, 4}};
    const Numbers source(infos);
    std::vector<FileEntry> entries;
    for (const std::string& tensor : tensors) entries.push_back(whole_entry(source, tensor));
    write_tensor_file(Folder(path), name, source, entries, {{"format", "pt"}});
  }
  void index(const Json& map) const {
    scratch.write("model/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  }
  std::string refusal() const {
    return message_of<DataError>([&] { open_model_folder(path); });
  }
};

bool says(const std::string& message, const std::string& part) {
  return message.find(part) != std::string::npos;
}

TEST(ModelFolder, ReadsAnyRegionFromAnyFile) {
  const Fixture fixture;
  fixture.file("a.safetensors", {"first"});
  fixture.file("b.safetensors", {"second"});
  fixture.index({{"first", "a.safetensors"}, {"second", "b.safetensors"}});
  ASSERT_TRUE(is_model_folder(fixture.path));
  const auto source = open_source(fixture.path);
  std::vector<float> values(5);
  source->read("second", plan::Region::flat({3, 4}, {5, 10}), values.data());
  EXPECT_EQ(values, (std::vector<float>{5, 6, 7, 8, 9}));
}

TEST(ModelFolder, AnIndexThatDoesNotFitIsRefused) {
  const Fixture fixture;
  fixture.file("a.safetensors", {"first", "second"});
  fixture.file("b.safetensors", {"second"});
  fixture.index({{"first", "a.safetensors"}, {"second", "b.safetensors"}});
  EXPECT_TRUE(says(fixture.refusal(), "lists elsewhere or not at all: second")) << fixture.refusal();
  fixture.index({{"first", "a.safetensors"}, {"second", "a.safetensors"}, {"third", "a.safetensors"}});
  EXPECT_TRUE(says(fixture.refusal(), "it lacks tensors that model.safetensors.index.json lists: third"))
      << fixture.refusal();
  fixture.index({{"first", "c.safetensors"}});
  EXPECT_TRUE(says(fixture.refusal(), "c.safetensors")) << fixture.refusal();
  fixture.index(Json::object());
  EXPECT_TRUE(says(fixture.refusal(), "names no tensors")) << fixture.refusal();
  fixture.index({{"first", 1}});
  EXPECT_NE(fixture.refusal(), "");
}

TEST(ModelFolder, NothingOutsideTheFolderIsOpened) {
  const Fixture fixture;
  const Fixture outside;
  outside.file("secret.safetensors", {"first"});
  const std::string target = outside.path + "/secret.safetensors";
  for (const std::string& name :
       {target,
        "../" + fs::path(outside.path).parent_path().filename().string() + "/model/secret.safetensors",
        std::string(".."), std::string("sub/a.safetensors"), std::string(".a.safetensors"),
        std::string("a.safetensors\n"), std::string("a.bin")}) {
    fixture.index({{"first", name}});
    EXPECT_TRUE(says(fixture.refusal(), "is not a safetensors file in this folder")) << fixture.refusal();
  }
  fs::create_symlink(target, fixture.path + "/a.safetensors");
  fixture.index({{"first", "a.safetensors"}});
  EXPECT_TRUE(says(fixture.refusal(), "is a symbolic link")) << fixture.refusal();
}

/// "snapshots/REVISION/NAME" are links to "blobs/HASH".
TEST(ModelFolder, TheCacheOfHuggingFaceIsReadAsItLies) {
  const Scratch scratch;
  Fixture plain;
  plain.file("model.safetensors", {"first"});
  fs::create_directories(scratch.path("blobs"));
  fs::create_directories(scratch.path("snapshots/main"));
  fs::copy_file(plain.path + "/model.safetensors", scratch.path("blobs/0a1b2c"));
  fs::create_symlink("../../blobs/0a1b2c", scratch.path("snapshots/main/model.safetensors"));
  EXPECT_TRUE(open_model_folder(scratch.path("snapshots/main"))->tensors().contains("first"));
  fs::rename(scratch.path("blobs/0a1b2c"), scratch.path("elsewhere"));
  fs::create_symlink("../elsewhere", scratch.path("blobs/0a1b2c"));
  EXPECT_THROW(open_model_folder(scratch.path("snapshots/main")), DataError);
}

TEST(ModelFolder, ATensorInTwoFilesIsRefused) {
  const Fixture fixture;
  fixture.file("a.safetensors", {"first", "second"});
  fixture.file("b.safetensors", {"second"});
  EXPECT_TRUE(says(fixture.refusal(), "tensor 'second' is in a.safetensors and in another file"))
      << fixture.refusal();
}

TEST(ModelFolder, IsAFolderWithWeightsOrAConfigOfAModel) {
  for (const char* name : {"config.json", "a.safetensors", "pytorch_model.bin"}) {
    const Scratch scratch;
    scratch.write(std::string("in/") + name, "");
    EXPECT_TRUE(is_model_folder(scratch.path("in"))) << name;
    EXPECT_FALSE(is_model_folder(scratch.path(std::string("in/") + name))) << "a file is no folder";
  }
  const Scratch scratch;
  scratch.write("in/notes.txt", "");
  EXPECT_FALSE(is_model_folder(scratch.path("in")));
  EXPECT_FALSE(is_model_folder(scratch.path("missing")));
}

TEST(ModelFolder, PicklesAreRefusedWithTheWayOut) {
  const Fixture fixture;
  fixture.scratch.write("model/pytorch_model.bin", "x");
  fixture.scratch.write("model/config.json", "{}");
  EXPECT_TRUE(is_model_folder(fixture.path));
  EXPECT_TRUE(says(fixture.refusal(), "convert it to safetensors")) << fixture.refusal();
  EXPECT_TRUE(
      says(message_of<DataError>([&] { open_source(fixture.path + "/pytorch_model.bin"); }), "pickle"));
}

TEST(ModelFolder, AHeadThatIsTiedMustBeWhatItIsTiedTo) {
  const Fixture fixture;
  fixture.scratch.write("model/config.json", R"({"model_type":"llama","tie_word_embeddings":true})");
  fixture.file("model.safetensors", {"lm_head.weight", "model.embed_tokens.weight"});
  EXPECT_NO_THROW(check_tied_head(fixture.path));
  EXPECT_FALSE(open_model_folder(fixture.path)->tensors().contains("lm_head.weight"));
  std::string bytes = InputFile(fixture.path + "/model.safetensors").text(1 << 20);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  fixture.scratch.write("model/model.safetensors", bytes);
  EXPECT_TRUE(says(message_of<DataError>([&] { check_tied_head(fixture.path); }), "but they differ"));
}

/// Boxes of DCP: the files of three ranks are whole, those of two are not.
TEST(ModelFolder, BoxesMustMakeUpTheTensor) {
  const Fixture fixture;
  const Numbers source({{"w", {"F32", {5, 4}}}, {"scalar", {"F32", {}}}, {"none", {"F32", {0, 4}}}});
  write_dcp_files(Folder(fixture.path), source, {"w", "scalar", "none"}, 3);
  EXPECT_TRUE(compare(*open_source(fixture.path), source).empty());
  fs::remove(fixture.path + "/shard-00002-model-00001-of-00001.safetensors");
  EXPECT_TRUE(says(fixture.refusal(), "the files do not make up tensor 'w'")) << fixture.refusal();
}

TEST(ModelFolder, HostilePlacesOfBoxesAreRefused) {
  for (const char* places :
       {R"({"w":{"saved_offsets":[-1,0]}})", R"({"w":{"saved_offsets":[0]}})",
        R"({"w":{"saved_offsets":[9223372036854775807,0]}})", R"({"w":{"saved_offsets":0}})", R"({"w":{}})",
        R"({})", R"([])", "x", R"({"w":{"saved_offsets":[1,0]}})",
        R"({"w":{"saved_offsets":[1152921504606846976,0]}})"}) {
    const Fixture fixture;
    const Numbers source({{"w", {"F32", {3, 4}}}});
    write_tensor_file(Folder(fixture.path), "shard.safetensors", source, {whole_entry(source, "w")},
                      {{"DCP_SHARDING_INFO", places}});
    EXPECT_NE(fixture.refusal(), "") << places;
  }
}

TEST(ModelFolder, FilesAreNoLargerThanAskedFor) {
  const Fixture fixture;
  const Numbers source({{"a", {"F32", {3, 4}}}, {"b", {"F32", {3, 4}}}, {"c", {"F32", {30, 4}}}});
  write_model_files(Folder(fixture.path), source, {"b", "a", "c"}, {.max_file_bytes = 100});
  EXPECT_TRUE(fs::exists(fixture.path + "/model-00002-of-00002.safetensors"));
  EXPECT_TRUE(compare(*open_source(fixture.path), source).empty());
  const Json index = Json::parse(InputFile(fixture.path + "/model.safetensors.index.json").text(1 << 20));
  EXPECT_EQ(index["metadata"]["total_size"], (12 + 12 + 120) * 4);
  EXPECT_EQ(index["weight_map"]["c"], "model-00002-of-00002.safetensors");
}

/// A file ends where the next tensor would make it too large, and not before.
TEST(ModelFolder, FilesAreFilledAsFarAsTheyMayBe) {
  const std::vector<std::string> names = {"a", "b", "c", "d", "e"};
  const std::map<std::string, int64_t> rows = {{"a", 3}, {"b", 1}, {"c", 7}, {"d", 2}, {"e", 2}};
  std::map<std::string, SourceTensor> infos;
  for (const auto& [name, count] : rows) infos[name] = {"F32", {count}};
  const Numbers source(infos);
  for (int64_t most = 1; most <= 4 * 16; ++most) {
    const Fixture fixture;
    write_model_files(Folder(fixture.path), source, names, {.max_file_bytes = most});
    EXPECT_TRUE(compare(*open_source(fixture.path), source).empty()) << most;
    const std::string index = fixture.path + "/model.safetensors.index.json";
    const Json map = fs::exists(index) ? Json::parse(InputFile(index).text(1 << 20))["weight_map"] : Json();
    int64_t bytes = 4 * rows.at("a");
    for (size_t i = 1; i < names.size(); ++i) {
      const bool fits = bytes + 4 * rows.at(names[i]) <= most;
      bytes = (fits ? bytes : 0) + 4 * rows.at(names[i]);
      EXPECT_EQ(map.is_null() || map[names[i]] == map[names[i - 1]], fits) << names[i] << ", " << most;
    }
  }
}

/// Numbers of which some are larger by as much as is said of them.
class Moved : public Numbers {
 public:
  Moved(const std::map<std::string, SourceTensor>& tensors, std::map<int64_t, float> by)
      : Numbers(tensors), by_(std::move(by)) {}
  void read(const std::string& name, const plan::Region& region, void* out) const override {
    Numbers::read(name, region, out);
    for (int64_t i = 0; i < region.numel(); ++i) {
      float& value = static_cast<float*>(out)[i];
      const auto moved = by_.find(static_cast<int64_t>(value));
      if (moved != by_.end()) value += moved->second;
    }
  }

 private:
  std::map<int64_t, float> by_;
};

TEST(Compare, CountsElementsThatDifferAndSaysByHowMuch) {
  const std::map<std::string, SourceTensor> tensors = {{"a", {"F32", {3, 4}}}};
  const std::map<int64_t, float> cases[] = {
      {{0, 0.5F}}, {{11, 2.0F}}, {{0, 3.0F}, {5, -4.0F}, {11, 0.25F}}, {{3, 1.0F}, {4, 1.0F}}};
  for (const std::map<int64_t, float>& moved : cases) {
    const std::vector<Difference> found = compare(Numbers(tensors), Moved(tensors, moved));
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].tensor, "a");
    EXPECT_EQ(found[0].elements, std::ssize(moved));
    EXPECT_EQ(found[0].what, fmt::format("{} of 12 elements", moved.size()));
    double largest = 0.0;
    for (const auto& [place, by] : moved) largest = std::max(largest, std::abs(static_cast<double>(by)));
    EXPECT_EQ(found[0].largest, largest);
  }
  const std::vector<Difference> apart =
      compare(Numbers({{"a", {"F32", {2}}}, {"b", {"F32", {1}}}}), Numbers({{"a", {"F32", {3}}}}));
  ASSERT_EQ(apart.size(), 2u);
  EXPECT_EQ(apart[0].what, "F32 [2] against F32 [3]");
  EXPECT_EQ(apart[1].what, "only in the first");
}

TEST(Convert, WritesTheTensorsThatWereSelectedToOneFile) {
  const Fixture fixture;
  const Numbers source({{"a", {"F32", {3, 4}}}, {"b", {"F32", {5}}}, {"c", {"F32", {2, 2}}}});
  const std::string path = fixture.path + "/model.safetensors";
  Conversion how;
  how.select = [](const std::string& name) { return name != "b"; };
  convert_to_file(source, path, how);
  const Numbers chosen({{"a", {"F32", {3, 4}}}, {"c", {"F32", {2, 2}}}});
  EXPECT_TRUE(compare(*open_source(fixture.path), chosen).empty());
  EXPECT_TRUE(says(message_of<EnvironmentError>([&] { convert_to_file(source, path, how); }), "--force"));
  how.select = nullptr;
  how.replaces = true;
  convert_to_file(source, path, how);
  EXPECT_TRUE(compare(*open_source(fixture.path), source).empty());
  EXPECT_EQ(Folder(fixture.path).names(), std::vector<std::string>{"model.safetensors"});
}

TEST(ModelFolder, CarriedFilesHaveTheSameBytes) {
  constexpr int64_t kMebibyte = 1 << 20;
  for (const int64_t size :
       {int64_t{0}, int64_t{1}, kMebibyte - 1, kMebibyte, kMebibyte + 1, 3 * kMebibyte + 5}) {
    const Fixture fixture;
    std::string bytes(static_cast<size_t>(size), '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i % 251);
    fixture.scratch.write("tokenizer.json", bytes);
    carry_file(fixture.scratch.path(""), "tokenizer.json", Folder(fixture.path));
    EXPECT_EQ(trireme::testing::slurp(fixture.path + "/tokenizer.json"), bytes) << size;
  }
}

TEST(NewFolder, IsThereWholeOrNotAtAll) {
  const Scratch scratch;
  const std::string path = scratch.path("out");
  { const NewFolder given_up(path, false); }
  EXPECT_TRUE(Folder(scratch.path("")).names().empty());
  {
    NewFolder out(path, false);
    out.folder().write_file("a", "1");
    EXPECT_FALSE(fs::exists(path));
    out.commit();
  }
  EXPECT_THROW(NewFolder(path, false), EnvironmentError);
  {
    NewFolder out(path + "/", true);
    out.folder().write_file("b", "2");
    out.commit();
  }
  EXPECT_EQ(Folder(path).names(), std::vector<std::string>{"b"});
  EXPECT_EQ(Folder(scratch.path("")).names(), std::vector<std::string>{"out"});
  fs::create_directory(path + "/precious");
  EXPECT_THROW(NewFolder(path, true), EnvironmentError);
  const std::string later = scratch.path("later/precious");
  NewFolder out(scratch.path("later"), true);
  fs::create_directories(later);
  EXPECT_THROW(out.commit(), EnvironmentError);
  EXPECT_TRUE(fs::exists(later)) << "though the name was free when it began";
}

/// A writer that was killed holds no lock, whatever its number was.
TEST(NewFolder, RemovesWhatKilledWritersOfItsNameLeft) {
  const Scratch scratch;
  scratch.write(fmt::format(".out.{}-0.trireme-tmp/model.safetensors", ::getpid()), "half");
  scratch.write(".out.2-0.trireme-tmp/inside/deeper", "half");
  scratch.write(".other.2-0.trireme-tmp/model.safetensors", "of another name");
  {
    const NewFolder first(scratch.path("out"), false);
    NewFolder second(scratch.path("out"), false);
    EXPECT_NE(first.folder().path(), second.folder().path());
    EXPECT_TRUE(fs::exists(first.folder().path())) << "its writer is alive";
    second.commit();
  }
  EXPECT_EQ(Folder(scratch.path("")).names(), (std::vector<std::string>{".other.2-0.trireme-tmp", "out"}));
}

TEST(NewFolder, TakesTheLongestNameThatTheDiskDoes) {
  const Scratch scratch;
  const std::string name(255, 'n');
  NewFolder out(scratch.path(name), false);
  out.commit();
  EXPECT_EQ(Folder(scratch.path("")).names(), std::vector<std::string>{name});
}

TEST(ModelConfig, IsNotCalledADamagedCheckpoint) {
  const Fixture fixture;
  for (const char* text : {R"({"rms_norm_eps": NaN})", R"({"a": 1,})", "[]"}) {
    fixture.scratch.write("model/config.json", text);
    const std::string message = message_of<DataError>([&] { read_model_config(fixture.path); });
    EXPECT_TRUE(says(message, "config.json")) << message;
    EXPECT_TRUE(says(message, "correct it, or fetch it again from its source")) << message;
    EXPECT_FALSE(says(message, "checkpoint, ") || says(message, "another checkpoint")) << message;
  }
}

TEST(Fit, SaysWhichDtypesNoModelReads) {
  plan::ModelConfig model{.n_layers = 1, .d_model = 8, .n_heads = 2, .vocab_size = 16};
  const plan::ModelFacts facts = plan::describe(model, 4);
  std::map<std::string, SourceTensor> tensors;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params) tensors[param.name] = {"F32", param.shape};
  }
  tensors["transformer.wte.weight"].dtype = "F64";
  const std::string message = message_of<DataError>([&] { check_fit(Numbers(tensors), facts); });
  EXPECT_TRUE(says(message, "transformer.wte.weight is F64; save them as F32, BF16 or F16")) << message;
}

TEST(Fit, NamesWhatIsMissingMisshapenAndTooMuch) {
  plan::ModelConfig model{.n_layers = 1, .d_model = 8, .n_heads = 2, .vocab_size = 16};
  const plan::ModelFacts facts = plan::describe(model, 4);
  std::map<std::string, SourceTensor> tensors;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params) tensors[param.name] = {"BF16", param.shape};
  }
  tensors["optimizer.exp_avg.x"] = {"F32", {1}};
  EXPECT_NO_THROW(check_fit(Numbers(tensors), facts));
  tensors["bias.of.others"] = {"F32", {1}};
  EXPECT_NO_THROW(check_fit(Numbers(tensors), facts, true));
  tensors["transformer.wte.weight"].shape = {17, 8};
  tensors.erase("transformer.ln_f.bias");
  const std::string message = message_of<DataError>([&] { check_fit(Numbers(tensors), facts); });
  EXPECT_TRUE(says(message, "transformer.wte.weight is BF16 [17, 8], but [16, 8] in the model")) << message;
  EXPECT_TRUE(says(message, "1 missing: transformer.ln_f.bias")) << message;
  EXPECT_TRUE(says(message, "1 not in the model: bias.of.others")) << message;
}

float from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

uint16_t narrowed(float value, const char* dtype) {
  uint16_t bits = 0;
  cast("F32", &value, dtype, &bits, 1);
  return bits;
}

/// Every narrow number comes back, and half-way between two neighbours the even one is taken.
TEST(Cast, RoundsToTheNearestAndTiesToEven) {
  for (const char* dtype : {"BF16", "F16"}) {
    for (uint32_t bits = 0; bits < 0x8000; ++bits) {
      const auto narrow = static_cast<uint16_t>(bits);
      const auto next = static_cast<uint16_t>(bits + 1);
      float value = 0, above = 0;
      cast(dtype, &narrow, "F32", &value, 1);
      cast(dtype, &next, "F32", &above, 1);
      if (std::isnan(value)) continue;
      ASSERT_EQ(narrowed(value, dtype), narrow) << dtype << " " << bits;
      ASSERT_EQ(narrowed(-value, dtype), narrow | 0x8000) << dtype << " " << bits;
      if (!std::isfinite(value) || !std::isfinite(above) || above <= value) continue;
      const auto middle = static_cast<float>((static_cast<double>(value) + static_cast<double>(above)) / 2);
      ASSERT_EQ(narrowed(middle, dtype), bits % 2 == 0 ? narrow : next) << dtype << " " << bits;
      ASSERT_EQ(narrowed(std::nextafter(middle, 0.0F), dtype), narrow) << dtype << " " << bits;
      ASSERT_EQ(narrowed(std::nextafter(middle, INFINITY), dtype), next) << dtype << " " << bits;
    }
  }
  EXPECT_EQ(narrowed(65519.0F, "F16"), 0x7bff);
  EXPECT_EQ(narrowed(65520.0F, "F16"), 0x7c00);
  EXPECT_EQ(narrowed(from_bits(0x7f7fffff), "BF16"), 0x7f80);
  EXPECT_TRUE(std::isnan(number_at("F16", std::vector<uint16_t>{narrowed(NAN, "F16")}.data())));
  EXPECT_TRUE(
      std::isnan(number_at("BF16", std::vector<uint16_t>{narrowed(from_bits(0x7f800001), "BF16")}.data())));
}

TEST(Cast, CountsWhatBecomesInfinite) {
  const std::vector<float> values = {1.0F, 65504.0F, 70000.0F, INFINITY, -1e30F};
  std::vector<uint16_t> narrow(values.size());
  EXPECT_EQ(cast("F32", values.data(), "F16", narrow.data(), 5), 2);
  EXPECT_EQ(cast("F32", values.data(), "BF16", narrow.data(), 5), 0);
  EXPECT_FALSE(can_cast("I64", "F32"));
  EXPECT_TRUE(can_cast("I64", "I64"));
}

}  // namespace
}  // namespace trireme::checkpoint
