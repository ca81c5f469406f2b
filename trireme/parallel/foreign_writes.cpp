// What others do to the module's parameters while the engine has them, and what becomes of them when it ends.
#include <ATen/ATen.h>

#include <exception>

#include "trireme/base/log.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {

void DataParallel::take_writes() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    FlatUnit& flat = *units_[unit];
    for (size_t param = 0; param < flat.params().size(); ++param) {
      if (flat.is_in_place(param)) continue;
      completion_.follow(unit, param);  // a graph may have been made since
      flat.take_replaced(param);
      completion_.follow(unit, param);
      if (params_marked_) touch_->mark(flat.params()[param].second, unit);
    }
    flat.take_writes();
  }
}

void DataParallel::load_values(const std::function<bool(const std::string&)>& select,
                               const Initializer& values) {
  bool all = true;
  for (const auto& unit : units_) {
    for (size_t param = 0; param < unit->params().size(); ++param) {
      const bool selected = select(unit->params()[param].first);
      if (selected) unit->load(param, values);
      all = all && selected;
    }
  }
  if (all) steps_apart_ = 0;
}

/// A rank that ends by an exception cannot count on the others, so it gathers nothing.
void DataParallel::give_back() noexcept {
  const bool unwinds = std::uncaught_exceptions() > unwinding_;
  std::string reason =
      "were sharded when an exception ended the engine, so they could not be gathered; load saved "
      "weights into the module (state::load_weights)";
  bool gathers = !unwinds && broken_.empty();
  try {
    if (gathers) notice_update();
  } catch (const std::exception& error) {
    log_warning("[parallel.data_parallel] rank {}: the last update did not reach the other ranks: {}",
                mesh_.world->rank(), error.what());
    gathers = false;
  }
  touch_.reset();  // parameters are the module's from here on
  for (const auto& unit : units_) {
    try {
      unit->give_back(gathers);
    } catch (const std::exception& error) {
      reason = fmt::format("were sharded when the engine ended and could not be gathered: {}", error.what());
      log_warning("[parallel.data_parallel] rank {}: parameters of unit {} {}", mesh_.world->rank(),
                  unit->name(), reason);
      gathers = false;
    }
    unit->refuse_use(reason);
  }
}

}  // namespace trireme::parallel
