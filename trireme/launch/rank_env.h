#pragma once
// The environment variables that tell a rank its place in the job; plan::detect_world reads them. Pure.
#include <cstdint>
#include <string>

#include "trireme/base/env.h"

namespace trireme::launch {

struct RankPlace {
  int64_t rank = 0;
  int64_t ranks = 1;
  int64_t port = 0;          ///< of the rendezvous socket on 127.0.0.1
  int listen_fd = -1;        ///< that socket, for rank 0
  int64_t threads = 1;       ///< OMP_NUM_THREADS unless `base` sets it
  std::string job_key = {};  ///< random, equal for all ranks of a job; empty: none
  int tty_fd = -1;           ///< the terminal that shows this rank's stderr as it comes; -1: none
  int out_tty_fd = -1;       ///< the terminal that shows its stdout; -1: none
  int flight_fd = -1;        ///< the launcher's FlightRecord; -1: none
};

/// `base` with the variables of the rank. What an outer launcher left there and would contradict it is
/// removed.
Environment rank_environment(const Environment& base, const RankPlace& place);

}  // namespace trireme::launch
