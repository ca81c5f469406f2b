#pragma once
// Tensors of a program in files, and back, so that a program goes on after a lost worker. A file is one of
// safetensors with whole tensors under their names: it does not say where they lay, and any mesh can load it.
// Values pass the client, one tensor after the other when they are saved. Ranks of a
// controller::RankProgram all call these functions.
#include <cstdint>
#include <string>

#include "trireme/gt/nn.h"

namespace gt {

/// Writes the tensors; the file is there complete, in place of an earlier one, or not at all. What is not on
/// workers yet stays so. Throws trireme::ConfigError for names that are empty, used twice or begin with
/// "optimizer.", a tensor with two names, and within gt::schedule(); EnvironmentError where the disk fails;
/// CommError where a worker is lost.
void save(const std::string& path, const nn::NamedTensors& named,
          source_location where = source_location::current());
/// Gives the tensors the file's values. Each stays where it lies and whose it is; one that is not on workers
/// yet is made of them where it is first used. What an optimizer kept is left in the file. Throws as save(),
/// EnvironmentError where there is no file, DataError for damage, for names that only one side has, and for
/// other shapes and dtypes, ConfigError for a tensor whose memory another one shares; then nothing has
/// changed.
void load(const std::string& path, const nn::NamedTensors& named,
          source_location where = source_location::current());

/// Writes also what the optimizer keeps, as "optimizer.exp_avg.NAME", the updates of each parameter, as
/// "optimizer.step.NAME", the number of steps done, and the seed of the next randn(). Throws as save(), and
/// ConfigError where a parameter of the optimizer is not among the named.
void save_training(const std::string& path, const nn::NamedTensors& named, const Optimizer& optimizer,
                   int64_t step, source_location where = source_location::current());
/// Takes all of it back and returns the number of steps done. Rates stay those of the program. Throws as
/// load(), and DataError where the file is of another optimizer or of none.
int64_t load_training(const std::string& path, const nn::NamedTensors& named, Optimizer& optimizer,
                      source_location where = source_location::current());

}  // namespace gt
