#pragma once
// The memory of a controller's program, from its instructions alone.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/instruction.h"

namespace trireme::plan {

/// Numbers the workers that signals name anew, from 0 on without gaps; returns how many they are.
int64_t number_workers(Program& program);

/// The bytes of tensors that each of the workers has at once, at most: those that the program has made and
/// not freed, as they are placed, with collected gradients once they are taken. What operations keep for
/// backward passes is not among them. Throws ConfigError as Placer does, with the number of the instruction
/// in the program called `name`.
std::vector<int64_t> program_bytes(const Program& program, int64_t workers, const std::string& name,
                                   bool is_explicit = false);

}  // namespace trireme::plan
