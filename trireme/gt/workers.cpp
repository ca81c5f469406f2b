#include "trireme/gt/workers.h"

#include "trireme/gt/program.h"

namespace gt {

Workers::Workers(std::shared_ptr<Session> session, const Options& options) : session_(std::move(session)) {
  std::optional<trireme::plan::Signals> signals;
  if (!options.signals.empty()) signals = trireme::plan::load_signals(options.signals);
  Program::make_current(
      std::make_shared<Program>(session_, signals, options.is_explicit, options.auto_shard));
}

Workers::~Workers() {
  Program::make_current(nullptr);
}

void Workers::flush() {
  Program::current()->flush();
}

}  // namespace gt
