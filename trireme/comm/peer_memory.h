#pragma once
// A second way to move bytes, where ranks can reach each other's memory: they read what they need in place,
// instead of sending messages. Internal to this room; BackendGroup prefers it where it serves.
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
  /// Whether this operation can be done here, given its input. The same on all ranks that do the same.
  virtual bool serves(plan::Collective kind, const at::Tensor& input) const = 0;
  /// As Group's operations of the same names.
  virtual void all_gather(at::Tensor& output, const at::Tensor& input) = 0;
  virtual void reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) = 0;
  virtual void barrier() = 0;
  /// Bytes that operations have copied out of other ranks' memory; on a GPU, that they have enqueued to copy.
  virtual int64_t moved_bytes() const = 0;
  /// What the next operation is, in words; all ranks must say the same.
  virtual void announce(std::string_view operation) = 0;
  /// Throws Disagreement when an operation on a GPU has found one.
  virtual void check() const {}
  /// The host waits for what is under way, so that memory can go. Does not throw.
  virtual void finish() {}
  /// Operations that wait for peers give up, be it on the GPU.
  virtual void stop() {}

  /// Every rank's text by group rank.
  using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;
  /// Memory that operations serve; undefined where any memory will do. Collective.
  virtual at::Tensor allocate(int64_t count, c10::ScalarType dtype, const Exchange& exchange) = 0;
  /// Bytes of the device in allocate()d memory.
  virtual int64_t allocated_bytes() const { return 0; }
};

/// The ranks of a group are in different operations. Its text is for people.
class Disagreement : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What a rank shows the others, so that they can reach its memory. Memory that is shared belongs to nobody
/// but the processes that map it: nothing is left behind however they end.
class MemoryOffer {
 public:
  virtual ~MemoryOffer() = default;
  virtual std::string text() const = 0;
  /// `offers` by group rank. Returns none when a rank cannot be reached; then no rank may use it.
  virtual std::unique_ptr<PeerMemory> accept(const std::vector<std::string>& offers, double timeout_s) = 0;
};

/// For ranks on CPUs: shared memory of one host.
std::unique_ptr<MemoryOffer> offer_host_memory(int64_t rank, int64_t size);
/// For ranks on GPUs of one host: GPU memory that is mapped into the other processes.
std::unique_ptr<MemoryOffer> offer_gpu_memory(int64_t rank, int64_t size, c10::Device device,
                                              GatherBy gather);
/// What fits the device.
inline std::unique_ptr<MemoryOffer> offer_memory(int64_t rank, int64_t size, c10::Device device,
                                                 GatherBy gather) {
  return device.is_cpu() ? offer_host_memory(rank, size) : offer_gpu_memory(rank, size, device, gather);
}

}  // namespace trireme::comm
