#include "trireme/cli/request.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

TEST(Request, SurvivesTheTripToTheWorker) {
  const Request sent = {.verb = "generate",
                        .config = "name: \"a\"\ntrain:\n  steps: 3\n",
                        .run_dir = "runs/a b-20261120-081503Z-k3f9",
                        .runs_root = "elsewhere",
                        .resume = true,
                        .resume_from = "step 5",
                        .finishes = false,
                        .command = "trireme train 'it'\\''s'",
                        .json = true,
                        .quiet = true,
                        .generate = {.run = "r",
                                     .prompt = "\xc3\xa9\n\t\"{}",
                                     .max_tokens = 7,
                                     .temperature = 0.1,
                                     .top_k = 3,
                                     .seed = -1}};
  const Request received = request_from_json(to_json(sent));
  EXPECT_EQ(received.verb, sent.verb);
  EXPECT_EQ(received.config, sent.config);
  EXPECT_EQ(received.run_dir, sent.run_dir);
  EXPECT_EQ(received.runs_root, sent.runs_root);
  EXPECT_TRUE(received.resume);
  EXPECT_EQ(received.resume_from, sent.resume_from);
  EXPECT_FALSE(received.finishes);
  EXPECT_EQ(received.command, sent.command);
  EXPECT_TRUE(received.json);
  EXPECT_TRUE(received.quiet);
  EXPECT_EQ(received.generate.run, sent.generate.run);
  EXPECT_EQ(received.generate.prompt, sent.generate.prompt);
  EXPECT_EQ(received.generate.max_tokens, 7);
  EXPECT_EQ(received.generate.temperature, 0.1);
  EXPECT_EQ(received.generate.top_k, 3);
  EXPECT_EQ(received.generate.seed, -1);
}

TEST(Request, RefusesWhatItDidNotWrite) {
  const std::string whole =
      to_json({.verb = "train", .config = "", .run_dir = "", .command = "", .generate = {}});
  for (const std::string& text : {std::string(), std::string("{}"), std::string("[]"),
                                  std::string("{\"verb\": 3}"), whole.substr(0, whole.size() - 1)}) {
    EXPECT_THROW(request_from_json(text), LogicError) << text;
  }
  EXPECT_NO_THROW(request_from_json(whole));
}

TEST(Request, RefusesTextThatIsNotUtf8) {
  EXPECT_THROW(to_json({.verb = "train", .config = "\xff", .run_dir = "", .command = "", .generate = {}}),
               ConfigError);
}

}  // namespace
}  // namespace trireme::cli
