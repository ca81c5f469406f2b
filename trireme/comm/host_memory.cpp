// Collectives of CPU ranks on one host over shared memory. Every rank has two slots and one counter. In round
// k it writes into its slot k % 2, sets its counter to k, waits for the counters of the others and reads
// their slots. One meeting a round is enough: a rank that writes slot k % 2 again has met everybody in round
// k + 1, so all have read round k.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "trireme/base/clock.h"
#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/shared_memory.h"
#include "trireme/comm/futex.h"
#include "trireme/comm/peer_memory.h"
#include "trireme/comm/process_id.h"
#include "trireme/kernels/tree_sum.h"

namespace trireme::comm {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kSlots = 2;
constexpr size_t kTextBytes = 96;
constexpr int64_t kAllSlotsBytes = int64_t{32} << 20;
constexpr int64_t kMaxSlotBytes = int64_t{4} << 20;
constexpr int64_t kMaxRanks = 256;  // with more, a slot has too few bytes for each rank
constexpr double kSpin_s = 100e-6;  // ranks in step meet within a few microseconds
constexpr long kLookAround_ns =
    100'000'000;  // how often a waiting rank checks that the others' processes run

/// A rank's state in the shared memory; all zero before the first round.
struct alignas(kLine) Seat {
  std::atomic<uint32_t> round;    ///< the last round whose slot is written; a futex
  std::atomic<uint32_t> waiting;  ///< ranks that sleep on `round`
  std::atomic<uint32_t> left;
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> started;       ///< start time: a later process may have the same pid
  char operation[kSlots][kTextBytes];  ///< of round k at k % 2; ranks compare theirs
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

int64_t slot_bytes(int64_t ranks) {
  return std::min(kMaxSlotBytes, kAllSlotsBytes / kSlots / ranks / 4096 * 4096);
}

size_t total_bytes(int64_t ranks) {
  return static_cast<size_t>(ranks * (static_cast<int64_t>(sizeof(Seat)) + kSlots * slot_bytes(ranks)));
}

/// Whether `round` is `wanted` or later; the counter wraps around.
bool has_reached(uint32_t round, uint32_t wanted) {
  return static_cast<int32_t>(round - wanted) >= 0;
}

class HostMemory final : public PeerMemory {
 public:
  HostMemory(void* memory, int64_t rank, int64_t size, double timeout_s)
      : memory_(static_cast<std::byte*>(memory)),
        rank_(rank),
        size_(size),
        slot_bytes_(slot_bytes(size)),
        timeout_s_(timeout_s),
        spin_s_(size * at::get_num_threads() <= std::thread::hardware_concurrency() ? kSpin_s : 0.0) {
    seat(rank_).pid = ::getpid();
    seat(rank_).started = started_at(::getpid());
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() override {
    seat(rank_).left = 1;
    wake_sleepers(seat(rank_).round);
    ::munmap(memory_, total_bytes(size_));
  }

  bool serves(plan::Collective, const at::Tensor&) const override { return true; }
  void all_gather(at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) override;
  void barrier() override { meet(); }
  int64_t moved_bytes() const override { return moved_bytes_; }
  /// Operations copy through slots, so their arguments may be in any memory.
  at::Tensor allocate(int64_t, c10::ScalarType, const Exchange&) override { return {}; }
  void announce(std::string_view operation) override { operation_ = operation.substr(0, kTextBytes - 1); }

 private:
  Seat& seat(int64_t rank) const { return reinterpret_cast<Seat*>(memory_)[rank]; }
  std::byte* slot(int64_t rank) const {
    std::byte* const slots = memory_ + size_ * static_cast<int64_t>(sizeof(Seat));
    return slots + (rank * kSlots + round_ % kSlots) * slot_bytes_;
  }
  void begin_round() {
    ++round_;
    char* const text = seat(rank_).operation[round_ % kSlots];
    operation_.copy(text, kTextBytes - 1);
    text[operation_.size()] = 0;
  }
  void check_agreement(int64_t rank) const;
  void meet_in_round();
  void meet() {
    begin_round();
    meet_in_round();
  }
  bool arrives_while_spinning(int64_t rank, double met_at) const;
  void sleep_until_arrived(int64_t rank, double met_at) const;
  template <typename Value>
  void reduce_scatter(float* output, const Value* input, int64_t count);

  std::byte* memory_;
  int64_t rank_, size_, slot_bytes_;
  double timeout_s_, spin_s_;
  uint32_t round_ = 0;
  int64_t moved_bytes_ = 0;
  std::string operation_;
};

void HostMemory::meet_in_round() {
  Seat& mine = seat(rank_);
  mine.round.store(round_);
  if (mine.waiting.load() > 0) wake_sleepers(mine.round);
  const double met_at = monotonic_seconds();
  for (int64_t step = 1; step < size_; ++step) {
    const int64_t peer = (rank_ + step) % size_;
    if (!arrives_while_spinning(peer, met_at)) sleep_until_arrived(peer, met_at);
    check_agreement(peer);
  }
}

void HostMemory::check_agreement(int64_t rank) const {
  const std::string_view theirs = seat(rank).operation[round_ % kSlots];
  if (theirs == operation_) return;
  throw Disagreement(fmt::format("is '{}' here but '{}' on group rank {}", operation_, theirs, rank));
}

bool HostMemory::arrives_while_spinning(int64_t rank, double met_at) const {
  const Seat& peer = seat(rank);
  const auto arrived = [&] { return has_reached(peer.round.load(std::memory_order_acquire), round_); };
  while (!arrived() && monotonic_seconds() - met_at < spin_s_) _mm_pause();
  return arrived();
}

void HostMemory::sleep_until_arrived(int64_t rank, double met_at) const {
  Seat& peer = seat(rank);
  struct Waiting {
    explicit Waiting(std::atomic<uint32_t>& counter) : count(counter) { ++count; }
    ~Waiting() { --count; }
    std::atomic<uint32_t>& count;
  } const waiting(peer.waiting);
  for (;;) {
    const bool left =
        peer.left.load() != 0;  // read before `round`: the rank may finish this round and then leave
    const uint32_t round = peer.round.load();
    if (has_reached(round, round_)) return;
    if (left) throw std::runtime_error(fmt::format("group rank {} has left", rank));
    const double remaining = timeout_s_ - (monotonic_seconds() - met_at);
    if (remaining <= 0.0) throw std::runtime_error("Timed out");
    const timespec pause{.tv_sec = 0, .tv_nsec = std::min(kLookAround_ns, 1 + std::lround(remaining * 1e9))};
    if (sleep_while(peer.round, round, pause)) continue;
    if (started_at(peer.pid) != peer.started && !has_reached(peer.round.load(), round_)) {
      throw std::runtime_error(
          fmt::format("process {} of group rank {} is no longer running", peer.pid.load(), rank));
    }
  }
}

void HostMemory::all_gather(at::Tensor& output, const at::Tensor& input) {
  auto* const to = static_cast<std::byte*>(output.mutable_data_ptr());
  const auto* const from = static_cast<const std::byte*>(input.const_data_ptr());
  const auto bytes = static_cast<int64_t>(input.nbytes());
  if (to + rank_ * bytes != from) std::memcpy(to + rank_ * bytes, from, static_cast<size_t>(bytes));
  for (int64_t first = 0; first < bytes; first += slot_bytes_) {
    const auto count = static_cast<size_t>(std::min(slot_bytes_, bytes - first));
    begin_round();
    std::memcpy(slot(rank_), from + first, count);
    meet_in_round();
    for (int64_t peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      std::memcpy(to + peer * bytes + first, slot(peer), count);
      moved_bytes_ += static_cast<int64_t>(count);
    }
  }
}

void tree_sum(float* out, const std::vector<const float*>& rows, int64_t count) {
  kernels::tree_sum(out, rows, count);
}
void tree_sum(float* out, const std::vector<const uint16_t*>& rows, int64_t count) {
  kernels::tree_sum_bf16(out, rows, count);
}

/// output (count), input (size * count); the output may lie inside the input.
template <typename Value>
void HostMemory::reduce_scatter(float* output, const Value* input, int64_t count) {
  const int64_t piece = slot_bytes_ / size_ / kLine * kLine / static_cast<int64_t>(sizeof(Value));
  std::vector<const Value*> rows(static_cast<size_t>(size_));
  for (int64_t first = 0; first < count; first += piece) {
    const int64_t part = std::min(piece, count - first);
    begin_round();
    auto* const mine = reinterpret_cast<Value*>(slot(rank_));
    for (int64_t peer = 0; peer < size_; ++peer) {
      std::memcpy(mine + peer * piece, input + peer * count + first,
                  static_cast<size_t>(part) * sizeof(Value));
    }
    meet_in_round();
    for (int64_t peer = 0; peer < size_; ++peer) {
      rows[static_cast<size_t>(peer)] = reinterpret_cast<const Value*>(slot(peer)) + rank_ * piece;
      if (peer != rank_) moved_bytes_ += part * static_cast<int64_t>(sizeof(Value));
    }
    tree_sum(output + first, rows, part);
  }
}

void HostMemory::reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) {
  auto* const to = output.mutable_data_ptr<float>();
  input.scalar_type() == at::kFloat
      ? reduce_scatter(to, input.const_data_ptr<float>(), output.numel())
      : reduce_scatter(to, static_cast<const uint16_t*>(input.const_data_ptr()), output.numel());
}

class HostMemoryOffer final : public MemoryOffer {
 public:
  /// Group rank 0 makes the memory.
  HostMemoryOffer(int64_t rank, int64_t size)
      : rank_(rank),
        size_(size),
        memory_(rank == 0 ? make_shared_memory("trireme", total_bytes(size)) : Descriptor()) {}
  std::string text() const override {
    return fmt::format("{} {} {}", host_identity(), ::getpid(), memory_.get());
  }
  std::unique_ptr<PeerMemory> accept(const std::vector<std::string>& offers, double timeout_s) override;

 private:
  int64_t rank_, size_;
  Descriptor memory_;
};

std::unique_ptr<PeerMemory> HostMemoryOffer::accept(const std::vector<std::string>& offers,
                                                    double timeout_s) {
  std::string host, pid;
  int descriptor = -1;
  std::istringstream(offers.front()) >> host >> pid >> descriptor;
  const bool same_host =
      std::ranges::all_of(offers, [&](const std::string& offer) { return offer.starts_with(host + " "); });
  if (host.empty() || !same_host || descriptor < 0 || size_ > kMaxRanks) return {};
  const Descriptor file(::open(fmt::format("/proc/{}/fd/{}", pid, descriptor).c_str(), O_RDWR | O_CLOEXEC));
  void* const memory = file ? map_shared_memory(file, total_bytes(size_)) : nullptr;
  if (memory == nullptr) return {};
  return std::make_unique<HostMemory>(memory, rank_, size_, timeout_s);
}

}  // namespace

std::unique_ptr<MemoryOffer> offer_host_memory(int64_t rank, int64_t size) {
  return std::make_unique<HostMemoryOffer>(rank, size);
}

}  // namespace trireme::comm
