#pragma once
// `trireme train` as a program of one's own, with its data, metrics and callbacks (docs/guide/own_data.md).
#include "trireme/train/program.h"

namespace trireme::cli {

/// All that main() of such a program does: it takes the words of `trireme train`, from a shell as under
/// `trireme launch`, torchrun, srun or mpirun, and does what that command does. Where program.open_data is
/// set, data.path is "program" unless the config, a flag or the run that goes on names data. The command
/// `trireme` is looked for where TRIREME_COMMAND says, beside this program and in PATH; it starts this
/// program again as ranks. To be called before the program makes threads. Returns an exit code, or ends the
/// process itself.
int train_main(int argc, char** argv, const train::Program& program);

}  // namespace trireme::cli
