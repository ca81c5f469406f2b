// Explains the variables of NCCL, Gloo, CUDA and torch that are set on this machine. Values are never shown:
// they may be secrets.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>
#include <system_error>

#include "trireme/base/text.h"
#include "trireme/cli/doctor.h"

namespace trireme::cli {
namespace {

std::vector<std::string> entries_of(const char* folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

std::string or_none(const std::vector<std::string>& names) {
  return names.empty() ? "none" : join(names, ", ");
}

std::optional<int64_t> whole_number(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The effect of a variable; `fix` is empty where it does no harm.
struct Effect {
  std::string found, fix;
};
using Explain = std::function<Effect(const std::string& value, const HostNetwork& host)>;

/// `off` for 0 and text that is no number, which NCCL reads as 0; else what `on` says.
Explain on_switch(std::string off, Explain on) {
  return [off = std::move(off), on = std::move(on)](const std::string& value, const HostNetwork& host) {
    const auto number = whole_number(value);
    if (!number) return Effect{"is not a number, so NCCL ignores it", "set it to 0 or 1"};
    return *number == 0 ? Effect{off, ""} : on(value, host);
  };
}

Explain says(std::string found) {
  return [found = std::move(found)](const std::string&, const HostNetwork&) { return Effect{found, ""}; };
}

Explain warns(std::string found, std::string fix) {
  return [found = std::move(found), fix = std::move(fix)](const std::string&, const HostNetwork&) {
    return Effect{found, fix};
  };
}

Effect without_peer_access(const std::string&, const HostNetwork& host) {
  if (host.gpus < 2) {
    return {"turns off direct copies between GPUs; no effect here, since this host has fewer than two", ""};
  }
  return {fmt::format("the {} GPUs here exchange data through host memory instead of NVLink or PCIe, several "
                      "times slower",
                      host.gpus),
          "unset it, unless direct copies between these GPUs are known to fail"};
}

Effect without_shared_memory(const std::string&, const HostNetwork& host) {
  if (host.gpus < 2) return {fmt::format("has no effect with {} GPUs", host.gpus), ""};
  return {"GPUs without peer access use the network within this host",
          "unset it, and give the container a larger /dev/shm if that was the reason"};
}

Effect without_infiniband(const std::string&, const HostNetwork& host) {
  if (host.infiniband.empty()) return {"turns off InfiniBand and RoCE, which this host does not have", ""};
  return {fmt::format("other hosts are reached over TCP sockets although this host has {}",
                      or_none(host.infiniband)),
          "unset it, unless these adapters are not connected to the other hosts"};
}

/// "eth,ib" are prefixes, "=eth0" exact names, "^docker" what to leave out.
Effect chosen_devices(const std::string& value, const std::vector<std::string>& present, const char* what) {
  std::string_view list = value;
  const bool excludes = list.starts_with('^');
  if (excludes) list.remove_prefix(1);
  const bool exact = list.starts_with('=');
  if (exact) list.remove_prefix(1);
  const auto is_listed = [&](const std::string& name) {
    return std::ranges::any_of(split(std::string(list), ','), [&](const std::string& entry) {
      const std::string word = entry.substr(0, entry.find(':'));  // an adapter may carry a port
      return !word.empty() && (exact ? name == word : name.starts_with(word));
    });
  };
  std::vector<std::string> used;
  for (const std::string& name : present) {
    if (is_listed(name) != excludes) used.push_back(name);
  }
  if (!used.empty()) return {fmt::format("NCCL uses {} {} of this host", what, join(used, ", ")), ""};
  return {fmt::format("matches none of the {}s of this host ({})", what, or_none(present)),
          fmt::format("set it to one of them, or unset it to let NCCL pick an {}", what)};
}

Effect chosen_interfaces(const std::string& value, const HostNetwork& host) {
  return chosen_devices(value, host.interfaces, "interface");
}

Effect chosen_adapters(const std::string& value, const HostNetwork& host) {
  return chosen_devices(value, host.infiniband, "adapter");
}

Effect peer_distance(const std::string& value, const HostNetwork&) {
  constexpr std::string_view kLevels[] = {"LOC", "NVL", "PIX", "PXB", "PHB", "SYS",
                                          "0",   "1",   "2",   "3",   "4",   "5"};
  if (std::ranges::find(kLevels, value) == std::end(kLevels)) {
    return {"is not one of NCCL's distances, so NCCL ignores it", "set it to LOC, NVL, PIX, PXB, PHB or SYS"};
  }
  if (value == "LOC" || value == "0")
    return {"turns off direct copies between GPUs", "set it to NVL or farther"};
  return {"limits the distance over which GPUs copy to each other directly", ""};
}

/// How many of something NCCL's sockets have: 1 to `most`.
Explain socket_count(std::string what, int64_t most) {
  return [what = std::move(what), most](const std::string& value, const HostNetwork&) {
    const auto number = whole_number(value);
    if (number && *number >= 1 && *number <= most) return Effect{"sets the number of " + what, ""};
    return Effect{fmt::format("is not a number from 1 to {}", most), "set it to one, or unset it"};
  };
}

Effect log_level(const std::string& value, const HostNetwork&) {
  if (value == "TRACE" || value == "INFO") {
    return {"NCCL logs its set-up and calls to stdout, among the results",
            "set NCCL_DEBUG_FILE too, or unset it when you are done debugging"};
  }
  return {"NCCL writes its version and warnings", ""};
}

struct Known {
  std::string_view name;
  Explain explain;
};

const std::vector<Known>& known_variables() {
  static const std::vector<Known> table = {
      {"NCCL_P2P_DISABLE",
       on_switch("leaves direct copies between GPUs on, as by default", without_peer_access)},
      {"NCCL_P2P_LEVEL", peer_distance},
      {"NCCL_SHM_DISABLE", on_switch("leaves shared memory on, as by default", without_shared_memory)},
      {"NCCL_IB_DISABLE", on_switch("leaves InfiniBand on, as by default", without_infiniband)},
      {"NCCL_IB_HCA", chosen_adapters},
      {"NCCL_SOCKET_IFNAME", chosen_interfaces},
      {"NCCL_SOCKET_NTHREADS", socket_count("threads per socket connection; no effect with InfiniBand", 16)},
      {"NCCL_NSOCKS_PERTHREAD",
       socket_count("sockets per thread of NCCL_SOCKET_NTHREADS; the product can be at most 64", 64)},
      {"NCCL_NET_GDR_LEVEL",
       says("limits the distance between a network adapter and a GPU whose memory it reads")},
      {"NCCL_NET", says("selects the network plugin; NCCL fails if it is not installed")},
      {"NCCL_DEBUG", log_level},
      {"NCCL_DEBUG_SUBSYS", says("selects what NCCL_DEBUG=INFO logs; no effect without it")},
      {"NCCL_DEBUG_FILE", says("sets the file for the log of NCCL_DEBUG")},
      {"NCCL_ALGO", warns("fixes NCCL's algorithm for all sizes; this changes the last bits of sums with "
                          "comm.reduction=backend, but not with ordered",
                          "unset it except for measurements: NCCL chooses by size")},
      {"NCCL_PROTO", warns("fixes NCCL's protocol for all sizes; LL and LL128 are slow for large tensors",
                           "unset it except for measurements: NCCL chooses by size")},
      {"NCCL_NVLS_ENABLE",
       says("0 turns off reductions in the NVLink switch, which round differently from rings")},
      {"NCCL_MIN_NCHANNELS",
       says("reserves at least this many multiprocessors for a collective, at the expense of computation")},
      {"NCCL_MAX_NCHANNELS", says("leaves more multiprocessors to computation, but slows large collectives")},
      {"NCCL_BUFFSIZE", says("sets NCCL's buffers, a few MiB of GPU memory per channel and peer")},
      {"NCCL_CUMEM_ENABLE", says("chooses how NCCL allocates the memory that peers map")},
      {"NCCL_CROSS_NIC", says("sets whether a ring may switch adapters between hosts")},
      {"NCCL_TOPO_FILE", says("replaces the topology that NCCL detects with a file")},
      {"CUDA_DEVICE_MAX_CONNECTIONS",
       says("sets the number of hardware queues between host and GPU; Trireme's streams are ordered by "
            "events and need no particular value")},
      {"CUDA_LAUNCH_BLOCKING",
       on_switch("has no effect", warns("the host waits for every kernel, so nothing overlaps on a GPU",
                                        "unset it when you are done debugging"))},
      {"GLOO_SOCKET_IFNAME", says("has no effect: ranks use the interface that routes to MASTER_ADDR")},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING",
       on_switch(
           "leaves timeouts to Trireme, as by default",
           warns("torch's watchdog ends the process on an error before Trireme can say which rank is missing",
                 "unset it: comm.timeout_s sets the timeout"))},
      {"TORCH_NCCL_BLOCKING_WAIT",
       on_switch(
           "has no effect",
           warns("the host waits for every collective, so none overlaps with computation", "unset it"))},
      {"TORCH_DISTRIBUTED_DEBUG", says("has no effect: Trireme's groups do not use torch's wrapper")},
      {"TORCH_CPP_LOG_LEVEL", says("sets how much torch logs")},
  };
  return table;
}

Check check_variable(const std::string& name, const std::string& value, const HostNetwork& host) {
  const auto known = std::ranges::find(known_variables(), name, &Known::name);
  if (known == known_variables().end()) {
    return {.name = name,
            .found = "is set; see the documentation of NCCL, Gloo or torch for what it does",
            .fix = ""};
  }
  Effect effect = known->explain(value, host);
  return {.name = name,
          .verdict = effect.fix.empty() ? Verdict::kOk : Verdict::kWarn,
          .found = std::move(effect.found),
          .fix = std::move(effect.fix)};
}

}  // namespace

HostNetwork describe_network(int gpus) {
  return {.gpus = gpus,
          .interfaces = entries_of("/sys/class/net"),
          .infiniband = entries_of("/sys/class/infiniband")};
}

std::vector<Check> check_variables(const Environment& environment, const HostNetwork& host) {
  constexpr std::string_view kOfCuda[] = {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"};
  constexpr std::string_view kOfImages[] = {"NCCL_VERSION", "TORCH_CUDA_ARCH_LIST", "TORCH_HOME"};
  std::vector<Check> checks;
  for (const auto& [name, value] : environment.variables()) {
    const bool theirs = name.starts_with("NCCL_") || name.starts_with("TORCH_NCCL_") ||
                        name.starts_with("TORCH_DISTRIBUTED_") || name.starts_with("TORCH_CPP_") ||
                        name.starts_with("GLOO_") || std::ranges::find(kOfCuda, name) != std::end(kOfCuda);
    if (theirs && !value.empty() && std::ranges::find(kOfImages, name) == std::end(kOfImages)) {
      checks.push_back(check_variable(name, value, host));
    }
  }
  if (checks.empty()) {
    checks.push_back({.name = "variables",
                      .found = "no variable of NCCL, Gloo, CUDA or torch.distributed is set",
                      .fix = ""});
  }
  return checks;
}

}  // namespace trireme::cli
