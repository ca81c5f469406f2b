#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

using Json = nlohmann::json;
using Limits = std::numeric_limits<double>;

std::set<std::string> keys_of(const Json& json) {
  std::set<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.insert(key);
  return keys;
}

const std::set<std::string> kStepKeys = {"step",       "loss",
                                         "grad_norm",  "lr",
                                         "tokens",     "tokens_per_s",
                                         "step_ms",    "steps_per_s",
                                         "peak_bytes", "communication_ms",
                                         "exposed_ms", "communication_share"};

StepRecord some_record() {
  return {.step = 3,
          .loss = 5.25,
          .grad_norm = 1.5,
          .lr = 3e-4,
          .tokens = 6144,
          .tokens_per_s = 12345.5,
          .step_ms = 48.125,
          .peak_bytes = 1 << 20,
          .reserved_bytes = 0,
          .loss_scale = {},
          .skipped = false,
          .val_loss = {}};
}

TEST(StepJson, HasExactlyTheKeysOfTheFormat) {
  StepRecord record = some_record();
  EXPECT_EQ(keys_of(Json::parse(to_json_line(record))), kStepKeys);

  record.val_loss = 2.5;
  record.reserved_bytes = 1 << 21;
  record.active_bytes = 1 << 20;
  std::set<std::string> more = kStepKeys;
  record.loss_scale = 1024.0;
  record.skipped = true;
  record.tflops_per_rank = 0.5;
  more.insert({"tflops_per_rank", "val_loss", "active_bytes", "reserved_bytes", "loss_scale", "skipped"});
  EXPECT_EQ(keys_of(Json::parse(to_json_line(record))), more);
}

TEST(StepJson, StepsPerSecondAreThoseOfTheStep) {
  StepRecord record = some_record();
  record.step_ms = 250.0;
  EXPECT_EQ(Json::parse(to_json_line(record))["steps_per_s"], 4.0);
}

TEST(StepJson, CommunicationIsAShareOfTheStepAndNullWhereItWasNotMeasured) {
  StepRecord record = some_record();
  const std::vector<const char*> keys = {"communication_ms", "exposed_ms", "communication_share"};
  for (const char* key : keys) EXPECT_TRUE(Json::parse(to_json_line(record))[key].is_null()) << key;
  record.step_ms = 200.0;
  record.communication_ms = 80.0;
  record.exposed_ms = 50.0;
  const Json json = Json::parse(to_json_line(record));
  EXPECT_EQ(json["communication_ms"], 80.0);
  EXPECT_EQ(json["communication_share"], 0.25);
}

TEST(StepJson, KeepsEveryBitOfItsNumbers) {
  StepRecord record = some_record();
  for (const double value : {0.1, 1.0 / 3.0, 5e-324, 1.7976931348623157e308, -0.25}) {
    record.loss = value;
    EXPECT_EQ(Json::parse(to_json_line(record))["loss"].get<double>(), value);
  }
  record.tokens = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Json::parse(to_json_line(record))["tokens"].get<int64_t>(), record.tokens);
}

TEST(StepJson, WritesNonFiniteNumbersAsStrings) {
  StepRecord record = some_record();
  record.loss = Limits::quiet_NaN();
  record.grad_norm = Limits::infinity();
  record.val_loss = -Limits::infinity();
  const Json json = Json::parse(to_json_line(record));
  EXPECT_EQ(json["loss"], "NaN");
  EXPECT_EQ(json["grad_norm"], "Infinity");
  EXPECT_EQ(json["val_loss"], "-Infinity");
}

TEST(SummaryJson, HasExactlyTheKeysOfTheFormat) {
  const std::set<std::string> keys = {"steps",
                                      "final_loss",
                                      "final_val_loss",
                                      "tokens_per_s",
                                      "steps_per_s",
                                      "peak_bytes",
                                      "seconds_to_first_step",
                                      "wall_s",
                                      "weights_digest",
                                      "sample",
                                      "state_bytes",
                                      "wire_bytes_per_step",
                                      "activation_bytes",
                                      "communication_ms",
                                      "gathered_bytes",
                                      "baseline_bytes",
                                      "predicted_peak_bytes",
                                      "weights",
                                      "stop_signal",
                                      "deterministic"};
  RunSummary summary;
  EXPECT_EQ(keys_of(Json::parse(to_json_line(summary))), keys);
  EXPECT_TRUE(Json::parse(to_json_line(summary))["final_val_loss"].is_null());
  for (const char* key : {"tokens_per_s", "steps_per_s", "weights", "stop_signal"})
    EXPECT_TRUE(Json::parse(to_json_line(summary))[key].is_null()) << key << ": nothing was measured";
  EXPECT_TRUE(Json::parse(to_json_line(summary))["communication_ms"]["total"].is_null());
  summary.final_val_loss = 2.0;
  EXPECT_EQ(keys_of(Json::parse(to_json_line(summary))), keys);
  EXPECT_EQ(Json::parse(to_json_line(summary))["final_val_loss"], 2.0);
  EXPECT_TRUE(Json::parse(to_json_line(summary))["activation_bytes"]["measured"].is_null());
  summary.cost.measured_activation_bytes = 5;
  summary.active_bytes = 6;
  summary.reserved_bytes = 7;
  const Json of_a_gpu = Json::parse(to_json_line(summary));
  EXPECT_EQ(of_a_gpu["activation_bytes"]["measured"], 5);
  EXPECT_EQ(of_a_gpu["active_bytes"], 6);
  EXPECT_EQ(of_a_gpu["reserved_bytes"], 7);
}

TEST(SummaryJson, SaysWhyAnEqualRunMayEndDifferently) {
  RunSummary summary;
  EXPECT_EQ(Json::parse(to_json_line(summary))["deterministic"], true);
  summary.why_bits_vary = "attention adds in an order that varies";
  const Json json = Json::parse(to_json_line(summary));
  EXPECT_EQ(json["deterministic"], false);
  EXPECT_EQ(json["why_bits_vary"], summary.why_bits_vary);
}

TEST(SummaryJson, SaysWhyARunEndedEarly) {
  RunSummary summary;
  EXPECT_FALSE(Json::parse(to_json_line(summary)).contains("early_stop"));
  summary.early_end = {.step = 40, .best_step = 20, .best_value = 2.5, .validations = 2};
  EXPECT_EQ(Json::parse(to_json_line(summary))["early_stop"],
            (Json{{"step", 40}, {"best_step", 20}, {"best_val_loss", 2.5}, {"validations", 2}}));
}

TEST(SummaryJson, HasWhatATraceSumsUp) {
  RunSummary summary;
  EXPECT_FALSE(Json::parse(to_json_line(summary)).contains("profile"));
  summary.profile = {.of_gpu = false,
                     .steps = 4,
                     .groups = {{.name = "GEMM", .ms = 1.5, .calls = 7}},
                     .step_ms = 3.0,
                     .idle_ms = 0.5};
  EXPECT_EQ(Json::parse(to_json_line(summary))["profile"],
            (Json{{"of", "CPU operators"},
                  {"steps", 4},
                  {"step_ms", 3.0},
                  {"idle_ms", 0.5},
                  {"groups", Json::array({{{"name", "GEMM"}, {"ms", 1.5}, {"calls", 7}}})}}));
}

TEST(SummaryJson, StaysOneLineOfUtf8WhateverTheSampleHolds) {
  RunSummary summary;
  summary.sample = "two\nlines \"quoted\" and half a letter \xc3";
  const std::string line = to_json_line(summary);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_EQ(Json::parse(line)["sample"], "two\nlines \"quoted\" and half a letter \xef\xbf\xbd");
}

}  // namespace
}  // namespace trireme::report
