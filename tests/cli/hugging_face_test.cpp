// trireme ckpt import-hf, export-hf and convert --to dcp, and model.weights before a run begins.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/checkpoint/saved.h"
#include "tests/cli/front_process.h"
#include "trireme/checkpoint/source.h"
#include "trireme/checkpoint/tensor_file.h"
#include "trireme/plan/hugging_face.h"
#include "trireme/plan/model_facts.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

plan::ModelConfig small_llama() {
  return {.family = plan::ModelFamily::kLlama,
          .n_layers = 2,
          .d_model = 16,
          .n_heads = 4,
          .n_kv_heads = 2,
          .d_ff = 24,
          .vocab_size = 256,
          .max_seq_len = 64,
          .rope_theta = 1000.0};
}

/// Bytes that count up.
class Bytes : public checkpoint::Source {
 public:
  explicit Bytes(const plan::ModelConfig& model) : Source("bytes") {
    for (const plan::UnitSpec& unit : plan::describe(model, 64).units) {
      for (const plan::ParamSpec& param : unit.params) tensors_[param.name] = {"BF16", param.shape};
    }
  }
  const std::map<std::string, std::string>& metadata() const override { return none_; }
  void read(const std::string&, const plan::Region& region, void* out) const override {
    for (int64_t i = 0; i < region.numel() * 2; ++i)
      static_cast<char*>(out)[i] = static_cast<char>((region.range.begin * 2 + i) % 113);
  }

 private:
  std::map<std::string, std::string> none_;
};

/// A folder as transformers writes it, with files of a tokenizer.
struct ForeignFolder {
  FrontProcess front;
  std::string folder = front.file("tiny-llama");
  ForeignFolder() {
    fs::create_directory(folder);
    write_model(small_llama());
    write("tokenizer.json", "{\"a\":1}");
    write("generation_config.json", "{}");
    write("weights.notes", "of no use");
  }
  void write_model(const plan::ModelConfig& model) const {
    fs::remove(folder + "/model.safetensors");
    const Bytes weights(model);
    std::vector<checkpoint::FileEntry> entries;
    for (const auto& [name, tensor] : weights.tensors())
      entries.push_back(checkpoint::whole_entry(weights, name));
    checkpoint::write_tensor_file(checkpoint::Folder(folder), "model.safetensors", weights, entries, {});
    nlohmann::json config = plan::to_hugging_face(model, "bfloat16");
    config["eos_token_id"] = 7;
    write("config.json", config.dump());
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder + "/" + name) << text;
  }
  std::string imported() const {
    const Outcome outcome = front.run({"ckpt", "import-hf", folder, "--json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return front.file(outcome.json()["run"]);
  }
  size_t runs() const {
    return fs::exists(front.file("runs"))
               ? static_cast<size_t>(std::distance(fs::directory_iterator(front.file("runs")), {}))
               : 0;
  }
};

void expect_equal(const std::string& a, const std::string& b) {
  for (const auto& difference : checkpoint::compare(*checkpoint::open_source(a), *checkpoint::open_source(b)))
    ADD_FAILURE() << a << " and " << b << ": " << difference.tensor << " " << difference.what;
}

std::string text_of(const std::string& path) {
  return checkpoint::InputFile(path).text(1 << 20);
}

TEST(HuggingFaceVerbs, WhatIsImportedAndExportedAgainIsTheSame) {
  const ForeignFolder fixture;
  const std::string run = fixture.imported();
  expect_equal(run + "/checkpoints/final/model.safetensors", fixture.folder);
  const std::string out = fixture.front.file("exported");
  const Outcome outcome =
      fixture.front.run({"ckpt", "export-hf", run, out, "--max-shard-size", "2KB", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["carried"],
            (std::vector<std::string>{"generation_config.json", "tokenizer.json"}));
  expect_equal(out, fixture.folder);
  EXPECT_TRUE(fs::exists(out + "/model.safetensors.index.json"));
  EXPECT_EQ(text_of(out + "/tokenizer.json"), "{\"a\":1}");
  const auto config = nlohmann::json::parse(text_of(out + "/config.json"));
  EXPECT_EQ(config["eos_token_id"], 7);
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
  EXPECT_EQ(config["rope_theta"], 1000.0);
}

/// Runs that began with the weights of a folder, directly and through others.
class FineTuned : public ::testing::Test {
 protected:
  FineTuned() {
    fixture_.write("tokenizer_config.json", "{\"b\":2}");
    fixture_.front.set_worker(
        "mkdir runs/latest/checkpoints/final\n"
        "cp tiny-llama/model.safetensors runs/latest/checkpoints/final/\n");
  }
  std::string tuned(const std::string& weights) const {
    const Outcome outcome = fixture_.front.run(
        {"train", config_, "--model.weights=" + weights, "--name=tuned", "--device=cpu", "-n", "1"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return fs::canonical(fixture_.front.file("runs/latest"));
  }
  Outcome exported(const std::string& run) const {
    return fixture_.front.run({"ckpt", "export-hf", run, out_, "--force", "--json"});
  }

  ForeignFolder fixture_;
  std::string config_ = fixture_.imported() + "/config.yaml";
  std::string out_ = fixture_.front.file("out");
};

TEST_F(FineTuned, HasTheTokenizerOfTheFolderThatItBeganWith) {
  const std::string first = tuned(fixture_.folder);
  const std::string saves = tuned(fixture_.folder);
  const Outcome converted = fixture_.front.run({"ckpt", "convert", fixture_.folder, saves + "/checkpoints"});
  ASSERT_EQ(converted.code, 0) << converted.err;
  const std::string checkpoint = saves + "/checkpoints/step-00000000";
  ASSERT_TRUE(fs::exists(checkpoint + "/COMMIT.json")) << converted.out;
  const std::string files = "generation_config.json, tokenizer.json, tokenizer_config.json";
  const std::string said = "copied " + files + " from " + fs::canonical(fixture_.folder).string() +
                           ", which has no tokenizer.model, special_tokens_map.json, ";
  for (const std::string& run : {first, tuned(fixture_.folder + "/model.safetensors"),
                                 tuned(first + "/checkpoints/final/model.safetensors"), tuned(checkpoint)}) {
    const Outcome outcome = exported(run);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.json()["carried"].size(), 3u);
    EXPECT_EQ(outcome.json()["not_there"].size(), 7u);
    EXPECT_TRUE(contains(outcome.err, said)) << run << ": " << outcome.err;
    EXPECT_EQ(text_of(out_ + "/tokenizer_config.json"), "{\"b\":2}");
  }
}

TEST_F(FineTuned, SaysWhyThereIsNoTokenizer) {
  const std::string run = tuned(fixture_.folder);
  const std::string moved = fixture_.front.file("moved");
  fs::rename(fixture_.folder, moved);
  const Outcome gone = exported(run);
  EXPECT_EQ(gone.code, 0);
  EXPECT_EQ(gone.json()["carried_from"], nullptr);
  for (const char* part : {"out has no tokenizer, because ",
                           "tiny-llama, which the run started from, no longer exists", "--tokenizer FOLDER"})
    EXPECT_TRUE(contains(gone.err, part)) << part << " in: " << gone.err;
  fs::rename(moved, fixture_.folder);
  fs::remove(fixture_.folder + "/tokenizer.json");
  EXPECT_TRUE(contains(exported(run).err, "tiny-llama has no tokenizer.json, tokenizer.model, "));
  fixture_.write("vocab.json", "{}");
  EXPECT_TRUE(contains(exported(run).err, "has no tokenizer, because "));
  fixture_.write("merges.txt", "");
  EXPECT_FALSE(contains(exported(run).err, "has no tokenizer, because "));
  const std::string alone = fixture_.front.file("alone.safetensors");
  ASSERT_EQ(fixture_.front.run({"ckpt", "convert", fixture_.folder, alone}).code, 0);
  const Outcome unknown = exported(tuned(alone));
  EXPECT_TRUE(contains(unknown.err, "these weights did not come from a Hugging Face folder")) << unknown.err;
}

TEST(HuggingFaceVerbs, AnExportedFolderIsReplacedOnlyWhenAsked) {
  const ForeignFolder fixture;
  const std::string out = fixture.front.file("exported");
  EXPECT_EQ(fixture.front.run({"ckpt", "export-hf", fixture.folder, out, "--dtype", "fp32"}).code, 0);
  EXPECT_EQ(fixture.front.run({"ckpt", "export-hf", fixture.folder, out}).code, 3);
  EXPECT_EQ(checkpoint::open_source(out)->tensors().at("model.norm.weight").dtype, "F32");
  EXPECT_EQ(fixture.front.run({"ckpt", "export-hf", fixture.folder, out, "--force"}).code, 0);
  expect_equal(out, fixture.folder);
  EXPECT_EQ(fixture.front.run({"ckpt", "export-hf", fixture.folder, out + "2", "--dtype", "int8"}).code, 2);
  EXPECT_EQ(
      fixture.front.run({"ckpt", "export-hf", fixture.folder, out + "2", "--max-shard-size", "big"}).code, 2);
  EXPECT_FALSE(fs::exists(out + "2"));
}

TEST(HuggingFaceVerbs, ForceReplacesNoFolderThatIsNoExport) {
  const ForeignFolder fixture;
  const std::string out = fixture.front.file("mine");
  fs::create_directory(out);
  const auto exported = [&] {
    return fixture.front.run({"ckpt", "export-hf", fixture.folder, out, "--force"});
  };
  EXPECT_EQ(exported().code, 0) << "an empty one";
  EXPECT_EQ(exported().code, 0) << "its own";
  fs::remove(out + "/config.json");
  const Outcome refused = exported();
  EXPECT_EQ(refused.code, 3) << refused.err;
  EXPECT_TRUE(contains(refused.err, "nor an earlier export")) << refused.err;
  EXPECT_TRUE(fs::exists(out + "/model.safetensors"));
}

TEST(HuggingFaceVerbs, LatestIsTheNewestRunThatHasWeights) {
  ForeignFolder fixture;
  const std::string run = fixture.imported();
  fixture.front.set_worker("exit 6");
  EXPECT_EQ(fixture.front.run({"train", "--device=cpu", "-n", "1", "--name=failed"}).code, 6);
  const Outcome outcome = fixture.front.run({"ckpt", "export-hf", "latest", fixture.front.file("out")});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "has no weights: it ended with code 6")) << outcome.err;
  expect_equal(fixture.front.file("out"), fixture.folder);
}

TEST(HuggingFaceVerbs, NoRunIsCalledLatest) {
  const ForeignFolder fixture;
  const Outcome imported = fixture.front.run({"ckpt", "import-hf", fixture.folder, "--name", "latest"});
  EXPECT_EQ(imported.code, 2);
  EXPECT_TRUE(contains(imported.err, "choose another name")) << imported.err;
  EXPECT_EQ(fixture.runs(), 0u);
}

TEST(HuggingFaceVerbs, WhatCannotBeImportedLeavesNoRun) {
  const ForeignFolder fixture;
  auto config = nlohmann::json::parse(text_of(fixture.folder + "/config.json"));
  config["sliding_window"] = 4;
  fixture.write("config.json", config.dump());
  const Outcome refused = fixture.front.run({"ckpt", "import-hf", fixture.folder});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "sliding_window=4")) << refused.err;
  EXPECT_EQ(fixture.runs(), 0u);
  EXPECT_EQ(fixture.front.run({"ckpt", "import-hf", fixture.folder, "--ignore", "sliding_window"}).code, 0);

  config.erase("sliding_window");
  config["tie_word_embeddings"] = false;
  fixture.write("config.json", config.dump());
  const Outcome headless = fixture.front.run({"ckpt", "import-hf", fixture.folder});
  EXPECT_EQ(headless.code, 7);
  EXPECT_TRUE(contains(headless.err, "1 missing: lm_head.weight")) << headless.err;
  EXPECT_EQ(fixture.front.run({"ckpt", "import-hf", fixture.front.file("nowhere")}).code, 3);
}

/// Nor what one that was killed has left: an import that comes to no end is no run, and not the latest.
TEST(HuggingFaceVerbs, AnImportThatFailsOnItsWayLeavesNoRun) {
  const ForeignFolder fixture;
  fs::create_directories(fixture.front.file("runs/.tiny-llama.2-0.trireme-tmp/tiny-llama-x/checkpoints"));
  fs::create_directory(fixture.folder + "/vocab.json");
  const Outcome failed = fixture.front.run({"ckpt", "import-hf", fixture.folder});
  EXPECT_EQ(failed.code, 7) << failed.err;
  EXPECT_EQ(fixture.runs(), 0u);
  fs::remove(fixture.folder + "/vocab.json");
  const std::string run = fixture.imported();
  EXPECT_EQ(fixture.runs(), 2u) << "the run and 'latest'";
  EXPECT_TRUE(fs::equivalent(run, fixture.front.file("runs/latest")));
  EXPECT_TRUE(contains(text_of(run + "/config.yaml"),
                       fs::canonical(run + "/checkpoints/final/model.safetensors").string()));
}

TEST(HuggingFaceVerbs, TensorsTooManyAreLeftOutOnlyWhenAsked) {
  const ForeignFolder fixture;
  auto config = nlohmann::json::parse(text_of(fixture.folder + "/config.json"));
  config["num_hidden_layers"] = 1;
  fixture.write("config.json", config.dump());
  const Outcome refused = fixture.front.run({"ckpt", "import-hf", fixture.folder});
  EXPECT_EQ(refused.code, 7);
  EXPECT_TRUE(contains(refused.err, "model.layers.1.")) << refused.err;
  const Outcome outcome = fixture.front.run({"ckpt", "import-hf", fixture.folder, "--drop-extra", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string file = fixture.front.file(outcome.json()["run"]) + "/checkpoints/final/model.safetensors";
  EXPECT_FALSE(checkpoint::open_source(file)->tensors().contains("model.layers.1.input_layernorm.weight"));
}

/// Before a rank is started.
TEST(HuggingFaceVerbs, WeightsThatDoNotFitARunAreRefusedBeforeItBegins) {
  const ForeignFolder fixture;
  const std::string config = fixture.imported() + "/config.yaml";
  const auto dry_run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"train", config, "--dry-run", "--device=cpu", "-n", "1"};
    args.insert(args.end(), more.begin(), more.end());
    return fixture.front.run(args);
  };
  EXPECT_EQ(dry_run({}).code, 0) << dry_run({}).err;
  EXPECT_EQ(dry_run({"--model.weights=" + fixture.folder}).code, 0);
  const Outcome other = dry_run({"--model.weights=" + fixture.folder, "--model.rope_theta=2000"});
  EXPECT_EQ(other.code, 2);
  EXPECT_TRUE(contains(other.err, "other values of model.rope_theta")) << other.err;
  const Outcome shape = dry_run({"--model.d_ff=32"});
  EXPECT_EQ(shape.code, 2) << "nothing is damaged";
  EXPECT_TRUE(contains(shape.err, "BF16 [24, 16], but [32, 16] in the model")) << shape.err;
  EXPECT_EQ(dry_run({"--model.weights=nowhere"}).code, 2);
  const std::string dcp = fixture.front.file("dcp");
  ASSERT_EQ(fixture.front.run({"ckpt", "convert", fixture.folder, dcp, "--to", "dcp"}).code, 0);
  EXPECT_EQ(dry_run({"--model.weights=" + dcp}).code, 0);
  const Outcome layers = dry_run({"--model.weights=" + dcp, "--model.n_layers=3"});
  EXPECT_EQ(layers.code, 2);
  EXPECT_TRUE(contains(layers.err, "missing: ")) << layers.err;
}

/// Files of a tokenizer whose ids the model has rows for.
class WithTokenizer : public ::testing::Test {
 protected:
  WithTokenizer() {
    std::string text;
    for (int i = 0; i < 50; ++i) text += "Oar number " + std::to_string(i) + " rows.\n";
    fixture_.write("../text", text);
    const Outcome made = fixture_.front.run(
        {"data", "train-tokenizer", "text", "--vocab=270", "--out", fixture_.folder + "/tokenizer.json"});
    EXPECT_EQ(made.code, 0) << made.err;
  }
  Outcome import(int64_t vocab_size) const {
    plan::ModelConfig model = small_llama();
    model.vocab_size = vocab_size;
    fixture_.write_model(model);
    return fixture_.front.run({"ckpt", "import-hf", fixture_.folder, "--json"});
  }
  nlohmann::json shown(const std::string& run) const {
    return fixture_.front.run({"config", "show", run + "/config.yaml", "--json"}).json()["config"];
  }
  ForeignFolder fixture_;
};

TEST_F(WithTokenizer, AnImportedRunSpeaksTheTextOfItsFolder) {
  const Outcome imported = import(288);
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_TRUE(contains(imported.err, "data.tokenizer is the folder's tokenizer, copied to runs/tiny-llama"))
      << imported.err;
  const std::string run = fixture_.front.file(imported.json()["run"]);
  const std::string tokenizer = shown(run)["data"]["tokenizer"];
  EXPECT_EQ(tokenizer, fs::canonical(run).string() + "/hugging_face");
  EXPECT_TRUE(tokenizer.ends_with(imported.json()["tokenizer"].get<std::string>())) << imported.out;
  EXPECT_EQ(shown(run)["model"]["vocab_size"], 288) << "rows that the weights have";
  fs::remove_all(fixture_.folder);
  const Outcome trained = fixture_.front.run(
      {"train", run + "/config.yaml", "--data.path=text", "--dry-run", "--device=cpu", "-n", "1"});
  EXPECT_EQ(trained.code, 0) << trained.err;
}

TEST_F(WithTokenizer, ATokenizerThatTheModelCannotReadIsLeftOut) {
  const Outcome imported = import(256);
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_TRUE(contains(imported.err, "its 270 tokens are more than the model's 256")) << imported.err;
  EXPECT_EQ(imported.json()["tokenizer"], nullptr);
  EXPECT_EQ(shown(fixture_.front.file(imported.json()["run"]))["data"]["tokenizer"], "byte");
}

TEST_F(WithTokenizer, AFolderWithoutOneIsReadAsBytesAndSaysSo) {
  fs::remove(fixture_.folder + "/tokenizer.json");
  const Outcome imported = import(288);
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_TRUE(contains(imported.err, "gives no tokenizer, so data.tokenizer is 'byte'")) << imported.err;
  EXPECT_TRUE(contains(imported.err, "there is no tokenizer.json, no tokenizer.model")) << imported.err;
}

TEST_F(WithTokenizer, VocabularyAndMergesAreOne) {
  const auto model = nlohmann::json::parse(text_of(fixture_.folder + "/tokenizer.json"))["model"];
  std::string merges = "#version: 0.2\n";
  for (const auto& merge : model["merges"]) {
    const bool is_pair = merge.is_array();
    merges +=
        is_pair ? merge[0].get<std::string>() + " " + merge[1].get<std::string>() : merge.get<std::string>();
    merges += "\n";
  }
  fixture_.write("vocab.json", model["vocab"].dump());
  fixture_.write("merges.txt", merges);
  fs::remove(fixture_.folder + "/tokenizer.json");
  const Outcome imported = import(288);
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_NE(imported.json()["tokenizer"], nullptr) << imported.err;
}

TEST(HuggingFaceVerbs, ARunsFolderStandsForItsWeights) {
  const ForeignFolder fixture;
  const std::string run = fixture.imported(), config = run + "/config.yaml";
  const auto dry_run = [&](const std::string& weights) {
    return fixture.front.run(
        {"train", config, "--dry-run", "--device=cpu", "-n", "1", "--model.weights=" + weights});
  };
  const Outcome its_own = dry_run(run + "/");
  EXPECT_EQ(its_own.code, 0) << its_own.err;
  fs::remove(run + "/checkpoints/final/model.safetensors");
  const Outcome of_nothing = dry_run(run);
  EXPECT_EQ(of_nothing.code, 2);
  EXPECT_TRUE(contains(of_nothing.err, "neither final weights")) << of_nothing.err;
  const Outcome no_run = dry_run(fixture.front.file("runs"));
  EXPECT_EQ(no_run.code, 2);
  EXPECT_TRUE(contains(no_run.err, "a folder without weights")) << no_run.err;
}

TEST(HuggingFaceVerbs, DcpIsWrittenAndReadBack) {
  const ForeignFolder fixture;
  const std::string out = fixture.front.file("dcp");
  EXPECT_EQ(fixture.front.run({"ckpt", "convert", fixture.folder, out, "--to", "dcp", "--files", "3"}).code,
            0);
  EXPECT_TRUE(fs::exists(out + "/shard-00003-model-00001-of-00001.safetensors"));
  EXPECT_EQ(fixture.front.run({"ckpt", "diff", fixture.folder, out}).code, 0);
  EXPECT_EQ(fixture.front.run({"ckpt", "convert", fixture.folder, out, "--to", "dcp"}).code, 3);
  EXPECT_EQ(fixture.front.run({"ckpt", "convert", fixture.folder, out, "--to", "zip"}).code, 2);
}

}  // namespace
}  // namespace trireme::cli
