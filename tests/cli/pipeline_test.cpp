// trireme pipeline: schedules drawn, compared, and read from files.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/cli/request.h"
#include "trireme/plan/config.h"
#include "trireme/plan/presets.h"
#include "trireme/plan/schedule.h"

namespace trireme::cli {
namespace {

TEST(Pipeline, ComparesAllSchedules) {
  const FrontProcess front;
  const auto rows = front.run({"pipeline", "compare", "--json"}).json()["schedules"];
  ASSERT_EQ(rows.size(), plan::all_values<plan::ScheduleName>().size() + 1) << "and the greedy one";
  for (const auto& row : rows) {
    if (row["schedule"] != "1f1b") continue;
    EXPECT_DOUBLE_EQ(row["efficiency"], 24.0 / 33.0);
  }
  const std::string out = front.run({"pipeline", "compare", "--ranks", "3", "--micro-batches", "4"}).out;
  EXPECT_TRUE(contains(out, "\nzb_v ")) << out;
  EXPECT_TRUE(contains(out, "not possible\ndualpipe: ")) << out;
}

/// (p-1)(F+I+W)/v of bubble, with the v that pipeline.chunks has in a run unless --chunks says otherwise.
TEST(Pipeline, InterleavedSchedulesHaveAsManyStagesARankAsInTraining) {
  const FrontProcess front;
  const auto bubbles = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"pipeline", "compare", "--json"});
    std::map<std::string, double> found;
    const auto rows = front.run(more).json()["schedules"];
    for (const auto& row : rows) found[row["schedule"]] = row["bubble"];
    return found;
  };
  const int64_t chunks = plan::PipelineConfig{}.chunks;
  for (const auto& [asked, v] : std::vector<std::pair<std::vector<std::string>, int64_t>>{
           {{}, chunks}, {{"--chunks", "1"}, 1}, {{"--chunks", "4"}, 4}}) {
    const auto found = bubbles(asked);
    for (const char* name : {"interleaved_1f1b", "looped_bfs"})
      EXPECT_DOUBLE_EQ(found.at(name), 9.0 / static_cast<double>(v)) << name;
    EXPECT_DOUBLE_EQ(found.at("1f1b"), 9.0);
    EXPECT_DOUBLE_EQ(found.at("zb_h1"), 3.0);
  }
}

/// Bubbles of docs/pipelines.md: (p/2-1)(F+2I-W) and (p-1)(F+2I-W)/2.
TEST(Pipeline, ComparesSchedulesWhosePassesOverlap) {
  const FrontProcess front;
  const auto rows = front.run({"pipeline", "compare", "--overlap", "1", "--json"}).json()["schedules"];
  std::map<std::string, double> bubbles;
  for (const auto& row : rows) bubbles[row["schedule"]] = row["bubble"];
  EXPECT_DOUBLE_EQ(bubbles.at("dualpipe"), 2.0);
  EXPECT_DOUBLE_EQ(bubbles.at("dualpipe_v"), 3.0);
  EXPECT_DOUBLE_EQ(bubbles.at("1f1b"), 9.0);
  for (const char* bad : {"nan", "-0.1", "1.1"}) {
    const auto refused = front.run({"pipeline", "compare", "--overlap", bad});
    EXPECT_EQ(refused.code, 2) << bad;
  }
}

TEST(Pipeline, ComparesWhatStaysWithinALimit) {
  const FrontProcess front;
  const std::vector<std::string> within = {"pipeline", "compare", "--limit", "2"};
  const std::string out = front.run(within).out;
  EXPECT_TRUE(contains(out, "gpipe: [plan.simulate] rank 0 holds 3 of activations after 0F2")) << out;
  EXPECT_TRUE(contains(out, "\ngreedy ")) << out;
  const auto none = front.run({"pipeline", "compare", "--limit", "0.1"});
  EXPECT_EQ(none.code, 0) << none.err;
  EXPECT_TRUE(contains(none.out, "greedy: [plan.schedule] rank 0 cannot continue within a limit of 0.1"))
      << none.out;
}

TEST(Pipeline, PlacesStagesAsConfigsDo) {
  const FrontProcess front;
  for (const char* word : {"two_ways", "two-ways"}) {
    const auto shown = front.run({"pipeline", "show", "greedy", "--placement", word, "--chunks", "2",
                                  "--limit", "4", "--ranks", "4", "--micro-batches", "8", "--json"});
    ASSERT_EQ(shown.code, 0) << shown.err;
    EXPECT_EQ(shown.json()["stages"], 4);
  }
}

TEST(Pipeline, DrawsASchedule) {
  const FrontProcess front;
  const std::string out =
      front.run({"pipeline", "show", "1f1b", "--stages", "2", "--micro-batches", "3"}).out;
  EXPECT_TRUE(contains(out, "rank 0 F0 F1 ......B0    F2 B1    ...B2      idle 3, 2 in flight\n")) << out;
  EXPECT_TRUE(contains(out, "rank 1 ...F0 B0    F1 B1    F2 B2    ......  idle 3, 1 in flight\n")) << out;
}

/// One micro-batch on two ranks, whose parts of the head take 1 forward and 0.5 backward.
TEST(Pipeline, DrawsAHeadThatIsSpread) {
  const FrontProcess front;
  const std::string out = front
                              .run({"pipeline", "show", "1f1b", "--stages", "2", "--micro-batches", "1",
                                    "--costs", "3,3,3", "--head", "3"})
                              .out;
  EXPECT_TRUE(contains(out, "rank 0 F0       ")) << out;
  EXPECT_TRUE(contains(out, "H")) << out;
  const auto shown = front
                         .run({"pipeline", "show", "1f1b", "--stages", "2", "--micro-batches", "1", "--costs",
                               "3,3,3", "--head", "3", "--json"})
                         .json();
  // Forward through both stages, both parts at once, and back; the first rank's rows come last.
  EXPECT_DOUBLE_EQ(shown["makespan"], 3.0 + 3.0 + 1.0 + 6.0 + 6.0 + 0.5);
  const auto refused = front.run({"pipeline", "show", "1f1b", "--head", "1", "--csv"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "remove --head")) << refused.err;
  const auto cut =
      front.run({"pipeline", "stages", "--model.preset=mini-gpt-153m", "--spread-head", "--json"}).json();
  EXPECT_GT(cut["even"]["efficiency_1f1b"], 0.8);
}

/// As a run of that config would be cut.
TEST(Pipeline, StagesAreThoseOfAConfigThatSpreadsTheHead) {
  const FrontProcess front;
  const std::string untied = "--model.tie_embeddings=false", spread = "--pipeline.spread_head=true";
  const auto stages = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"pipeline", "stages", "--model.preset=mini-gpt-153m"};
    args.insert(args.end(), more.begin(), more.end());
    return front.run(args);
  };
  EXPECT_EQ(stages({untied, spread, "--json"}).json(), stages({untied, "--spread-head", "--json"}).json());
  // Two blocks of 12 d^2 + 13 d, and a quarter of 50257 rows of the head, of d = 1024, which is a copy where
  // the head is tied.
  for (const char* tied : {"--model.tie_embeddings=false", "--model.tie_embeddings=true"}) {
    const std::string out = stages({tied, spread}).out;
    EXPECT_TRUE(contains(out, "38.1M")) << out;
  }
}

TEST(Pipeline, TheHeadOfAModelOfImagesIsNotSpreadAsInTraining) {
  const FrontProcess front;
  for (const char* asked : {"--spread-head", "--pipeline.spread_head=true"}) {
    const auto refused = front.run({"pipeline", "stages", "--model.preset=resnet18", asked});
    EXPECT_EQ(refused.code, 2) << refused.out;
    EXPECT_TRUE(contains(refused.err, "cannot be spread")) << refused.err;
  }
}

TEST(Pipeline, ADryRunSaysWhatASpreadHeadIsWorth) {
  const FrontProcess front;
  const auto plan = [&](const char* spread) {
    const auto shown = front.run({"train", "--model.preset=mini-gpt-153m", "--device=cpu", "--parallel.pp=4",
                                  "-n", "4", "--pipeline.micro_batches=8", "--train.global_batch=8",
                                  "--dry-run", fmt::format("--pipeline.spread_head={}", spread)});
    return shown.out + shown.err;
  };
  const std::string with = plan("true"), told = "times as long as with the head in the last stage";
  EXPECT_TRUE(contains(with, "a step is estimated 0.")) << with << ": the head is worth four blocks of eight";
  EXPECT_TRUE(contains(with, told)) << with;
  const std::string without = plan("false");
  EXPECT_TRUE(contains(without, "the last with the head")) << without;
  EXPECT_FALSE(contains(without, told)) << without;
}

TEST(Pipeline, ReadsWhatItWrites) {
  const FrontProcess front;
  const std::string file = front.file("mine.csv"), svg = front.file("mine.svg");
  const std::string csv = front.run({"pipeline", "show", "zb_v", "--csv"}).out;
  std::ofstream(file) << csv;
  const auto ours = front.run({"pipeline", "show", "zb_v", "--json"}).json();
  const auto read =
      front.run({"pipeline", "show", "--from", file, "--placement", "v", "--json", "--svg", svg}).json();
  EXPECT_EQ(ours["ranks"], read["ranks"]);
  EXPECT_TRUE(std::filesystem::exists(svg));
  // Stages on ranks that the placement does not give them.
  const auto wrong = front.run({"pipeline", "show", "--from", file});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_TRUE(contains(wrong.err, "but stage")) << wrong.err;
}

/// `trireme train RUN/config.yaml` repeats a run, wherever its schedule came from.
TEST(Pipeline, TheConfigOfARunTakesItsOwnScheduleWhereTheFileIsAnotherOne) {
  const FrontProcess front;
  const std::string given = front.file("mine.csv"), config = front.file("config.yaml");
  const std::string two = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", one = "0F0,0B0\n1F0,1B0\n";
  std::ofstream(config) << "parallel:\n  pp: 2\npipeline:\n  file: " << given
                        << "\ntrain:\n  global_batch: 4\ndevice: cpu\n";
  const auto micro_batches = [&] {
    const auto shown = front.run({"train", config, "-n", "2", "--dry-run", "--json"});
    EXPECT_EQ(shown.code, 0) << shown.err;
    return shown.json()["pipeline"]["micro_batches"].get<int64_t>();
  };
  std::ofstream(given) << one;
  std::ofstream(front.file("schedule.csv")) << two;
  EXPECT_EQ(micro_batches(), 1) << "that is not the folder of a run";
  std::ofstream(front.file("manifest.json")) << "{}";
  EXPECT_EQ(micro_batches(), 2);
  std::filesystem::remove(given);
  EXPECT_EQ(micro_batches(), 2);
}

TEST(Pipeline, CutsAModelIntoStagesByCost) {
  const FrontProcess front;
  const auto cut = front.run({"pipeline", "stages", "--model.preset=mini-gpt-153m", "--json"}).json();
  EXPECT_EQ(cut["by_cost"]["stages"][3]["parts"], nlohmann::json({"head"}));
  EXPECT_GT(cut["by_cost"]["efficiency_1f1b"], 1.3 * cut["even"]["efficiency_1f1b"].get<double>());
  const std::string out = front.run({"pipeline", "stages", "--model.preset=mini-gpt-153m"}).out;
  EXPECT_TRUE(contains(out, "stage 3 has 50")) << out;
  const auto refused = front.run({"pipeline", "stages", "--model.preset=mini-gpt-153m", "--stages", "10"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "1 to 9 stages")) << refused.err;
}

TEST(BenchPipeline, TakesThePresetThatIsNamedAndElseItsOwnModel) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const auto model_of = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"bench", "pipeline", "-n", "2", "--device=cpu"};
    args.insert(args.end(), more.begin(), more.end());
    const auto ended = front.run(args);
    EXPECT_EQ(ended.code, 0) << ended.err;
    const std::string text = request_from_json(read_file(front.file("request-0"))).config;
    return plan::load({.text = text}, Environment()).config.model;
  };
  const plan::ModelConfig own = model_of({"--ffn", "96"});
  EXPECT_EQ(own.d_model, 64);
  EXPECT_EQ(own.d_ff, 96);
  EXPECT_EQ(own.family, plan::ModelFamily::kLlama);
  const plan::ModelConfig preset = plan::find_preset("gpt2-124m").model;
  const plan::ModelConfig named = model_of({"--model.preset=gpt2-124m", "--layers", "6"});
  EXPECT_EQ(named.n_layers, 6) << "what is given wins";
  EXPECT_EQ(named.d_model, preset.d_model);
  EXPECT_EQ(named.vocab_size, preset.vocab_size);
  EXPECT_EQ(named.family, preset.family);
  const auto refused = front.run({"bench", "pipeline", "-n", "2", "--device=cpu", "--model.preset=resnet18"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "reads images")) << refused.err;
}

/// It passes random numbers, which no tokenizer makes.
TEST(BenchPipeline, TakesAVocabularyOfAnySize) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const Outcome ended = front.run({"bench", "pipeline", "-n", "2", "--device=cpu", "--vocab", "64"});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const std::string text = request_from_json(read_file(front.file("request-0"))).config;
  EXPECT_EQ(plan::load({.text = text, .tokenizes = false}, Environment()).config.model.vocab_size, 64);
  EXPECT_THROW(plan::load({.text = text}, Environment()), ConfigError) << "training reads bytes";
}

TEST(BenchPipeline, SaysWhichSchedulesThereAre) {
  const FrontProcess front;
  const auto said = [&](const char* name) {
    const Outcome refused = front.run({"bench", "pipeline", "--schedules", name});
    EXPECT_EQ(refused.code, 2) << name;
    return refused.err;
  };
  EXPECT_TRUE(contains(said("2f2b"), "choose from gpipe, 1f1b, ")) << said("2f2b");
  EXPECT_TRUE(contains(said("greedy"), "'greedy' is made for given costs")) << said("greedy");
}

TEST(Lab, IsAsDeepAsItsStagesNeed) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const auto depth = [&](const Words& words) {
    const Outcome outcome = front.run(Words{"lab"} + words + Words{"--device=cpu"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(read_file(front.file("request-0")))["toy_pipeline"]["depth"].get<int64_t>();
  };
  EXPECT_EQ(depth({"pipeline_1f1b"}), 6);
  EXPECT_EQ(depth({"pipeline_dualpipev", "--n-stages", "4"}), 7)
      << "8 stages, of which the last is the output";
  EXPECT_EQ(depth({"pipeline_gpipe", "--stages", "8"}), 7);
  EXPECT_EQ(depth({"pipeline_gpipe", "-n", "8", "--depth", "9"}), 9);
  EXPECT_EQ(depth({"pipeline_gpipe", "--ranks", "2", "--depth", "1"}), 1);
}

TEST(Pipeline, ShapesAreNotGivenForAFileThatHasItsOwn) {
  const FrontProcess front;
  write_file_atomic(front.file("own.csv"), "0F0,0F1+0B0,0B1\n1F0,1B0,1F1,1B1\n");
  const Words show = {"pipeline", "show", "--from", "own.csv"};
  EXPECT_EQ(front.run(show).code, 0);
  for (const char* option : {"--ranks", "-n", "--stages", "--micro-batches", "--chunks"}) {
    const Outcome refused = front.run(show + Words{option, "2"});
    EXPECT_EQ(refused.code, 2) << option;
    EXPECT_TRUE(contains(refused.err, "has no effect with --from")) << refused.err;
  }
  const Outcome over = front.run(show + Words{"--overlap", "1", "--limit", "1"});
  EXPECT_EQ(over.code, 2);
  EXPECT_TRUE(contains(over.err, "but the limit is 1")) << over.err;
}

TEST(Lab, RefusesWhatCannotBe) {
  const FrontProcess front;
  for (const auto& [arguments, words] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"lab", "pipeline_2f2b"}, "there is no lab 'pipeline_2f2b'"},
           {{"lab", "pipeline_greedy"}, "but greedy"},
           {{"lab", "pipeline_1f1b", "--mode", "best"}, "best"},
           {{"lab", "pipeline_1f1b", "--micro-batches", "5"}, "5 micro-batches do not divide a batch of 64"},
           {{"lab", "pipeline_1f1b", "--micro-batch-size", "7"},
            "micro-batches of 7 do not divide a batch of 64"},
           {{"lab", "pipeline_1f1b", "--micro-batches", "8", "--micro-batch-size", "4"},
            "are not a batch of 64"},
           {{"lab", "pipeline_dualpipe", "--micro-batches", "16", "--window", "6"},
            "a window of 6 does not divide 16"},
           {{"lab", "pipeline_dualpipe", "--stages", "3"}, "even number of ranks"},
           {{"lab", "pipeline_1f1b", "--stages", "1"}, "at least two ranks"},
           {{"lab", "pipeline_dualpipev", "--n-stages", "4", "--depth", "6"},
            "--depth 6 makes 7 layers, too few for the 8 stages of dualpipe_v on 4 ranks; use --depth 7"},
           {{"lab", "pipeline_gpipe", "-n", "8", "--depth", "6"}, "too few for the 8 stages"}}) {
    const auto result = front.run(arguments);
    EXPECT_EQ(result.code, 2) << words << result.err;
    EXPECT_TRUE(contains(result.err, words)) << result.err;
  }
}

TEST(Pipeline, RefusesWhatCannotBe) {
  const FrontProcess front;
  for (const auto& [arguments, words] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"pipeline", "show", "2f2b"}, "there is no schedule '2f2b'"},
           {{"pipeline", "show"}, "--from"},
           {{"pipeline", "show", "1f1b", "--json", "--csv"}, "--json excludes --csv"},
           {{"pipeline", "compare", "--costs", "nan,1,1"}, "'nan' is not a positive number up to 1e+12"},
           {{"pipeline", "compare", "--costs", "0,1,1"}, "'0' is not a positive number"},
           {{"pipeline", "compare", "--transfer", "nan"}, "'nan' is not a number from 0 to 1e+12"},
           {{"pipeline", "compare", "--transfer", "1e308"}, "'1e308' is not a number from 0"},
           {{"pipeline", "show", "dualpipe", "--ranks", "3"}, "even number of ranks"},
           {{"pipeline", "show", "gpipe", "--limit", "4"}, "but the limit is 4"},
           {{"pipeline", "show", "greedy", "--limit", "0.5"}, "raise the limit"},
           {{"pipeline", "show", "gpipe", "--ranks", "1024", "--micro-batches", "4096"},
            "at most 976 micro-batches"},
           {{"pipeline", "show", "--from", "/dev/zero"}, "more than 16777216 bytes"},
           {{"pipeline", "show", "--from", "/no/such/file"}, "/no/such/file"}}) {
    const auto result = front.run(arguments);
    EXPECT_EQ(result.code, 2) << words;
    EXPECT_TRUE(contains(result.err, words)) << result.err;
  }
}

}  // namespace
}  // namespace trireme::cli
