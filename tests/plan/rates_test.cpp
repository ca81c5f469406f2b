// Rates of machines: what lies between measured sizes, files there and back, and files that are refused.
#include "trireme/plan/rates.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

/// Seconds of a start, of operations and of bytes.
double law(double m, double n, double k) {
  return 1e-6 + 2.0 * m * n * k / 1e9 + (m * k + k * n + m * n) / 1e8;
}

ProductGrid cubes() {
  ProductGrid grid{.m = {16, 64, 256}, .n = {16, 64, 256}, .k = {16, 64, 256}, .seconds = {}};
  for (const int64_t m : grid.m) {
    for (const int64_t n : grid.n) {
      for (const int64_t k : grid.k)
        grid.seconds.push_back(law(static_cast<double>(m), static_cast<double>(n), static_cast<double>(k)));
    }
  }
  return grid;
}

TEST(Rates, BetweenSizesAreExactForStartsOperationsAndBytes) {
  const ProductGrid grid = cubes();
  EXPECT_NEAR(grid.seconds_of(64, 16, 256), law(64, 16, 256), 1e-12);
  EXPECT_NEAR(grid.seconds_of(100, 20, 33), law(100, 20, 33), 1e-12);
  EXPECT_NEAR(grid.seconds_of(255, 256, 17), law(255, 256, 17), 1e-12);
  EXPECT_NEAR(grid.seconds_of(1024, 512, 32), 4.0 * 2.0 * law(256, 256, 32), 1e-9);
  EXPECT_EQ(grid.seconds_of(1, 1, 1), grid.seconds_of(16, 16, 16));
  EXPECT_NEAR(grid.most_flops(), 2.0 * 256 * 256 * 256 / law(256, 256, 256), 1.0);
}

TEST(Rates, OfProductsNeverFallWhereWorkGrows) {
  const Rates rates = usual_rates(Device::kCuda, "h200");
  double before = 0.0;
  for (double size = 1.0; size < 3e5; size *= 1.37) {
    const double seconds = rates.product("bf16", ProductPass::kForward, size, 300.0, size);
    EXPECT_GE(seconds, before) << size;
    before = seconds;
  }
}

TEST(Rates, OfAttentionAreThoseOfTheNearestHeads) {
  Rates rates = usual_rates(Device::kCpu);
  rates.attention["fp32"] = {{128, 32, 1e9, 2e9}, {512, 32, 4e9, 8e9}, {128, 128, 7e9, 9e9}};
  EXPECT_NEAR(rates.attention_of("fp32", 256, 32).forward, 2e9, 1.0);
  EXPECT_NEAR(rates.attention_of("fp32", 256, 40).backward, 4e9, 1.0);
  EXPECT_NEAR(rates.attention_of("fp32", 64, 32).forward, 1e9, 1.0);
  EXPECT_NEAR(rates.attention_of("fp32", 9999, 32).forward, 4e9, 1.0);
  EXPECT_NEAR(rates.attention_of("fp32", 4096, 100).forward, 7e9, 1.0);
}

TEST(Rates, OfLinksAreThoseOfAtLeastAsManyRanks) {
  const std::vector<LinkRate> links = {{2, 1e-6, 1e9}, {4, 2e-6, 2e9}, {8, 3e-6, 3e9}};
  EXPECT_EQ(of_ranks(links, 2).ranks, 2);
  EXPECT_EQ(of_ranks(links, 3).ranks, 4);
  EXPECT_EQ(of_ranks(links, 64).ranks, 8);
  EXPECT_NEAR(links[1].seconds_of(4e9), 2.000002, 1e-9);
}

TEST(Rates, ComeBackFromTheirFile) {
  for (const char* const gpu : {"a100", "b200", "h100", "h200", "l4", "l40s", "rtx5090", "rtx6000ada"}) {
    const Rates rates = usual_rates(Device::kCuda, gpu);
    EXPECT_EQ(rates_from_text(to_json(rates), "f"), rates) << gpu;
    EXPECT_FALSE(rates.measured);
  }
  Rates rates = usual_rates(Device::kCpu);
  rates.measured = rates.links.measured = true;
  rates.disk = {.write = 1.5e8, .read = 2.5e9};
  const Rates back = rates_from_text(to_json(rates), "rates.json");
  EXPECT_EQ(back, rates);
  EXPECT_EQ(back.origin, "rates.json");
  rates.links.gather[0].latency_s *= 2.0;
  EXPECT_FALSE(back == rates);
}

/// The rate of caches came later than the files of some users.
TEST(Rates, OfCachesMayBeMissing) {
  Rates rates = usual_rates(Device::kCpu);
  EXPECT_EQ(rates_from_text(to_json(rates), "f").memory.at("fp32").cached, 0.0);
  rates.memory["fp32"] = {.copy = 2.0,
                          .add = 3.0,
                          .norm = 7.0,
                          .norm_backward = 1.0,
                          .activation = 5.0,
                          .activation_backward = 4.0,
                          .loss = 6.0,
                          .update = 2.0,
                          .cached = 9.0};
  const MemoryRates back = rates_from_text(to_json(rates), "f").memory.at("fp32");
  EXPECT_EQ(back.cached, 9.0);
  EXPECT_EQ(back.most(), 7.0) << "of memory, whatever caches do";
}

TEST(Rates, WithoutLinksHaveTheUsualOnes) {
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(to_json(usual_rates(Device::kCuda, "h200")));
  json.erase("links");
  EXPECT_EQ(rates_from_text(json.dump(), "f").links, usual_rates(Device::kCuda, "h200").links);
}

std::string refusal_of_rates(const std::string& text) {
  try {
    rates_from_text(text, "mine.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Rates, ThatCannotBeAreRefusedByField) {
  using Json = nlohmann::ordered_json;
  struct Fault {
    std::function<void(Json&)> plant;
    const char* named;
  };
  const Fault faults[] = {
      {[](Json& json) { json["schema"] = "trireme.rates/9"; }, "schema"},
      {[](Json& json) { json.erase("launch_s"); }, "launch_s"},
      {[](Json& json) { json["launch_s"] = -1.0; }, "launch_s"},
      {[](Json& json) { json["ranks"] = 0; }, "ranks"},
      {[](Json& json) { json["on_gpu"] = "yes"; }, "on_gpu"},
      {[](Json& json) { json["device"] = 3; }, "device"},
      {[](Json& json) { json["products"]["fp32"]["weight"]["seconds"][3] = 0.0; },
       "products.fp32.weight.seconds[3]"},
      {[](Json& json) { json["products"]["fp32"]["input"]["seconds"][5] = 1e-12; },
       "products.fp32.input.seconds[5]"},
      {[](Json& json) { json["products"]["bf16"]["forward"]["seconds"].erase(0); },
       "products.bf16.forward.seconds"},
      {[](Json& json) { json["products"]["bf16"]["forward"]["m"][1] = 16; }, "products.bf16.forward.m[1]"},
      {[](Json& json) { json["products"]["bf16"]["forward"].erase("k"); }, "products.bf16.forward.k"},
      {[](Json& json) { json["products"] = 7; }, "products"},
      {[](Json& json) { json["attention"]["fp32"] = Json::array(); }, "attention.fp32"},
      {[](Json& json) { json["attention"]["fp32"][0]["length"] = 1.5; }, "attention.fp32[0].length"},
      {[](Json& json) { json["memory"]["fp32"].erase("update"); }, "memory.fp32.update"},
      {[](Json& json) { json["links"]["gather"][0]["bytes_per_s"] = 0; }, "links.gather[0].bytes_per_s"},
      {[](Json& json) { json["links"]["reduce"][1]["ranks"] = 2; }, "links.reduce[1]"},
      {[](Json& json) { json["links"].erase("send"); }, "links.send"},
      {[](Json& json) { json["disk"]["read"] = "fast"; }, "disk.read"},
      {[](Json& json) { json["peak_flops"]["bf16"] = nullptr; }, "peak_flops.bf16"}};
  const Json good = Json::parse(to_json(usual_rates(Device::kCuda, "h100")));
  for (const Fault& fault : faults) {
    Json bad = good;
    fault.plant(bad);
    const std::string said = refusal_of_rates(bad.dump());
    EXPECT_NE(said.find("mine.json: " + std::string(fault.named) + " "), std::string::npos)
        << fault.named << ": " << said;
  }
}

TEST(Rates, ThatAreNoJsonAreRefusedByLine) {
  EXPECT_NE(refusal_of_rates("{\n\"schema\": \"trireme.rates/1\",\n\"ranks\": }").find("mine.json:3:"),
            std::string::npos);
  EXPECT_NE(refusal_of_rates("").find("mine.json:1:"), std::string::npos);
  EXPECT_NE(refusal_of_rates("[]").find("is no object"), std::string::npos);
}

TEST(Rates, OfGpusAreFoundByName) {
  EXPECT_EQ(known_gpu("NVIDIA H200"), "h200");
  EXPECT_EQ(known_gpu("NVIDIA H100 80GB HBM3"), "h100");
  EXPECT_EQ(known_gpu("NVIDIA L40S"), "l40s");
  EXPECT_EQ(known_gpu("NVIDIA L4"), "l4");
  EXPECT_EQ(known_gpu("NVIDIA GeForce RTX 4090"), "rtx4090");
  EXPECT_EQ(known_gpu("AMD EPYC"), "");
  EXPECT_THROW(usual_rates(Device::kCuda, "80"), ConfigError);
  EXPECT_THROW(usual_rates(Device::kCuda, "h999"), ConfigError);
  EXPECT_THROW(usual_rates(Device::kCpu).memory_of("fp8"), ConfigError);
}

}  // namespace
}  // namespace trireme::plan
