#include "trireme/plan/signals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/signals_yaml.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

constexpr std::string_view kColumn = "_colpar", kRow = "_rowpar", kTo = "_to_", kStageWord = "stage";

std::string workers_text(const std::vector<int64_t>& workers) {
  return fmt::format("[{}]", fmt::join(workers, ", "));
}

/// The number of a name such as "pp_stage12"; none: it is that of no stage.
std::optional<int64_t> stage_number(std::string_view name) {
  if (name.find(kTo) != std::string_view::npos) return std::nullopt;
  const size_t digits = name.find_last_not_of("0123456789") + 1;
  if (digits == name.size() || !name.substr(0, digits).ends_with(kStageWord)) return std::nullopt;
  const std::string_view before = name.substr(0, digits - kStageWord.size());
  if (!before.empty() && before.back() != '_') return std::nullopt;
  return parse_whole_text<int64_t>(name.substr(digits));
}

/// The end of the name by which the signal of a product belongs to another one; empty: it is none.
std::string_view product_mark(std::string_view name) {
  for (const std::string_view mark : {kColumn, kRow}) {
    if (name.ends_with(mark)) return mark;
  }
  return {};
}
bool is_product(const Signal& entry) {
  const std::string_view mark = product_mark(entry.name);
  return !mark.empty() &&
         stage_number(std::string_view(entry.name).substr(0, entry.name.size() - mark.size())).has_value();
}
/// "A_to_B", where A or B is what a stage may be called.
bool is_boundary(const Signal& entry) {
  const std::string_view name = entry.name;
  const size_t at = name.find(kTo);
  if (at == std::string_view::npos) return false;
  return name.substr(0, at).find(kStageWord) != std::string_view::npos ||
         name.substr(at + kTo.size()).find(kStageWord) != std::string_view::npos;
}

/// Anything else is a scope of a program.
bool is_scope(const Signal& entry) {
  return !is_boundary(entry) && !is_product(entry) && !stage_number(entry.name);
}

/// Makes stages of entries, and the rest of Signals of stages.
class Builder {
 public:
  explicit Builder(std::vector<Signal> entries) { signals_.entries = std::move(entries); }

  Signals build() {
    fill_open_workers();
    find_stages();
    for (const Signal& entry : signals_.entries) {
      if (is_scope(entry)) note_scope(entry);
    }
    group_workers();
    add_boundaries();
    for (const Signal& entry : signals_.entries) check_backward(entry);
    return std::move(signals_);
  }

 private:
  /// A signal without workers has all that others name; those that belong to a stage get the stage's instead.
  void fill_open_workers() {
    std::set<int64_t> all;
    for (const Signal& entry : signals_.entries) all.insert(entry.workers.begin(), entry.workers.end());
    for (Signal& entry : signals_.entries) {
      if (!entry.workers.empty() || is_boundary(entry) || is_product(entry)) continue;
      entry.workers.assign(all.begin(), all.end());
      if (!all.empty() && stage_number(entry.name))
        signals_.notes.push_back(fmt::format("{}: '{}' has no workers of its own, so it has all: {}",
                                             entry.at, entry.name, workers_text(entry.workers)));
    }
  }

  const Signal* entry_of(std::string_view name) const {
    const auto found = std::ranges::find(signals_.entries, name, &Signal::name);
    return found == signals_.entries.end() ? nullptr : &*found;
  }

  std::vector<std::string> stage_names() const {
    std::vector<std::string> names;
    for (const Signal& entry : signals_.entries) {
      if (stage_number(entry.name)) names.push_back(entry.name);
    }
    return names;
  }

  void note_scope(const Signal& entry) {
    signals_.notes.push_back(fmt::format(
        "{}: '{}' is no stage (a name that ends with 'stage' and a number), no product of one (_colpar, "
        "_rowpar) and no boundary (A_to_B): a scope of programs of your own, which no mesh has",
        entry.at, entry.name));
  }

  void find_stages() {
    std::map<int64_t, const Signal*> by_number;
    for (const Signal& entry : signals_.entries) {
      const std::optional<int64_t> number = stage_number(entry.name);
      if (!number) continue;
      const auto [twin, is_new] = by_number.emplace(*number, &entry);
      if (!is_new) {
        throw ConfigError("[plan.signals] {}: '{}' and '{}' ({}) are both stage {}; give each its own number",
                          entry.at, entry.name, twin->second->name, twin->second->at, *number);
      }
    }
    for (const auto& [number, entry] : by_number) add_stage(number, *entry);
    for (const Signal& entry : signals_.entries) {
      const std::string_view mark = product_mark(entry.name);
      if (is_product(entry)) check_has_stage(entry, entry.name.substr(0, entry.name.size() - mark.size()));
    }
  }

  void add_stage(int64_t number, const Signal& entry) {
    if (number != std::ssize(signals_.stages)) {
      throw ConfigError("[plan.signals] {}: there is '{}', but no stage {}; number stages from 0 on",
                        entry.at, entry.name, std::ssize(signals_.stages));
    }
    if (entry.workers.empty()) {
      throw ConfigError("[plan.signals] {}: stage '{}' has no workers; write 'workers: [0, 1]'", entry.at,
                        entry.name);
    }
    if (entry.workers.size() > 1 && entry.placement != TensorPlacement::shard(0)) {
      throw ConfigError(
          "[plan.signals] {}: '{}' has its tensors {}, but activations between the layers of a stage are "
          "split by rows; use axis: 0",
          entry.at, entry.name,
          entry.placement.is_shard() ? fmt::format("split along axis {}", entry.placement.dim)
                                     : "on every worker");
    }
    signals_.stages.push_back({entry, product(entry, kColumn, 1), product(entry, kRow, 0)});
  }

  /// The signal of the products of `stage` whose name ends with `mark`: its entry, or what follows from the
  /// stage.
  Signal product(const Signal& stage, std::string_view mark, int64_t axis) const {
    const std::string name = stage.name + std::string(mark);
    Signal result{.name = name, .workers = stage.workers, .placement = TensorPlacement::shard(axis)};
    result.at = stage.at;
    const Signal* const entry = entry_of(name);
    if (entry == nullptr) return result;
    if (!entry->workers.empty() && entry->workers != stage.workers) {
      throw ConfigError(
          "[plan.signals] {}: {} has workers {}, but {} ({}) has {}; a stage's products are on "
          "its workers, in their order",
          entry->at, name, workers_text(entry->workers), stage.name, stage.at, workers_text(stage.workers));
    }
    if (entry->is_placed && stage.workers.size() > 1 && entry->placement != result.placement) {
      throw ConfigError(
          "[plan.signals] {}: {} must split weights along axis {}, which its name says; correct axis, or "
          "rename it",
          entry->at, name, axis);
    }
    result.backward = entry->backward;
    result.compile = entry->compile;
    result.at = entry->at;
    return result;
  }

  void check_has_stage(const Signal& entry, const std::string& stage) const {
    if (entry_of(stage) != nullptr) return;
    const std::string near = nearest_name(stage, stage_names());
    throw ConfigError("[plan.signals] {}: {} belongs to a stage '{}' that is not there{}", entry.at,
                      entry.name, stage,
                      near.empty() ? "; add it" : fmt::format(", did you mean '{}'?", near));
  }

  void group_workers() {
    for (SignalStage& stage : signals_.stages) {
      const auto found = std::ranges::find(signals_.groups, stage.all.workers);
      stage.place = found - signals_.groups.begin();
      if (found != signals_.groups.end()) continue;
      check_apart(stage);
      signals_.groups.push_back(stage.all.workers);
    }
    check_numbers();
    if (std::ssize(signals_.groups) > 1) find_placement();
  }

  /// The stage's workers are those of no other stage, for they are not the same list.
  void check_apart(const SignalStage& stage) const {
    for (const SignalStage& other : signals_.stages) {
      if (other.all.name == stage.all.name) return;
      for (const int64_t worker : stage.all.workers) {
        if (std::ranges::find(other.all.workers, worker) == other.all.workers.end()) continue;
        throw ConfigError(
            "[plan.signals] {}: worker {} is in '{}', {}, and in '{}', {} ({}); stages have the same list of "
            "workers, in the same order, or none in common",
            stage.all.at, worker, stage.all.name, workers_text(stage.all.workers), other.all.name,
            workers_text(other.all.workers), other.all.at);
      }
    }
  }

  void check_numbers() const {
    std::map<int64_t, std::string> stage_of;
    for (const SignalStage& stage : signals_.stages)
      for (const int64_t worker : stage.all.workers) stage_of.emplace(worker, stage.all.name);
    int64_t next = 0;
    for (const auto& [worker, name] : stage_of) {
      if (worker == next++) continue;
      throw ConfigError(
          "[plan.signals] worker {} is in no stage, but '{}' has worker {}; number workers from 0 on without "
          "gaps",
          next - 1, name, worker);
    }
  }

  void find_placement() {
    const int64_t ranks = std::ssize(signals_.groups), stages = std::ssize(signals_.stages);
    const auto all = [&](const auto& place_of_stage) {
      int64_t index = 0;
      return std::ranges::all_of(
          signals_.stages, [&](const SignalStage& stage) { return stage.place == place_of_stage(index++); });
    };
    if (stages % ranks == 0 && all([&](int64_t stage) { return stage % ranks; })) return;
    signals_.placement = Placement::kV;
    if (stages == 2 * ranks && all([&](int64_t stage) { return std::min(stage, stages - 1 - stage); }))
      return;
    throw ConfigError(
        "[plan.signals] {}: {} stages come back to {} lists of workers in an order that no schedule has; "
        "come "
        "back in the same order (0 1 0 1), or go there and back (0 1 1 0)",
        signals_.stages[static_cast<size_t>(ranks)].all.at, stages, ranks);
  }

  /// The stage that one end of a boundary's name means: its own name, or what follows its prefix.
  std::optional<int64_t> stage_called(std::string_view name) const {
    for (int64_t index = 0; index < std::ssize(signals_.stages); ++index) {
      const std::string& stage = signals_.stages[static_cast<size_t>(index)].all.name;
      if (stage == name || stage.ends_with(fmt::format("_{}", name))) return index;
    }
    return std::nullopt;
  }

  void add_boundaries() {
    for (int64_t next = 1; next < std::ssize(signals_.stages); ++next)
      signals_.boundaries.push_back({fmt::format("stage{}_to_stage{}", next - 1, next), next - 1, next});
    for (Signal& entry : signals_.entries) {
      if (is_boundary(entry)) declare(entry);
    }
  }

  void declare(Signal& entry) {
    const size_t at = entry.name.find(kTo);
    const std::string from_name = entry.name.substr(0, at), to_name = entry.name.substr(at + kTo.size());
    const std::optional<int64_t> from = stage_called(from_name), to = stage_called(to_name);
    if (!from || !to) {
      const std::string& missing = from ? to_name : from_name;
      std::vector<std::string> names = stage_names();
      for (const SignalStage& stage : signals_.stages)
        names.push_back(fmt::format("{}{}", kStageWord, *stage_number(stage.all.name)));
      const std::string near = nearest_name(missing, names);
      throw ConfigError(
          "[plan.signals] {}: {} is a boundary to or from '{}', which is no stage{}", entry.at, entry.name,
          missing,
          near.empty() ? "; add it, or rename the signal" : fmt::format(", did you mean '{}'?", near));
    }
    if (*to != *from + 1) {
      throw ConfigError(
          "[plan.signals] {}: {} leads from stage {} to stage {}, but a stage gives its output to the next "
          "one",
          entry.at, entry.name, *from, *to);
    }
    SignalBoundary& boundary = signals_.boundaries[static_cast<size_t>(*from)];
    if (boundary.declared) {
      throw ConfigError("[plan.signals] {}: {} is the boundary that '{}' is, too; remove one", entry.at,
                        entry.name, boundary.name);
    }
    const SignalStage& next = signals_.stages[static_cast<size_t>(*to)];
    if (!entry.workers.empty() && entry.workers != next.all.workers) {
      throw ConfigError("[plan.signals] {}: {} leads to workers {}, but {} ({}) has {}", entry.at, entry.name,
                        workers_text(entry.workers), next.all.name, next.all.at,
                        workers_text(next.all.workers));
    }
    if (entry.is_placed && next.all.workers.size() > 1 && entry.placement != next.all.placement) {
      throw ConfigError(
          "[plan.signals] {}: {} hands tensors over as {} ({}) has them, split by rows; leave out axis and "
          "replicated",
          entry.at, entry.name, next.all.name, next.all.at);
    }
    entry.workers = next.all.workers;
    boundary.name = entry.name;
    boundary.declared = true;
  }

  /// Gradients lie where the values do: on the same workers.
  void check_backward(const Signal& entry) const {
    if (entry.backward.empty()) return;
    const Signal* const found = signals_.find(entry.backward);
    if (found == nullptr) {
      std::vector<std::string> names;
      for (const Signal& other : signals_.entries) names.push_back(other.name);
      const std::string near = nearest_name(entry.backward, names);
      throw ConfigError("[plan.signals] {}: backward of {} is '{}', which is no signal{}", entry.at,
                        entry.name, entry.backward,
                        near.empty() ? "; add it" : fmt::format(", did you mean '{}'?", near));
    }
    const Signal* const self = signals_.find(entry.name);
    if (found->workers == self->workers || is_boundary(entry)) return;
    throw ConfigError(
        "[plan.signals] {}: gradients of {} are to follow '{}' ({}), which has workers {}, not {}", entry.at,
        entry.name, found->name, found->at, workers_text(found->workers), workers_text(self->workers));
  }

  Signals signals_;
};

}  // namespace

int64_t Signals::workers() const {
  int64_t count = 0;
  for (const std::vector<int64_t>& group : groups) count += std::ssize(group);
  return count;
}

std::vector<const Signal*> Signals::scopes() const {
  std::vector<const Signal*> found;
  for (const Signal& entry : entries) {
    if (is_scope(entry)) found.push_back(&entry);
  }
  return found;
}

const Signal* Signals::find(std::string_view name) const {
  for (const SignalStage& stage : stages) {
    for (const Signal* signal : {&stage.all, &stage.column, &stage.row})
      if (signal->name == name) return signal;
  }
  const auto found = std::ranges::find(entries, name, &Signal::name);
  return found == entries.end() ? nullptr : &*found;
}

Signals read_signals(const std::string& text, const std::string& name) {
  return Builder(read_entries(text, name)).build();
}

Signals load_signals(const std::string& path) {
  constexpr size_t kMostSignalBytes = size_t{1} << 20;
  return read_signals(read_text_file(path, kMostSignalBytes), path);
}

std::string mesh_obstacle(const Signals& signals) {
  if (signals.stages.empty()) return "it has no stages: names that end with 'stage' and a number";
  for (const SignalStage& stage : signals.stages) {
    const SignalStage& first = signals.stages.front();
    if (stage.all.workers.size() == first.all.workers.size()) continue;
    return fmt::format("{} has {} workers and {} has {}; in a mesh all have as many", first.all.name,
                       first.all.workers.size(), stage.all.name, stage.all.workers.size());
  }
  int64_t rank = 0;
  for (const std::vector<int64_t>& group : signals.groups) {
    for (const int64_t worker : group) {
      if (worker == rank++) continue;
      return fmt::format(
          "worker {} is where a mesh has rank {}; list workers 0, 1, 2, ... from stage to stage", worker,
          rank - 1);
    }
  }
  return {};
}

std::vector<std::string> config_keys(const Signals& signals, int64_t tp) {
  const int64_t pp = std::ssize(signals.groups), chunks = signals.chunks();
  std::vector<std::string> keys = {fmt::format("parallel.tp={}", tp), fmt::format("parallel.pp={}", pp)};
  if (pp == 1 || chunks == 1) return keys;
  if (signals.placement == Placement::kV) {
    keys.push_back(fmt::format("pipeline.schedule={}", ScheduleName::kZbV));
  } else {
    keys.push_back(fmt::format("pipeline.schedule={}", ScheduleName::kInterleaved1F1B));
    keys.push_back(fmt::format("pipeline.chunks={}", chunks));
  }
  return keys;
}

}  // namespace trireme::plan
