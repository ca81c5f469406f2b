#include "trireme/base/heartbeat.h"

namespace trireme {
namespace {

std::atomic<uint64_t> unread{0};
std::atomic<std::atomic<uint64_t>*> counted{&unread};

}  // namespace

void beat() noexcept {
  counted.load(std::memory_order_relaxed)->fetch_add(1, std::memory_order_relaxed);
}

void count_beats_in(std::atomic<uint64_t>& count) noexcept {
  counted = &count;
}

}  // namespace trireme
