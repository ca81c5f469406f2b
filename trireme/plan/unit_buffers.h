#pragma once
// Which flat buffers a rank keeps for a unit, which are parts of others, and which keep their memory from
// step to step. The engine allocates by it, and the step program counts by it.
#include <cstdint>
#include <optional>

#include "trireme/plan/config.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/policy.h"

namespace trireme::plan {

/// How the engine learns that a unit is about to be used.
enum class UseFrom {
  kRunUnit,    ///< the module calls run_unit() around each unit
  kOperators,  ///< operators that touch its parameters
  kBuckets     ///< units do not follow the module's structure; all stay unsharded in forward and backward
};

/// The settings of the data-parallel engine, but for the units that it works on.
struct EngineSetting {
  Policy policy;
  MeshShape mesh;
  int64_t compute_bytes = 4;     ///< of a parameter: 4 (fp32) or 2 (bf16)
  int64_t wire_bytes = 4;        ///< of a gradient in flight
  bool wire_as_computed = true;  ///< gradients travel in the dtype of computation
  int64_t moments = 64;          ///< bytes of optimizer state of 8 elements: plan::state_bytes_of_block()
  int64_t accumulation = 1;      ///< micro-batches a step
  bool reduces_once = true;      ///< a step; else after every micro-batch
  bool sums_in_fp32 = true;      ///< gradients of micro-batches; else in the dtype of computation
  CommHook hook = CommHook::kNone;
  Reduction reduction = Reduction::kOrdered;
  int64_t prefetch =
      1;                ///< units that are unsharded ahead of the one in use, where communication runs beside
  bool beside = false;  ///< communication runs beside computation
  UseFrom use_from = UseFrom::kRunUnit;
  bool stays = false;  ///< whole parameters and gradients keep their memory, for passes that are recorded
  Device device = Device::kCpu;  ///< or kCuda

  int64_t shard_ranks() const { return policy.shard_ranks(mesh); }
  int64_t replicas() const { return mesh.dp_size() / shard_ranks(); }
  bool shards_parameters() const { return policy.shard_parameters && shard_ranks() > 1; }
  /// Whether parameters come and go: they are sharded, and gathered when they are used.
  bool gathers() const { return shards_parameters() && !stays; }
  bool reduces_locally() const { return hook == CommHook::kLocalSgd; }
  /// Whether fp32 sums of micro-batches become gradients of the dtype of computation again, in which they
  /// travel.
  bool copies_sum() const { return wire_as_computed && !reduces_locally(); }
  /// Whether this rank has no others to reduce with: its gradients are used as they are.
  bool alone() const {
    return mesh.dp_size() == 1 && reduces_once && hook == CommHook::kNone && wire_as_computed &&
           wire_bytes == compute_bytes;
  }
  /// Whether ranks that update all of a unit gather its sum.
  bool gathers_sum() const { return !policy.shard_optimizer && shard_ranks() > 1 && !reduces_locally(); }
  /// Whether the ranks of a shard gather what each has updated.
  bool gathers_update() const { return policy.shard_optimizer && !gathers() && shard_ranks() > 1; }
};

/// As config says, on a device of the kind `device` (kCpu or kCuda). Throws ConfigError as resolve_policy().
EngineSetting engine_setting(const Config& config, const MeshShape& mesh, int64_t accumulation,
                             Device device = Device::kCpu);

/// A unit whose matrices travel in FP8 where parameters are gathered (UnitSpec::fp8_block).
struct Fp8Unit {
  int64_t rest = 0;  ///< elements of its other parameters, norms and biases, which stay whole
  bool operator==(const Fp8Unit&) const = default;

  /// Numbers that a rank sends the others after an update, four bytes each: magnitudes of its parts of
  /// matrices, and its part of the rest.
  int64_t exchanged() const { return kBlockLayers + rest; }
};
/// A unit's matrices in FP8; none: all of it travels in the dtype of computation, as where some of it is
/// frozen for good, which leaves no master to cast from.
std::optional<Fp8Unit> fp8_unit(const UnitSpec& unit);

/// A unit of which some parameters are held in four bits.
struct Nf4Unit {
  int64_t rest =
      0;  ///< elements of its other frozen parameters, which stay whole in the dtype of computation
  bool operator==(const Nf4Unit&) const = default;
};
/// None: all that is frozen is held in the dtype of computation.
std::optional<Nf4Unit> nf4_unit(const UnitSpec& unit);

/// How a rank lays out the buffers of a unit. Sizes are in elements unless their name says bytes.
struct UnitBuffers {
  /// `numel` is that of the unit's flat layout, `frozen` that of its frozen_layout(), padding included.
  UnitBuffers(int64_t numel, const EngineSetting& setting, const std::optional<Fp8Unit>& fp8 = {},
              int64_t frozen = 0, const std::optional<Nf4Unit>& nf4 = {});

  int64_t whole, shard;
  int64_t updated;                ///< the range that this rank's optimizer has: the shard, or all
  bool parameters_come_and_go;    ///< whole parameters have memory from unshard to reshard
  bool keeps_shard;               ///< what is gathered lies beside the whole parameters
  bool master_in_parameters;      ///< the fp32 master is a part of the whole parameters
  bool master_is_shard;           ///< the fp32 master is what is gathered
  bool gradients_stay;            ///< whole gradients have memory at all times
  bool reduced_in_gradients;      ///< the reduced gradient is a part of the whole one
  bool reduced_comes_and_goes;    ///< it has memory from its reduction to the next use of the parameters
  bool sums_micro_batches_apart;  ///< added up in an fp32 buffer, since gradients are of another dtype
  bool in_fp8;                    ///< parameters come and go, matrices of them as bytes of FP8
  int64_t whole_bytes;            ///< of the parameters that come and go, or that stay
  int64_t shard_bytes;            ///< of what a rank keeps to be gathered
  int64_t exchanged_bytes;        ///< by all ranks of a shard, before the first gather after an update
  /// Bytes of parameters that are frozen for good: whole, and of the shard that a rank keeps where
  /// keeps_shard. They come and go with the others. In four bits the rest of Nf4Unit belongs to what stays:
  /// the shard, or what is whole at all times.
  int64_t frozen_bytes, frozen_shard_bytes;
};

}  // namespace trireme::plan
