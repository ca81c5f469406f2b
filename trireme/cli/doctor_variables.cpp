// What variables of NCCL, Gloo, CUDA and torch that are set do on this machine. Values are never shown: they
// may be secrets.
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

/// What a variable does here; `fix` empty where it does no harm.
struct Effect {
  std::string found, fix;
};
using Explain = std::function<Effect(const std::string& value, const HostNetwork& host)>;

/// `off` for 0 and text that is no number, which NCCL reads as 0; else what `on` says.
Explain on_switch(std::string off, Explain on) {
  return [off = std::move(off), on = std::move(on)](const std::string& value, const HostNetwork& host) {
    const auto number = whole_number(value);
    if (!number) return Effect{"is no number, so NCCL ignores it", "give it 0 or 1"};
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
    return {"turns off copies from GPU to GPU; this host has no two GPUs", ""};
  }
  return {fmt::format("the {} GPUs here exchange data through host memory instead of NVLink or PCIe, several "
                      "times slower",
                      host.gpus),
          "unset it, unless copies between these GPUs are known to fail"};
}

Effect without_shared_memory(const std::string&, const HostNetwork& host) {
  if (host.gpus < 2) return {fmt::format("has no effect with {} GPUs", host.gpus), ""};
  return {"GPUs without peer access use the network within this host",
          "unset it, and give the container a larger /dev/shm if that was the reason"};
}

Effect without_infiniband(const std::string&, const HostNetwork& host) {
  if (host.infiniband.empty()) return {"turns off InfiniBand and RoCE, which this host does not have", ""};
  return {
      fmt::format("other hosts are reached over sockets although this one has {}", or_none(host.infiniband)),
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
  return {fmt::format("fits none of the {}s of this host ({})", what, or_none(present)),
          fmt::format("name one of them, or unset it and NCCL picks an {} by itself", what)};
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
    return {"is none of NCCL's distances, so NCCL ignores it", "give it LOC, NVL, PIX, PXB, PHB or SYS"};
  }
  if (value == "LOC" || value == "0")
    return {"no two GPUs copy to each other directly", "give it NVL or more"};
  return {"limits how far apart GPUs may be that copy to each other directly", ""};
}

/// How many of something NCCL's sockets have: 1 to `most`.
Explain socket_count(std::string what, int64_t most) {
  return [what = std::move(what), most](const std::string& value, const HostNetwork&) {
    const auto number = whole_number(value);
    if (number && *number >= 1 && *number <= most) return Effect{"sets the number of " + what, ""};
    return Effect{fmt::format("is no number from 1 to {}", most), "give it one, or unset it"};
  };
}

Effect log_level(const std::string& value, const HostNetwork&) {
  if (value == "TRACE" || value == "INFO") {
    return {"NCCL writes a log of its set-up and calls to stdout, between the results",
            "set NCCL_DEBUG_FILE as well, or unset it when the question is answered"};
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
       on_switch("leaves copies from GPU to GPU on, as they are by default", without_peer_access)},
      {"NCCL_P2P_LEVEL", peer_distance},
      {"NCCL_SHM_DISABLE", on_switch("leaves shared memory on, as it is by default", without_shared_memory)},
      {"NCCL_IB_DISABLE", on_switch("leaves InfiniBand on, as it is by default", without_infiniband)},
      {"NCCL_IB_HCA", chosen_adapters},
      {"NCCL_SOCKET_IFNAME", chosen_interfaces},
      {"NCCL_SOCKET_NTHREADS",
       socket_count("threads that serve each connection over sockets; nothing where InfiniBand is used", 16)},
      {"NCCL_NSOCKS_PERTHREAD",
       socket_count("sockets of each thread of NCCL_SOCKET_NTHREADS; their product may be 64 at most", 64)},
      {"NCCL_NET_GDR_LEVEL",
       says("limits how far a network adapter may be from a GPU whose memory it reads")},
      {"NCCL_NET", says("names the network plugin; NCCL fails where it is not installed")},
      {"NCCL_DEBUG", log_level},
      {"NCCL_DEBUG_SUBSYS", says("picks what NCCL_DEBUG=INFO writes about; nothing without it")},
      {"NCCL_DEBUG_FILE", says("is where the log of NCCL_DEBUG goes")},
      {"NCCL_ALGO",
       warns("fixes NCCL's algorithm for all sizes; the sums of comm.reduction=backend change in "
             "their last bits, ours do not",
             "unset it outside of measurements: NCCL picks by size")},
      {"NCCL_PROTO", warns("fixes NCCL's protocol for all sizes; LL and LL128 are slow for large tensors",
                           "unset it outside of measurements: NCCL picks by size")},
      {"NCCL_NVLS_ENABLE",
       says("0 turns off reductions inside the NVLink switch, which round otherwise than rings")},
      {"NCCL_MIN_NCHANNELS",
       says("takes at least so many multiprocessors from computation beside a collective")},
      {"NCCL_MAX_NCHANNELS", says("leaves more multiprocessors to computation, and slows large collectives")},
      {"NCCL_BUFFSIZE", says("sets NCCL's buffers, a few MiB of GPU memory per channel and peer")},
      {"NCCL_CUMEM_ENABLE", says("chooses how NCCL allocates the memory that peers map")},
      {"NCCL_CROSS_NIC", says("says whether a ring may change adapters between hosts")},
      {"NCCL_TOPO_FILE", says("replaces what NCCL finds out about this machine by a file")},
      {"CUDA_DEVICE_MAX_CONNECTIONS",
       says("sets how many hardware queues there are between host and GPU; our streams are ordered by events "
            "and need no value")},
      {"CUDA_LAUNCH_BLOCKING",
       on_switch("has no effect", warns("the host waits for every kernel, so nothing on a GPU runs beside "
                                        "anything else",
                                        "unset it when the question is answered"))},
      {"GLOO_SOCKET_IFNAME",
       says("has no effect: ranks take the interface from which packets to MASTER_ADDR leave")},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING",
       on_switch(
           "leaves deadlines to us, as our ranks do by default",
           warns("torch's watchdog ends the process at an error before we can say which rank is missing",
                 "unset it: comm.timeout_s is the deadline"))},
      {"TORCH_NCCL_BLOCKING_WAIT",
       on_switch("has no effect",
                 warns("the host waits for every collective, so none runs beside computation", "unset it"))},
      {"TORCH_DISTRIBUTED_DEBUG", says("has no effect: our groups do not go through torch's wrapper")},
      {"TORCH_CPP_LOG_LEVEL", says("sets how much torch logs")},
  };
  return table;
}

Check check_variable(const std::string& name, const std::string& value, const HostNetwork& host) {
  const auto known = std::ranges::find(known_variables(), name, &Known::name);
  if (known == known_variables().end()) {
    return {.name = name,
            .found = "is set; what it does is in the documentation of NCCL, Gloo or torch",
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
    checks.push_back(
        {.name = "variables", .found = "none of NCCL, Gloo, CUDA or torch.distributed is set", .fix = ""});
  }
  return checks;
}

}  // namespace trireme::cli
