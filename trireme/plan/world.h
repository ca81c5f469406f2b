#pragma once
// Who started this process and as which rank: read from the variables of our launcher, torchrun, OpenMPI,
// MPICH/PMI or Slurm. Pure: takes the environment as a value.
#include <cstdint>
#include <optional>
#include <string>

#include "trireme/base/env.h"

namespace trireme::plan {

struct WorldSpec {
  /// "trireme", "torchrun", "openmpi", "pmi", "slurm", "none", or "unknown": RANK and WORLD_SIZE are set, and
  /// nothing says by whom.
  std::string launcher;
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t local_rank = 0;        ///< index among the ranks of this host: picks the GPU
  int64_t local_world_size = 1;  ///< ranks of this host; 0: the launcher did not say
  std::string master_addr = "127.0.0.1";
  int64_t master_port = 0;
  bool agent_store = false;  ///< torchrun's agent hosts the store: every rank connects as a client
  std::string job_key = {};  ///< begins all keys in the store: TRIREME_JOB_KEY, the same on every rank
  int64_t restart = 0;       ///< prefixes store keys, so that a restarted job meets no stale ones
  int64_t listen_fd = -1;    ///< a listening socket inherited from our launcher, rank 0 only

  /// The least number of ranks on this host: what the launcher says, else this rank and those before it.
  int64_t ranks_here() const { return local_world_size > 0 ? local_world_size : local_rank + 1; }
};

/// Reads the world. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are enough. Precedence: trireme
/// and torchrun (RANK, WORLD_SIZE, ...) > OpenMPI > PMI > Slurm. Throws ConfigError when variables are half
/// set (listing which are missing), out of range, or when two launchers disagree (listing both sets). Without
/// any hint of a launcher the result is a world of one, launcher "none".
WorldSpec detect_world(const Environment& environment);

/// Who started a rank, for messages: the launcher's name, or "whoever set RANK and WORLD_SIZE".
std::string launcher_in_words(const std::string& launcher);

/// "node[01-03,07],gpu5" -> its first host. Throws ConfigError on malformed lists.
std::string first_host_of_nodelist(const std::string& nodelist);

}  // namespace trireme::plan
