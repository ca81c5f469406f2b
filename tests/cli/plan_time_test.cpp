// trireme plan time: how long a step takes at the rates of a machine, and which rates those are.
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/cli/front_process.h"
#include "trireme/plan/rates.h"

namespace trireme::cli {
namespace {

const std::string kTimedConfig = TRIREME_SOURCE "/configs/quickstart.yaml";

/// A file of rates, which goes with the scope.
class RatesFile {
 public:
  explicit RatesFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("trireme-rates-" + std::to_string(::getpid()) + ".json")) {
    std::ofstream(path_) << text;
  }
  ~RatesFile() { std::filesystem::remove(path_); }
  RatesFile(const RatesFile&) = delete;
  RatesFile& operator=(const RatesFile&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

plan::Rates measured_rates() {
  plan::Rates rates = plan::usual_rates(plan::Device::kCpu);
  rates.measured = rates.links.measured = true;
  rates.device = "a processor of a test";
  rates.ranks = 2;
  return rates;
}

TEST(PlanTime, SaysTimeCausesAndWhatTheRatesAre) {
  const FrontProcess front;
  const Words words = {"plan", "time", kTimedConfig, "-n", "2", "--device=cpu"};
  const Outcome text = front.run(words);
  ASSERT_EQ(text.code, 0) << text.err;
  for (const char* const part : {"tokens/s", "MFU", "products of matrices", "waits for parameters",
                                 "not measured on this machine", "doctor --probe"})
    EXPECT_TRUE(contains(text.out, part)) << part << "\n" << text.out;
  EXPECT_FALSE(contains(text.out, "transformer.h.0")) << text.out;
  const Outcome by_unit = front.run(words + Words{"--by-unit"});
  EXPECT_TRUE(contains(by_unit.out, "transformer.h.3")) << by_unit.out;
}

TEST(PlanTime, IsAJsonDocumentWhoseCausesAddUp) {
  const auto json =
      FrontProcess().run({"plan", "time", kTimedConfig, "-n", "2", "--device=cpu", "--json"}).json();
  EXPECT_EQ(json["schema"], "trireme.step_time/1");
  EXPECT_EQ(json["tokens"], 16 * 128);
  EXPECT_EQ(json["rates"]["measured"], false);
  ASSERT_EQ(json["by_pp_rank"].size(), 1u);
  double sum = 0.0;
  for (const auto& [name, seconds] : json["by_pp_rank"][0]["causes_s"].items()) sum += seconds.get<double>();
  EXPECT_NEAR(sum, json["seconds"].get<double>(), 1e-9);
  EXPECT_NEAR(json["tokens_per_s"].get<double>() * json["seconds"].get<double>(), 2048.0, 1e-6);
}

TEST(PlanTime, TakesRatesFromAFile) {
  plan::Rates rates = measured_rates();
  const FrontProcess front;
  const auto run = [&](const plan::Rates& with) {
    const RatesFile file(plan::to_json(with));
    return front.run({"plan", "time", kTimedConfig, "-n", "2", "--device=cpu", "--probe", file.path()});
  };
  const Outcome text = run(rates);
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "of a processor of a test, 2 ranks at once, measured: ")) << text.out;
  EXPECT_FALSE(contains(text.out, "not measured")) << text.out;
  rates.links.measured = false;
  EXPECT_TRUE(contains(run(rates).out, "those of links are not measured"));
  EXPECT_FALSE(contains(run(rates).out, "share cores otherwise"));
  rates.ranks = 4;
  EXPECT_TRUE(contains(run(rates).out, "measure with -n 2"));
}

TEST(PlanTime, RefusesRatesThatCannotBe) {
  const FrontProcess front;
  const Words words = {"plan", "time", kTimedConfig, "-n", "2", "--device=cpu", "--probe"};
  const RatesFile broken("{\"schema\":\n 7}");
  const Outcome refused = front.run(words + Words{broken.path()});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, broken.path() + ": schema = 7")) << refused.err;
  const Outcome missing = front.run(words + Words{"/nowhere/rates.json"});
  EXPECT_NE(missing.code, 0);
  EXPECT_TRUE(contains(missing.err, "/nowhere/rates.json")) << missing.err;
}

TEST(PlanTime, RefusesRatesOfAnotherKindOfDevice) {
  const RatesFile file(plan::to_json(measured_rates()));
  const Outcome refused = FrontProcess().run(
      {"plan", "time", kTimedConfig, "-n", "2", "--gpu", "h100", "--device=cuda", "--probe", file.path()});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "--device=cpu")) << refused.err;
}

TEST(PlanTime, NeedsNoGpuOfItsOwn) {
  const Outcome text = FrontProcess().run(
      {"plan", "time", TRIREME_SOURCE "/configs/llama-1b.yaml", "-n", "4", "--gpu", "h200", "--device=cuda"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "989.4 TFLOP/s")) << text.out;
  const Outcome size = FrontProcess().run(
      {"plan", "time", TRIREME_SOURCE "/configs/llama-1b.yaml", "-n", "4", "--gpu", "80", "--device=cuda"});
  EXPECT_EQ(size.code, 2);
  EXPECT_TRUE(contains(size.err, "name the GPU")) << size.err;
}

TEST(Doctor, RefusesOptionsOfAProbeWithoutOne) {
  EXPECT_EQ(FrontProcess().run({"doctor", "-n", "2"}).code, 2);
  EXPECT_EQ(FrontProcess().run({"doctor", "--probe", "/tmp/never.json", "--json"}).code, 2);
}

}  // namespace
}  // namespace trireme::cli
