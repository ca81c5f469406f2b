#pragma once
// A second way to move bytes, where ranks can reach each other's memory: they read what they need in place,
// instead of sending messages. Internal to this room; BackendGroup prefers it where it exists.
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace at {
class Tensor;
}

namespace trireme::comm {

/// Arguments are checked by the caller. Throws std::runtime_error when a peer is gone, or "Timed out";
/// Disagreement when ranks do different things.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  /// As Group's operations of the same names.
  virtual void all_gather(at::Tensor& output, const at::Tensor& input) = 0;
  virtual void reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) = 0;
  virtual void barrier() = 0;
  /// What the next operation is, in words; all ranks must say the same.
  virtual void announce(std::string_view operation) = 0;
};

/// The ranks of a group are in different operations. Its text is for people.
class Disagreement : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Memory that the ranks of a group on one host are about to share. It belongs to nobody but the processes
/// that map it, so nothing is left behind however they end.
class HostMemoryOffer {
 public:
  /// Group rank 0 makes the memory.
  HostMemoryOffer(int64_t rank, int64_t size);
  HostMemoryOffer(const HostMemoryOffer&) = delete;
  HostMemoryOffer& operator=(const HostMemoryOffer&) = delete;
  ~HostMemoryOffer();

  /// For the other ranks: which host this is, and where its memory is found.
  const std::string& text() const { return text_; }

  /// Maps what rank 0 offers. Returns none when a rank is on another host or in another container, or may not
  /// open the memory; then no rank may use it. `offers` by group rank.
  std::unique_ptr<PeerMemory> accept(const std::vector<std::string>& offers, double timeout_s) const;

 private:
  int64_t rank_, size_;
  int descriptor_ = -1;
  std::string text_;
};

}  // namespace trireme::comm
