#include <gtest/gtest.h>

#include <set>

#include "tests/cli/front_process.h"
#include "trireme/base/build_info.h"

namespace trireme::cli {
namespace {

/// A worker that answers the probe as one of this build would on a machine without GPUs.
std::string healthy_worker(const std::string& torch = kTorchVersion) {
  return "echo some library is talkative\n"
         "echo '{\"torch\": \"" +
         torch +
         "\", \"cuda_built\": false, \"cuda_devices\": [], \"nccl\": \"\", "
         "\"gloo\": true, \"threads\": 2, \"libraries\": []}'";
}

/// The row of a check in the JSON document.
nlohmann::json row(const nlohmann::json& document, const std::string& name) {
  for (const auto& check : document["checks"]) {
    if (check["name"] == name) return check;
  }
  ADD_FAILURE() << "no check " << name << " in " << document.dump(2);
  return {};
}

TEST(Doctor, ExitCodeIsThreeExactlyWhenACheckFails) {
  FrontProcess front;
  for (const bool has_worker : {false, true}) {
    if (has_worker) front.set_worker(healthy_worker());
    const Outcome outcome = front.run({"doctor", "--json"});
    const auto json = outcome.json();
    bool failed = false;
    for (const auto& check : json["checks"]) {
      failed = failed || check["verdict"] == "FAIL";
      EXPECT_EQ(check["verdict"] == "OK", check["fix"] == "")
          << "a fix for what is not well, and only then: " << check;
    }
    EXPECT_EQ(outcome.code, failed ? 3 : 0);
    EXPECT_EQ(json["ok"], !failed);
    EXPECT_EQ(row(json, "worker")["verdict"], has_worker ? "OK" : "FAIL");
  }
}

TEST(Doctor, TableAndJsonHoldTheSameChecks) {
  FrontProcess front;
  front.set_worker(healthy_worker());
  const auto before = front.run({"doctor", "--json"}).json()["checks"];
  const std::string text = front.run({"doctor"}).out;
  const auto after = front.run({"doctor", "--json"}).json()["checks"];
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(contains(text, before[i]["name"].get<std::string>() + " ")) << text;
    // Free memory and disk move while other tests run.
    const std::string fix = before[i]["fix"] == after[i]["fix"] ? before[i]["fix"] : "";
    if (!fix.empty()) {
      EXPECT_TRUE(contains(text, "fix: " + fix)) << text;
    }
  }
}

TEST(Doctor, NoticesAnotherTorchThanTheBuilds) {
  FrontProcess front;
  front.set_worker(healthy_worker("1.13.1"));
  const Outcome outcome = front.run({"doctor", "--json"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(row(outcome.json(), "torch")["found"], "1.13.1"));
}

TEST(Doctor, SaysWhyAWorkerGaveNoAnswer) {
  FrontProcess front;
  front.set_worker("echo 'libtorch_cpu.so: cannot open shared object file' >&2; exit 127");
  const auto check = row(front.run({"doctor", "--json"}).json(), "worker");
  EXPECT_EQ(check["verdict"], "FAIL");
  EXPECT_TRUE(contains(check["found"], "libtorch_cpu.so: cannot open shared object file")) << check;
  EXPECT_TRUE(contains(check["found"], "127")) << check;
}

TEST(Doctor, NoticesWhatTheEnvironmentLeavesBehind) {
  FrontProcess front;
  front.set_worker(healthy_worker());
  EXPECT_EQ(row(front.run({"doctor", "--json"}).json(), "variables")["verdict"], "OK");
  front.set("NCCL_P2P_DISABLE", "secret-value");
  front.set("OMP_NUM_THREADS", "100000");
  front.set("RANK", "3");
  const Outcome outcome = front.run({"doctor", "--json"});
  const auto json = outcome.json();
  EXPECT_EQ(row(json, "NCCL_P2P_DISABLE")["verdict"], "WARN") << "NCCL reads a number there";
  EXPECT_FALSE(contains(outcome.out, "secret-value"));
  EXPECT_EQ(row(json, "cores")["verdict"], "WARN");
  EXPECT_EQ(row(json, "launcher")["verdict"], "FAIL");
  EXPECT_TRUE(contains(row(json, "launcher")["found"], "WORLD_SIZE")) << row(json, "launcher");
}

TEST(Doctor, NoticesARunFolderThatCannotBeWritten) {
  FrontProcess front;
  front.set_worker(healthy_worker());
  front.set("TRIREME_RUN_DIR", "/proc/no-such-folder");
  const auto json = front.run({"doctor", "--json"}).json();
  EXPECT_EQ(row(json, "run folder")["verdict"], "FAIL") << json;
}

}  // namespace
}  // namespace trireme::cli
