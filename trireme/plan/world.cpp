#include "trireme/plan/world.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

constexpr int64_t kDefaultPort = 29500;  // what torchrun and MPI users know

/// The world by one launcher's variables. A claim is made as soon as one variable hints at that launcher, and
/// is complete when nothing is missing.
struct Claim {
  WorldSpec spec;
  bool innermost = false;            ///< its variables prove that it started this very process
  std::vector<std::string> present;  ///< "RANK=3"
  std::vector<std::string> missing;  ///< "WORLD_SIZE"
};
using MaybeClaim = std::optional<Claim>;

/// Reads variables and keeps a record of what was there and what was not.
class EnvironmentReader {
 public:
  EnvironmentReader(const Environment& environment, Claim& claim)
      : environment_(environment), claim_(claim) {}

  /// The first of `names` that is set; noted as present.
  std::optional<std::string> text(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      if (const auto value = environment_.get(name)) {
        claim_.present.push_back(fmt::format("{}={}", name, *value));
        return value;
      }
    }
    return std::nullopt;
  }

  std::optional<int64_t> number(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      if (const auto value = environment_.get_int(name)) {
        claim_.present.push_back(fmt::format("{}={}", name, *value));
        return value;
      }
    }
    return std::nullopt;
  }

  /// number(), noted as missing when unset.
  int64_t required(const std::vector<std::string>& names) {
    const auto value = number(names);
    if (!value) miss(names.front());
    return value.value_or(0);
  }

  void miss(const std::string& name) { claim_.missing.push_back(name); }

 private:
  const Environment& environment_;
  Claim& claim_;
};

bool any_set(const Environment& environment, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return environment.get(name); });
}

// ---- RANK, WORLD_SIZE, ...: our launcher, torchrun, or a user who set them by hand

void read_env_ranks(EnvironmentReader& read, WorldSpec& spec) {
  spec.rank = read.required({"RANK"});
  spec.world_size = read.required({"WORLD_SIZE"});
  if (spec.world_size == 1) {
    spec.master_addr = read.text({"MASTER_ADDR"}).value_or(spec.master_addr);
    spec.master_port = read.number({"MASTER_PORT"}).value_or(0);
    return;
  }
  spec.local_rank = read.required({"LOCAL_RANK"});
  spec.local_world_size = read.number({"LOCAL_WORLD_SIZE"}).value_or(0);
  const auto address = read.text({"MASTER_ADDR"});
  if (!address) read.miss("MASTER_ADDR");
  spec.master_addr = address.value_or(spec.master_addr);
  spec.master_port = read.required({"MASTER_PORT"});
}

MaybeClaim claim_of_env_ranks(const Environment& environment) {
  const bool ours = environment.get("TRIREME_LAUNCHER") == "trireme";
  if (!ours && !any_set(environment,
                        {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})) {
    return std::nullopt;
  }
  Claim claim;
  EnvironmentReader read(environment, claim);
  const bool torchrun = read.text({"TORCHELASTIC_RUN_ID"}).has_value();
  claim.innermost = ours || torchrun;
  claim.spec.launcher = ours ? "trireme" : torchrun ? "torchrun" : "unknown";
  read_env_ranks(read, claim.spec);
  if (!ours) {
    claim.spec.agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True";
    claim.spec.restart = environment.get_int("TORCHELASTIC_RESTART_COUNT").value_or(0);
  } else if (claim.spec.rank == 0) {
    claim.spec.listen_fd = environment.get_int("TRIREME_LISTEN_FD").value_or(-1);
  }
  return claim;
}

// ---- mpirun

/// MPI launchers say nothing about an address; on one host there is a default, across hosts the user names
/// it.
void read_mpi_address(EnvironmentReader& read, WorldSpec& spec) {
  const bool one_host = spec.local_world_size == spec.world_size;
  const auto address = read.text({"MASTER_ADDR"});
  const auto port = read.number({"MASTER_PORT"});
  if (!one_host && !address) read.miss("MASTER_ADDR");
  if (!one_host && !port) read.miss("MASTER_PORT");
  spec.master_addr = address.value_or(spec.master_addr);
  spec.master_port = port.value_or(kDefaultPort);
}

/// The names under which an MPI launcher gives the four numbers; the first of each is the usual one.
struct MpiNames {
  std::string launcher;
  std::vector<std::string> rank, size, local_rank, local_size;
};

MaybeClaim claim_of_mpi(const Environment& environment, const MpiNames& names) {
  if (!any_set(environment, names.rank) && !any_set(environment, names.size) &&
      !any_set(environment, names.local_rank)) {
    return std::nullopt;
  }
  Claim claim;
  EnvironmentReader read(environment, claim);
  claim.spec.launcher = names.launcher;
  claim.spec.rank = read.required(names.rank);
  claim.spec.world_size = read.required(names.size);
  if (claim.spec.world_size == 1) return claim;
  claim.spec.local_rank = read.required(names.local_rank);
  claim.spec.local_world_size = read.required(names.local_size);
  read_mpi_address(read, claim.spec);
  return claim;
}

MaybeClaim claim_of_openmpi(const Environment& environment) {
  return claim_of_mpi(environment, {.launcher = "openmpi",
                                    .rank = {"OMPI_COMM_WORLD_RANK"},
                                    .size = {"OMPI_COMM_WORLD_SIZE"},
                                    .local_rank = {"OMPI_COMM_WORLD_LOCAL_RANK"},
                                    .local_size = {"OMPI_COMM_WORLD_LOCAL_SIZE"}});
}

/// MPICH and Intel MPI; Cray's PALS and MVAPICH2 say the same under their own names.
MaybeClaim claim_of_pmi(const Environment& environment) {
  return claim_of_mpi(
      environment,
      {.launcher = "pmi",
       .rank = {"PMI_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK"},
       .size = {"PMI_SIZE", "MV2_COMM_WORLD_SIZE"},
       .local_rank = {"MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK"},
       .local_size = {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"}});
}

// ---- srun

/// Whether this process is a task of srun. Batch scripts and interactive shells carry most of the same
/// variables.
bool started_by_srun(const Environment& environment) {
  const auto task = environment.get_int("SLURM_PROCID");
  if (!task) return false;
  if (*task > 0) return true;  // a shell is always task 0
  const int64_t tasks = environment.get_int("SLURM_NTASKS").value_or(1);
  if (tasks <= 1 && !environment.get("SLURM_STEP_ID")) return false;
  const auto job = environment.get("SLURM_JOB_NAME");
  if (job == "bash") return false;
  // Steps inside salloc keep the job's name "interactive"; its shell is a step of one task, srun -n N one of
  // N.
  if (job == "interactive") return environment.get_int("SLURM_STEP_NUM_TASKS").value_or(1) > 1;
  return true;
}

int64_t parse_count(std::string_view text, const std::string& list) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 1) return value;
  throw ConfigError("[plan.world] task counts '{}' are malformed; they should look like 4(x2),3", list);
}

/// Entry `node` of Slurm's run-length list: "4(x2),3" is 4, 4, 3.
std::optional<int64_t> tasks_on_node(const std::string& list, int64_t node) {
  for (const std::string& entry : split(list, ',')) {
    const size_t open = entry.find("(x");
    const std::string_view text = entry;
    const int64_t tasks = parse_count(text.substr(0, open), list);
    const bool repeated = open != std::string::npos && text.back() == ')';
    const int64_t repeats = repeated ? parse_count(text.substr(open + 2, text.size() - open - 3), list) : 1;
    if (node < repeats) return tasks;
    node -= repeats;
  }
  return std::nullopt;
}

/// Tasks on this host: from the step's list, else from the flags, else all of them when there is one node.
std::optional<int64_t> slurm_local_size(EnvironmentReader& read, int64_t world_size) {
  const auto list = read.text({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  const auto node = read.number({"SLURM_NODEID"});
  if (list && (node || list->find(',') == std::string::npos)) return tasks_on_node(*list, node.value_or(0));
  if (const auto flag = read.number({"SLURM_NTASKS_PER_NODE"})) return std::min(*flag, world_size);
  const auto nodes = read.number({"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"});
  return nodes == 1 ? std::optional(world_size) : std::nullopt;
}

/// All ranks of a job compute the same port, and two jobs on one host rarely do: 15000 + the job id's last
/// digits.
void read_slurm_address(EnvironmentReader& read, WorldSpec& spec) {
  const auto address = read.text({"MASTER_ADDR"});
  const auto nodes = address ? std::nullopt : read.text({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"});
  if (!address && !nodes) read.miss("SLURM_STEP_NODELIST");
  if (address || nodes) spec.master_addr = address ? *address : first_host_of_nodelist(*nodes);
  const auto port = read.number({"MASTER_PORT"});
  spec.master_port = port ? *port : 15000 + read.required({"SLURM_JOB_ID", "SLURM_JOBID"}) % 10000;
}

MaybeClaim claim_of_slurm(const Environment& environment) {
  if (!started_by_srun(environment)) return std::nullopt;
  Claim claim;
  EnvironmentReader read(environment, claim);
  WorldSpec& spec = claim.spec;
  spec.launcher = "slurm";
  spec.rank = read.required({"SLURM_PROCID"});
  spec.world_size = read.required({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  if (spec.world_size == 1) return claim;
  if (!read.text({"SLURM_STEP_ID"})) read.miss("SLURM_STEP_ID (srun sets it; a batch script must call srun)");
  spec.local_rank = read.required({"SLURM_LOCALID"});
  const auto local_size = slurm_local_size(read, spec.world_size);
  if (!local_size) read.miss("SLURM_NTASKS_PER_NODE");
  spec.local_world_size = local_size.value_or(1);
  read_slurm_address(read, spec);
  return claim;
}

// ---- one verdict

std::string listing(const Claim& claim) {
  return join(claim.present, " ");
}

std::string variables_of(const Claim& claim) {
  if (claim.spec.launcher == "unknown") return "the variables that make this process one of several ranks";
  return "the variables of " + claim.spec.launcher;
}

void check_complete(const Claim& claim) {
  if (claim.missing.empty()) return;
  throw ConfigError(
      "[plan.world] {} are only partly set: present {}; missing {}; set the missing ones, or unset the "
      "others",
      variables_of(claim), claim.present.empty() ? "none" : listing(claim), join(claim.missing, " "));
}

void check_range(const Claim& claim) {
  const WorldSpec& spec = claim.spec;
  const bool ranks = spec.world_size >= 1 && spec.rank >= 0 && spec.rank < spec.world_size;
  const int64_t local_ranks = spec.local_world_size == 0 ? spec.world_size : spec.local_world_size;
  const bool locals = local_ranks >= 1 && local_ranks <= spec.world_size && spec.local_rank >= 0 &&
                      spec.local_rank < local_ranks;
  const bool port = spec.master_port >= (spec.world_size > 1 ? 1 : 0) && spec.master_port <= 65535;
  if (ranks && locals && port && spec.restart >= 0) return;
  throw ConfigError(
      "[plan.world] {} are out of range: {}; a rank must be 0 to size-1, a host cannot have "
      "more ranks than the world, and a port must be 1 to 65535",
      variables_of(claim), listing(claim));
}

/// Whether `chosen` may stand although `other` says something else. Our launcher starts nothing when it finds
/// itself in a job, so its word is final. Another launcher inside a launcher, such as torchrun under srun,
/// multiplies ranks; a smaller or equal world that differs is a mistake.
bool agree(const Claim& chosen, const Claim& other) {
  const WorldSpec &a = chosen.spec, &b = other.spec;
  if (a.launcher == "trireme") return true;
  const bool may_nest = chosen.innermost || b.launcher == "slurm";
  return (a.rank == b.rank && a.world_size == b.world_size) || (may_nest && a.world_size > b.world_size);
}

void check_agreement(const Claim& chosen, const Claim& other) {
  if (!other.missing.empty() || agree(chosen, other)) return;
  throw ConfigError(
      "[plan.world] two launchers disagree: {} says rank {} of {} ({}), {} says rank {} of {} ({}); unset "
      "the variables of the one that did not start this job",
      launcher_in_words(chosen.spec.launcher), chosen.spec.rank, chosen.spec.world_size, listing(chosen),
      launcher_in_words(other.spec.launcher), other.spec.rank, other.spec.world_size, listing(other));
}

/// srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE and leaves the rest to its own variables.
bool is_echo_of_slurm(const Claim& pmi, const MaybeClaim& slurm) {
  return slurm && slurm->missing.empty() && pmi.spec.launcher == "pmi" && pmi.spec.rank == slurm->spec.rank &&
         pmi.spec.world_size == slurm->spec.world_size && !pmi.missing.empty();
}

std::vector<Claim> claims_by_precedence(const Environment& environment) {
  const MaybeClaim slurm = claim_of_slurm(environment);
  std::vector<Claim> claims;
  for (const MaybeClaim& claim :
       {claim_of_env_ranks(environment), claim_of_openmpi(environment), claim_of_pmi(environment), slurm}) {
    if (claim && !is_echo_of_slurm(*claim, slurm)) claims.push_back(*claim);
  }
  return claims;
}

/// Part of every key in the store, which has a limit.
std::string job_key(const Environment& environment) {
  constexpr size_t kLongest = 256;
  std::string key = environment.get("TRIREME_JOB_KEY").value_or("");
  if (key.size() <= kLongest) return key;
  throw ConfigError("[plan.world] TRIREME_JOB_KEY has {} characters, but at most {} are allowed; use 32",
                    key.size(), kLongest);
}

}  // namespace

std::string launcher_in_words(const std::string& launcher) {
  return launcher == "unknown" ? "whoever set RANK and WORLD_SIZE" : launcher;
}

WorldSpec detect_world(const Environment& environment) {
  const std::vector<Claim> claims = claims_by_precedence(environment);
  if (claims.empty()) {
    if (const auto rank = environment.get("PMIX_RANK")) {
      throw ConfigError(
          "[plan.world] PMIX_RANK={} says that this is one of several processes, but not how many there are; "
          "start with mpirun, srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, "
          "MASTER_PORT",
          *rank);
    }
    return {.launcher = "none"};
  }
  const Claim& chosen = claims.front();
  check_complete(chosen);
  check_range(chosen);
  for (const Claim& other : claims) check_agreement(chosen, other);
  WorldSpec spec = chosen.spec;
  spec.job_key = job_key(environment);
  return spec;
}

}  // namespace trireme::plan
