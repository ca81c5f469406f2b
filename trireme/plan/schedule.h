#pragma once
// Pipeline schedules as data: for each rank the forward and backward passes of its stages in their order.
// Where a pass waits for another rank follows from the order (plan/simulate.h); nothing here runs.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/action_kind.h"
#include "trireme/plan/choices.h"

namespace trireme::plan {

/// One pass of one stage for one micro-batch.
struct StagePass {
  ActionKind kind = ActionKind::kForward;  ///< one of kPassKinds
  int64_t stage = 0;
  int64_t micro_batch = 0;
  /// A forward and a backward pass that may overlap: this one and the next of the rank.
  bool with_next = false;
  bool operator==(const StagePass&) const = default;
};

struct PipelineShape {
  int64_t ranks = 1;
  int64_t micro_batches = 1;
  int64_t chunks = 1;  ///< stages a rank, of schedules that leave it open
};

struct Schedule {
  std::string name;
  Placement placement = Placement::kLoop;
  int64_t stages = 1;
  int64_t micro_batches = 1;
  std::vector<std::vector<StagePass>> ranks;  ///< passes of each rank in their order
  /// Every rank has a part of the vocabulary (spread_head.h): stages `stages` to all_stages(), one a rank.
  bool spread_head = false;

  /// With the parts of a head that is spread.
  int64_t all_stages() const { return stages + (spread_head ? static_cast<int64_t>(ranks.size()) : 0); }
  bool is_head_part(int64_t stage) const { return stage >= stages; }

  /// The rank that runs `stage` (below all_stages()) for `micro_batch`. The micro-batch only matters where
  /// two ranks have a copy of the stage (Placement::kTwoWays).
  int64_t rank_of(int64_t stage, int64_t micro_batch) const;
  /// The rank of each stage but parts of the head; where two ranks have a copy, the lower one.
  std::vector<int64_t> ranks_of_stages() const;
  /// The stages that `rank` has for any micro-batch, in rising order, its part of a head that is spread
  /// included.
  std::vector<int64_t> stages_of(int64_t rank) const;
  /// Stages whose weights a rank holds, without its part of the head; two copies count twice.
  int64_t stages_per_rank() const {
    return placement == Placement::kTwoWays ? 2 : stages / static_cast<int64_t>(ranks.size());
  }
};

/// The forward passes alone of so many micro-batches, through the same stages on the same ranks: as many as
/// there are ranks go through a rank's stage before the next ones do.
Schedule forward_only(const Schedule& schedule, int64_t micro_batches);

/// A line that describes the schedule and names its source.
std::string_view summary(ScheduleName name);
/// Throws ConfigError for more than a million forward passes, which no step has: before there is memory for
/// them.
void check_size(int64_t stages, int64_t micro_batches);
/// Throws ConfigError that says which numbers of micro-batches, ranks and chunks the schedule takes.
Schedule make_schedule(ScheduleName name, const PipelineShape& shape);
/// Whether it leaves open how many stages a rank has.
bool takes_chunks(ScheduleName name);

/// The schedule for `window` micro-batches at a time, one window behind the other: no rank has more of them
/// in flight, and shallow windows cost bubbles. Throws ConfigError when windows do not divide the
/// micro-batches, and as make_schedule().
Schedule make_windowed_schedule(ScheduleName name, const PipelineShape& shape, int64_t window);

/// "2F3": forward of stage 2 for micro-batch 3; F, B, I (backward for the input) and W (for the weights);
/// passes that overlap are joined by "+".
std::string to_text(const StagePass& pass);
/// One line a rank, passes divided by commas, as PyTorch writes the compute part of its schedules.
std::string to_csv(const Schedule& schedule);
/// Reads to_csv(), blanks and empty cells ignored. Throws ConfigError with line and cell. The number of
/// stages and micro-batches is one more than the largest that occurs.
Schedule from_csv(std::string_view text, Placement placement, std::string name);

}  // namespace trireme::plan
