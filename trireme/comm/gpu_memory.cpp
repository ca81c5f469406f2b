// Collectives of GPUs of one host that read each other's memory; the kernels are kernels/pull.h.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/hex.h"
#include "trireme/comm/gpu_call.h"
#include "trireme/comm/ordered.h"
#include "trireme/comm/peer_memory.h"
#include "trireme/comm/process_id.h"
#include "trireme/kernels/pull.h"

namespace trireme::comm {
namespace {

using kernels::PullBox;
using kernels::PullCall;
using kernels::PullState;

constexpr int kGatherChannel = 0, kReduceChannel = 1;
/// Operations whose names a channel keeps for error messages: a host enqueues about so many ahead of its GPU.
constexpr uint32_t kRoundsRemembered = 1024;
/// With more ranks, kernels are faster: copy engines copy from one peer after the other.
constexpr int64_t kMostRanksForCopies = 2;

/// Memory that every rank of a group has allocated, all of it mapped into this process.
class Segment {
 public:
  /// `number` is the same on all ranks.
  Segment(int64_t number, int64_t bytes, c10::Device device)
      : number_(number), bytes_(bytes), device_(device) {
    const c10::cuda::CUDAGuard guard(device_);
    if (!succeeds(cudaMalloc(&own_, static_cast<size_t>(bytes))) ||
        !succeeds(cudaMemset(own_, 0, static_cast<size_t>(bytes))) || !succeeds(cudaDeviceSynchronize())) {
      release();
    }
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() { release(); }

  /// What other ranks need to map this rank's memory; empty when the allocation failed.
  std::string text() const {
    cudaIpcMemHandle_t handle{};
    if (own_ == nullptr || !succeeds(cudaIpcGetMemHandle(&handle, own_))) return {};
    return fmt::format("{} {} {} {}", ::getpid(), device_.index(), reinterpret_cast<uintptr_t>(own_),
                       to_hex(handle.reserved, sizeof handle.reserved));
  }

  /// Maps the memory of all ranks from their texts. Returns false when one cannot be mapped.
  bool map(const std::vector<std::string>& texts, int64_t rank) {
    const c10::cuda::CUDAGuard guard(device_);
    for (size_t r = 0; r < texts.size(); ++r) {
      mapped_[r] = static_cast<int64_t>(r) == rank ? own_ : open(texts[r]);
      if (mapped_[r] == nullptr) return false;
    }
    return true;
  }

  void* own() const { return own_; }
  void* of(size_t rank) const { return mapped_[rank]; }
  int64_t number() const { return number_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* open(const std::string& text) {
    pid_t pid = 0;
    int device = 0;
    uintptr_t address = 0;
    std::string hex;
    if (!(std::istringstream(text) >> pid >> device >> address >> hex)) return nullptr;
    if (pid == ::getpid()) {  // ranks that are threads have one address space
      const cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
      const bool reaches = error == cudaErrorPeerAccessAlreadyEnabled || succeeds(error);
      return reaches ? reinterpret_cast<void*>(address) : nullptr;
    }
    const std::optional<std::string> bytes = from_hex(hex);
    cudaIpcMemHandle_t handle{};
    if (!bytes || bytes->size() != sizeof handle.reserved) return nullptr;
    std::memcpy(handle.reserved, bytes->data(), bytes->size());
    void* memory = nullptr;
    if (!succeeds(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess))) return nullptr;
    opened_.push_back(memory);
    return memory;
  }

  void release() {
    const c10::cuda::CUDAGuard guard(device_);
    for (void* memory : opened_) succeeds(cudaIpcCloseMemHandle(memory));
    opened_.clear();
    if (own_ != nullptr) succeeds(cudaFree(own_));
    own_ = nullptr;
  }

  int64_t number_, bytes_;
  c10::Device device_;
  void* own_ = nullptr;
  std::array<void*, kernels::kPullRanks> mapped_{};
  std::vector<void*> opened_;
};

struct FreeHost {
  void operator()(PullState* state) const { succeeds(cudaFreeHost(state)); }
};

class GpuMemory final : public PeerMemory {
 public:
  GpuMemory(std::unique_ptr<Segment> boxes, PullState* state, int64_t rank, int64_t size, c10::Device device,
            const PeerOptions& options)
      : boxes_(std::move(boxes)),
        state_(state),
        rank_(rank),
        size_(size),
        device_(device),
        gathers_by_copies_(options.gather == GatherBy::kCopies ||
                           (options.gather == GatherBy::kAuto && size <= kMostRanksForCopies)),
        sums_by_copies_(options.sum == GatherBy::kCopies) {}
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() override { stop(); }

  bool serves(plan::Collective kind, const at::Tensor& input) const override {
    const bool ours = kind == plan::Collective::kAllGather || kind == plan::Collective::kAllToAll;
    return ours && find(input) != segments_.end();
  }
  void all_gather(at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) override;
  void barrier() override {}
  int64_t moved_bytes() const override { return moved_bytes_; }
  void announce(std::string_view operation) override { operation_ = operation; }
  void check() const override;
  void finish() override;
  void stop() override { static_cast<volatile PullState*>(state_.get())->stop = 1; }
  at::Tensor allocate(int64_t count, c10::ScalarType dtype, const Exchange& exchange) override;
  int64_t allocated_bytes() const override;

 private:
  using Segments = std::map<uintptr_t, std::shared_ptr<Segment>>;
  /// Calls of a channel run one after the other, also when they are enqueued on different streams.
  struct Channel {
    uint32_t round = 0;
    std::optional<c10::cuda::CUDAStream> stream;
    at::cuda::CUDAEvent last;
    std::map<uint32_t, std::string> operations;  ///< names by round, of the last kRoundsRemembered
  };

  Segments::const_iterator find(const at::Tensor& input) const;
  template <typename Enqueue>
  void enqueue(int channel, const at::Tensor& input, int64_t apart, const Enqueue& body);
  int copy(void* output, int64_t bytes, int64_t offset, const PullCall& call, cudaStream_t stream) const;

  std::unique_ptr<Segment> boxes_;
  std::unique_ptr<PullState, FreeHost> state_;
  int64_t rank_, size_;
  c10::Device device_;
  bool gathers_by_copies_, sums_by_copies_;
  int64_t allocations_ = 0, moved_bytes_ = 0;
  Segments segments_;  ///< by the address of this rank's memory
  std::array<Channel, kernels::kPullChannels> channels_;
  mutable std::mutex operations_mutex_;  ///< the watch's thread reads Channel::operations
  std::string operation_;
};

GpuMemory::Segments::const_iterator GpuMemory::find(const at::Tensor& input) const {
  const auto address = reinterpret_cast<uintptr_t>(input.const_data_ptr());
  auto found = segments_.upper_bound(address);
  if (found == segments_.begin()) return segments_.end();
  --found;
  const bool inside =
      address + input.nbytes() <= found->first + static_cast<uintptr_t>(found->second->bytes());
  return inside ? found : segments_.end();
}

/// body(call, stream) enqueues; it returns a cudaError_t. The inputs of rank r and r + 1 lie `apart` bytes
/// apart in their segments.
template <typename Enqueue>
void GpuMemory::enqueue(int index, const at::Tensor& input, int64_t apart, const Enqueue& body) {
  const c10::cuda::CUDAGuard guard(device_);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device_.index());
  Channel& channel = channels_[static_cast<size_t>(index)];
  if (channel.stream && *channel.stream != stream) channel.last.block(stream);

  const auto segment = find(input);
  const auto mine =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(input.const_data_ptr()) - segment->first);
  const int64_t offset = mine - rank_ * apart;  // of group rank 0
  PullCall call{.rank = static_cast<int>(rank_), .size = static_cast<int>(size_), .channel = index};
  call.round = ++channel.round;
  call.operation = static_cast<uint32_t>(
      xxh3(fmt::format("{} from {} {} {}", operation_, segment->second->number(), offset, apart)));
  for (size_t r = 0; r < static_cast<size_t>(size_); ++r) {
    call.boxes[r] = static_cast<PullBox*>(boxes_->of(r));
    call.inputs[r] =
        static_cast<const std::byte*>(segment->second->of(r)) + offset + static_cast<int64_t>(r) * apart;
  }
  call.state = state_.get();
  {
    const std::lock_guard lock(operations_mutex_);
    channel.operations[call.round] = operation_;
    channel.operations.erase(call.round - kRoundsRemembered);
  }

  const int error = body(call, stream.stream());
  TRIREME_CHECK(error == 0, "[comm.peer_memory] {}: {}", operation_,
                cudaGetErrorString(static_cast<cudaError_t>(error)));
  channel.last.record(stream);
  channel.stream = stream;
}

/// `bytes` of each rank's input, from `offset` on, one rank after another.
int GpuMemory::copy(void* output, int64_t bytes, int64_t offset, const PullCall& call,
                    cudaStream_t stream) const {
  if (const int error = kernels::pull_begin(call, stream); error != 0) return error;
  for (int step = 0; step < call.size; ++step) {
    const int peer = (call.rank + step) % call.size;
    void* const to = static_cast<std::byte*>(output) + peer * bytes;
    const void* const from = static_cast<const std::byte*>(call.inputs[peer]) + offset;
    if (to == from) continue;
    const cudaError_t error =
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  return kernels::pull_end(call, stream);
}

void GpuMemory::all_gather(at::Tensor& output, const at::Tensor& input) {
  const auto bytes = static_cast<int64_t>(input.nbytes());
  void* const to = output.mutable_data_ptr();
  const bool in_place = static_cast<std::byte*>(to) + rank_ * bytes == input.const_data_ptr();
  enqueue(kGatherChannel, input, in_place ? bytes : 0, [&](const PullCall& call, cudaStream_t stream) {
    return gathers_by_copies_ ? copy(to, bytes, 0, call, stream)
                              : kernels::pull_gather(to, bytes, call, stream);
  });
  moved_bytes_ += (size_ - 1) * bytes;
}

void GpuMemory::reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) {
  const bool bf16 = input.scalar_type() == at::kBFloat16;
  auto* const to = output.mutable_data_ptr<float>();
  const int64_t bytes = output.numel() * static_cast<int64_t>(input.element_size());
  // What is added comes here first: then only the sum itself needs multiprocessors.
  const at::Tensor rows = sums_by_copies_ ? at::empty_like(input) : at::Tensor();
  enqueue(kReduceChannel, input, 0, [&](const PullCall& call, cudaStream_t stream) {
    return sums_by_copies_ ? copy(rows.mutable_data_ptr(), bytes, rank_ * bytes, call, stream)
                           : kernels::pull_sum(to, output.numel(), bf16, call, stream);
  });
  if (sums_by_copies_) tree_sum_on_gpu(output, rows, size_);
  moved_bytes_ += (size_ - 1) * output.numel() * static_cast<int64_t>(input.element_size());
}

void GpuMemory::check() const {
  const auto* const state = static_cast<const volatile PullState*>(state_.get());
  if (state->odd_rank == 0) return;
  const uint32_t round = state->odd_round;
  const std::lock_guard lock(operations_mutex_);
  const auto& operations = channels_[state->odd_channel].operations;
  const auto known = operations.find(round);
  throw Disagreement(fmt::format("is '{}' here but a different operation on group rank {}",
                                 known == operations.end() ? "?" : known->second, state->odd_rank - 1));
}

void GpuMemory::finish() {
  for (const Channel& channel : channels_) {
    if (!channel.stream) continue;
    try {
      channel.last.synchronize();
    } catch (const std::exception&) {
      // The device has failed, and the next call that uses it throws.
    }
  }
}

at::Tensor GpuMemory::allocate(int64_t count, c10::ScalarType dtype, const Exchange& exchange) {
  const auto options = at::TensorOptions().device(device_).dtype(dtype);
  const int64_t bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
  auto segment = std::make_shared<Segment>(allocations_++, std::max<int64_t>(bytes, 1), device_);
  const std::vector<std::string> texts = exchange(segment->text());
  const bool maps = std::ranges::count(texts, "") == 0 && segment->map(texts, rank_);
  if (std::ranges::count(exchange(maps ? "yes" : ""), "") > 0) return {};
  segments_.emplace(reinterpret_cast<uintptr_t>(segment->own()), segment);
  return at::from_blob(
      segment->own(), {count}, [segment](void*) {}, options, device_);
}

int64_t GpuMemory::allocated_bytes() const {
  int64_t bytes = 0;
  for (const auto& [address, segment] : segments_) bytes += segment->bytes();
  return bytes;
}

class GpuMemoryOffer final : public MemoryOffer {
 public:
  GpuMemoryOffer(int64_t rank, int64_t size, c10::Device device, const PeerOptions& options)
      : rank_(rank),
        size_(size),
        device_(device),
        options_(options),
        boxes_(std::make_unique<Segment>(0, static_cast<int64_t>(sizeof(PullBox)), device)) {}

  std::string text() const override { return fmt::format("{} {}", host_identity(), boxes_->text()); }

  std::unique_ptr<PeerMemory> accept(const std::vector<std::string>& offers, double) override {
    if (size_ > kernels::kPullRanks) return {};
    const std::string host = host_identity() + " ";
    std::vector<std::string> texts;
    for (const std::string& offer : offers) {
      if (!offer.starts_with(host)) return {};
      texts.push_back(offer.substr(host.size()));
    }
    if (!boxes_->map(texts, rank_)) return {};
    void* state = nullptr;
    if (!succeeds(cudaHostAlloc(&state, sizeof(PullState), cudaHostAllocMapped | cudaHostAllocPortable)))
      return {};
    return std::make_unique<GpuMemory>(std::move(boxes_), new (state) PullState{}, rank_, size_, device_,
                                       options_);
  }

 private:
  int64_t rank_, size_;
  c10::Device device_;
  PeerOptions options_;
  std::unique_ptr<Segment> boxes_;
};

}  // namespace

std::unique_ptr<MemoryOffer> offer_gpu_memory(int64_t rank, int64_t size, c10::Device device,
                                              const PeerOptions& options) {
  return std::make_unique<GpuMemoryOffer>(rank, size, device, options);
}

}  // namespace trireme::comm
