#pragma once
// Signals: names of scopes in a program, and in a YAML file the workers on which the tensors of each scope
// lie. Where the names are those of the stages of a pipeline, the file describes a mesh, and everything that
// is known of a mesh beforehand is known of the file.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/choices.h"
#include "trireme/plan/placement.h"

namespace trireme::plan {

/// An entry of the file.
struct Signal {
  std::string name;
  std::vector<int64_t> workers =
      {};  ///< in the order of the parts that they have; empty: the file names none
  TensorPlacement placement = TensorPlacement::shard(0);  ///< of the scope's tensors on them
  bool is_placed = false;                                 ///< the file says how
  std::string backward = {};  ///< the signal that gradients follow; empty: this one
  bool compile = false;       ///< the scope's operations are compiled together
  std::string at = {};        ///< "signals.yaml:3:1"
};

/// Layers that lie on the same workers. Products of a column-parallel signal split the weight's second
/// dimension, those of a row-parallel one its first.
struct SignalStage {
  Signal all, column, row;
  int64_t place = 0;  ///< of its workers in Signals::groups: the rank of the pipeline
};

/// From a stage to the next one.
struct SignalBoundary {
  std::string name;
  int64_t from = 0, to = 0;  ///< stages
  bool declared = false;     ///< the file has an entry of the name
};

struct Signals {
  std::vector<Signal> entries;      ///< of the file, in its order
  std::vector<SignalStage> stages;  ///< by number; none: the file has scopes alone
  /// The lists of workers that stages have, in the order of the stages. Stages with one list are chunks of
  /// one rank.
  std::vector<std::vector<int64_t>> groups;
  Placement placement = Placement::kLoop;  ///< of the stages on the groups: kLoop or kV
  std::vector<SignalBoundary> boundaries;
  std::vector<std::string> notes = {};  ///< a sentence each, about what may not be meant

  /// Stages of each group.
  int64_t chunks() const { return groups.empty() ? 0 : std::ssize(stages) / std::ssize(groups); }
  /// Workers of stages; they are numbered from 0 on.
  int64_t workers() const;
  /// Entries that are no stage, no product of one and no boundary.
  std::vector<const Signal*> scopes() const;
  /// The entry, or the column- or row-parallel signal of a stage, that has this name; none: there is none.
  const Signal* find(std::string_view name) const;
};

/// Reads such a text, which `name` stands for in messages. A name that ends with "stage" and a number is that
/// of a stage; S_colpar and S_rowpar belong to stage S and have its workers unless they have an entry;
/// A_to_B is a boundary. Throws ConfigError with line and column for unknown keys, workers and placements
/// that cannot be, stages that share only some of their workers, and stages that return to workers in an
/// order that no schedule has.
Signals read_signals(const std::string& text, const std::string& name);
/// Reads the file. Throws as read_signals() and read_text_file().
Signals load_signals(const std::string& path);

/// Why the file is no mesh of ranks; empty: it is one, along tp and pp.
std::string mesh_obstacle(const Signals& signals);
/// The sections and values that a config needs for the mesh of a pipeline of so many ranks along tp:
/// "parallel.tp=2", "parallel.pp=4", and the schedule where stages are chunks.
std::vector<std::string> config_keys(const Signals& signals, int64_t tp);

}  // namespace trireme::plan
