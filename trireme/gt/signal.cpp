#include "trireme/gt/signal.h"

#include "trireme/gt/program.h"

namespace gt {

namespace signal {

context::context(const std::string& name) {
  const std::shared_ptr<Program> program = Program::current();
  program->enter(program->signal_named(name));
}

context::~context() {
  if (Program::exists()) Program::current()->leave();
}

}  // namespace signal

Tensor here(const Tensor& x, source_location where) {
  const std::shared_ptr<Program> program = Program::current();
  if (program->scope() == trireme::plan::Instruction::kNoSignal) return x;
  return Tensor(program->cross(x.node(), program->scope(), where));
}

}  // namespace gt
