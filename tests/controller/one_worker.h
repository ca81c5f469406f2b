#pragma once
// A program whose only worker is this process.
#include <functional>
#include <memory>

#include "tests/support/spawn.h"
#include "trireme/controller/worker_ranks.h"
#include "trireme/gt/workers.h"

namespace trireme {

/// Calls the body in a program of one rank.
inline void with_one_worker(const std::function<void()>& body) {
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const gt::Workers workers(std::make_shared<controller::RankProgram>(world), {});
    body();
  });
}

}  // namespace trireme
