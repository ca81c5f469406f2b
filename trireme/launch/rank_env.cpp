#include "trireme/launch/rank_env.h"

#include <string>

namespace trireme::launch {
namespace {

constexpr const char* kLeftByOuterLaunchers[] = {"TRIREME_LISTEN_FD",
                                                 "TRIREME_TTY_FD",
                                                 "TRIREME_OUT_TTY_FD",
                                                 "TRIREME_FLIGHT_FD",
                                                 "TRIREME_FORK_SERVER_FD",
                                                 "TRIREME_JOB_KEY",
                                                 "GROUP_RANK",
                                                 "GROUP_WORLD_SIZE",
                                                 "ROLE_RANK",
                                                 "ROLE_WORLD_SIZE",
                                                 "TORCHELASTIC_RUN_ID",
                                                 "TORCHELASTIC_USE_AGENT_STORE",
                                                 "TORCHELASTIC_RESTART_COUNT"};

}  // namespace

Environment rank_environment(const Environment& base, const RankPlace& place) {
  Environment made = base;
  for (const char* name : kLeftByOuterLaunchers) made.unset(name);
  const std::string rank = std::to_string(place.rank), ranks = std::to_string(place.ranks);
  made.set("TRIREME_LAUNCHER", "trireme");
  made.set("RANK", rank);
  made.set("LOCAL_RANK", rank);
  made.set("WORLD_SIZE", ranks);
  made.set("LOCAL_WORLD_SIZE", ranks);
  made.set("MASTER_ADDR", "127.0.0.1");
  made.set("MASTER_PORT", std::to_string(place.port));
  if (!place.job_key.empty()) made.set("TRIREME_JOB_KEY", place.job_key);
  if (place.listen_fd >= 0) made.set("TRIREME_LISTEN_FD", std::to_string(place.listen_fd));
  if (place.tty_fd >= 0) made.set("TRIREME_TTY_FD", std::to_string(place.tty_fd));
  if (place.out_tty_fd >= 0) made.set("TRIREME_OUT_TTY_FD", std::to_string(place.out_tty_fd));
  if (place.flight_fd >= 0) made.set("TRIREME_FLIGHT_FD", std::to_string(place.flight_fd));
  if (!made.get("OMP_NUM_THREADS")) made.set("OMP_NUM_THREADS", std::to_string(place.threads));
  return made;
}

}  // namespace trireme::launch
