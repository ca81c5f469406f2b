#pragma once
// A line an instruction, for people and for grep: what it is, where it stands in the program, who does it,
// how its results are placed, and the bytes that move. Private to gt/*.cpp.
#include <fstream>
#include <string>
#include <vector>

#include "trireme/plan/placer.h"

namespace gt {

class InstructionLog {
 public:
  /// Throws trireme::EnvironmentError for a file that cannot be written.
  explicit InstructionLog(const std::string& path);

  void write(const std::string& place, const std::string& instruction,
             const trireme::plan::PlacedInstruction& placed, const std::vector<int64_t>& workers);
  void error(const std::string& what);

 private:
  std::ofstream file_;
  int64_t lines_ = 0;
};

/// The instructions as workers get them, in the text of plan/instruction.h.
class ProgramFile {
 public:
  /// Throws trireme::EnvironmentError for a file that cannot be written.
  explicit ProgramFile(const std::string& path);
  /// Says where the file could not take all.
  ~ProgramFile();
  ProgramFile(const ProgramFile&) = delete;
  ProgramFile& operator=(const ProgramFile&) = delete;

  void add_signal(const std::string& name, const std::vector<int64_t>& workers);
  void add_dataset(const trireme::plan::DatasetSpec& dataset);
  void write(const trireme::plan::Instruction& one, const std::vector<std::string>& signals);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace gt
