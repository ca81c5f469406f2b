#pragma once
// Collectives of ranks that map each other's memory: a rank reads the inputs of the others in place, and no
// messages are sent. Internal to this room; BackendGroup uses it for the operations that it serves.
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme::comm {

/// Arguments are checked by the caller. On a CPU operations throw std::runtime_error when a peer is gone, or
/// "Timed out"; Disagreement when ranks do different things. On a GPU they are enqueued on the current
/// stream, and check() throws.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  /// Whether this operation can read the inputs of all ranks. All ranks that call the same operation get the
  /// same answer.
  virtual bool serves(plan::Collective kind, const at::Tensor& input) const = 0;
  /// As Group's operations of the same names.
  virtual void all_gather(at::Tensor& output, const at::Tensor& input) = 0;
  virtual void reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) = 0;
  virtual void barrier() = 0;
  /// Bytes that operations have copied out of other ranks' memory; on a GPU, that they have enqueued to copy.
  virtual int64_t moved_bytes() const = 0;
  /// Names the next operation in words. Operations throw Disagreement when the names of two ranks differ.
  virtual void announce(std::string_view operation) = 0;
  /// Throws Disagreement when an operation on a GPU has found one.
  virtual void check() const {}
  /// The host waits until enqueued operations are done, so that their memory may be freed. Does not throw.
  virtual void finish() {}
  /// Ends operations that wait for other ranks, also those under way on a GPU.
  virtual void stop() {}

  /// Sends `mine` to all ranks of the group and returns their texts by group rank.
  using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;
  /// (count) in memory whose contents other ranks can read; undefined where operations serve all memory.
  /// Collective.
  virtual at::Tensor allocate(int64_t count, c10::ScalarType dtype, const Exchange& exchange) = 0;
  /// Device memory held by allocate().
  virtual int64_t allocated_bytes() const { return 0; }
};

/// The ranks of a group have called different operations; what() names them.
class Disagreement : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What a rank tells the others so that they can map its memory. Shared memory has no name in a file system:
/// the kernel frees it when the last process that maps it ends.
class MemoryOffer {
 public:
  virtual ~MemoryOffer() = default;
  virtual std::string text() const = 0;
  /// Maps the memory of all ranks; `offers` are their texts by group rank. Returns none when the memory of a
  /// rank cannot be mapped; then no rank of the group may use peer memory.
  virtual std::unique_ptr<PeerMemory> accept(const std::vector<std::string>& offers, double timeout_s) = 0;
};

/// For ranks on CPUs: shared memory of one host.
std::unique_ptr<MemoryOffer> offer_host_memory(int64_t rank, int64_t size);
/// For ranks on GPUs of one host: GPU memory that is mapped into the other processes.
std::unique_ptr<MemoryOffer> offer_gpu_memory(int64_t rank, int64_t size, c10::Device device,
                                              const PeerOptions& options);
/// The one of the two for `device`.
inline std::unique_ptr<MemoryOffer> offer_memory(int64_t rank, int64_t size, c10::Device device,
                                                 const PeerOptions& options) {
  return device.is_cpu() ? offer_host_memory(rank, size) : offer_gpu_memory(rank, size, device, options);
}

}  // namespace trireme::comm
