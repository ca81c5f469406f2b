#pragma once
// Where each parameter of a model lies: its stage, the part that a rank along tp has of it, and the elements
// whose master and optimizer state are a rank's own.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/region.h"
#include "trireme/plan/unit_buffers.h"

namespace trireme::plan {

/// A parameter, or the part of it that a rank has.
struct HeldParameter {
  std::string name, unit;  ///< Hugging Face's name, and that of the unit it is gathered with
  Shape whole, held;       ///< shapes
  int64_t stage = 0;
  std::optional<int64_t> cut = {};  ///< the dimension along which ranks have parts; none: all is here
  /// The places that are held of that dimension: the same in each of `packed` matrices side by side in it.
  Range part = {};
  int64_t packed = 1;
  int64_t copies = 1;  ///< ranks along tp that hold these same elements
  Range updated = {};  ///< elements of what is held, in row-major order, that this rank updates
  /// Between steps: parameters, masters and optimizer state; gradients come on top.
  int64_t bytes = 0;
};

/// The place of global rank `rank` among the ranks over which the engine of its stages works. `setting` is
/// the engine's, in a pipeline as setting_in_stages() has it.
int64_t place_in_engine(const MeshShape& mesh, const EngineSetting& setting, int64_t rank);

/// Those of global rank `rank`, in the order of its stages and units. `pipeline`: of plan_pipeline(); it is
/// ignored where the config has none. memory.recompute=auto changes nothing here. `device` is kCpu or kCuda.
std::vector<HeldParameter> held_parameters(const Config& config, const MeshShape& mesh,
                                           const PipelinePlan& pipeline, Device device, int64_t rank);

}  // namespace trireme::plan
