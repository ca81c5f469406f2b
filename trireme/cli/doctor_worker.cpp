// Checks that need the worker: it is asked with the verb `probe`, which prints one JSON object.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/doctor.h"
#include "trireme/cli/words.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kProbeTimeout = 60.0;  ///< seconds; loading torch from a cold network disk is slow

/// The last line that is a JSON object; libraries may have printed before it. Discarded when there is none.
Json find_object(const std::string& text) {
  const std::vector<std::string> lines = split(text, '\n');
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
    Json object = Json::parse(*line, nullptr, false);
    if (object.is_object()) return object;
  }
  return Json(Json::value_t::discarded);
}

/// "2.11.0" of "2.11.0+cu130".
std::string_view release(std::string_view version) {
  return version.substr(0, version.find('+'));
}

/// A field of the probe as text, whatever its type.
std::string text_of(const Json& probe, const char* key) {
  if (!probe.contains(key)) return "unknown";
  const Json& value = probe[key];
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  return text.empty() ? "no" : text;
}

Check check_torch(const Json& probe) {
  const std::string loaded = text_of(probe, "torch");
  if (release(loaded) == release(kTorchVersion)) return {.name = "torch", .found = loaded, .fix = ""};
  return {.name = "torch",
          .verdict = Verdict::kFail,
          .found = fmt::format("loaded {}, but built with {}", loaded, kTorchVersion),
          .fix = fmt::format("pip install torch=={}, or rebuild", release(kTorchVersion))};
}

std::string device_text(const Json& devices) {
  std::vector<std::string> texts;
  for (const Json& device : devices) {
    const double memory = device.contains("memory_bytes") && device["memory_bytes"].is_number()
                              ? device["memory_bytes"].get<double>()
                              : 0.0;
    texts.push_back(fmt::format("{} (compute {}, {})", text_of(device, "name"), text_of(device, "capability"),
                                format_bytes(memory)));
  }
  return join(texts, ", ");
}

Check check_gpus(const Json& probe, int gpus) {
  const Json devices = probe.contains("cuda_devices") ? probe["cuda_devices"] : Json::array();
  const auto usable = static_cast<int>(devices.size());
  if (gpus == 0) {
    return {.name = "GPUs", .found = "none; training runs on the CPU", .fix = ""};
  }
  if (!kHasCuda) {
    return {.name = "GPUs",
            .verdict = Verdict::kWarn,
            .found = fmt::format("the driver shows {}, but this build has no CUDA", gpus),
            .fix = "build with -DTRIREME_CUDA=ON (needs nvcc)"};
  }
  if (usable < gpus) {
    return {.name = "GPUs",
            .verdict = Verdict::kFail,
            .found = fmt::format("the driver shows {}, but torch can use {}", gpus, usable),
            .fix = "update the NVIDIA driver to a version for CUDA 13"};
  }
  return {.name = "GPUs", .found = fmt::format("{}: {}", usable, device_text(devices)), .fix = ""};
}

Check check_backends(const Json& probe) {
  return {.name = "communication",
          .found = fmt::format("gloo {}, nccl {}", text_of(probe, "gloo"), text_of(probe, "nccl")),
          .fix = ""};
}

Check failed_worker(const std::string& found, const std::string& fix) {
  return {.name = "worker", .verdict = Verdict::kFail, .found = found, .fix = fix};
}

/// The verdict on a worker that gave no answer.
Check silent_worker(const std::string& path, const ChildOutput& output) {
  if (output.timed_out) {
    return failed_worker(fmt::format("{} did not answer within {:.0f} s", path, kProbeTimeout),
                         "run it by hand with the argument 'probe' to see why");
  }
  return failed_worker(fmt::format("{} exited with code {}: {}", path, output.exit_code,
                                   last_line(output.err, "it printed nothing")),
                       "install torch where it was at build time, or rebuild");
}

}  // namespace

std::vector<Check> check_worker(const Environment& environment, int gpus) {
  const auto path = find_worker();
  if (!path) {
    return {
        failed_worker("there is no trireme-worker beside 'trireme'", "build with torch: ./trireme.sh does")};
  }
  const Request request{
      .verb = "probe", .config = "", .run_dir = "", .command = "", .json = true, .generate = {}};
  const ChildOutput output =
      run_child(*path, {request.verb}, worker_environment(environment, request), kProbeTimeout);
  const Json probe = find_object(output.out);
  if (output.timed_out || output.exit_code != 0 || !probe.is_object()) return {silent_worker(*path, output)};
  return {{.name = "worker", .found = *path, .fix = ""},
          check_torch(probe),
          check_gpus(probe, gpus),
          check_backends(probe)};
}

}  // namespace trireme::cli
