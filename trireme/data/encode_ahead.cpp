#include "trireme/data/encode_ahead.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "trireme/base/threads.h"

namespace trireme::data {
namespace {

constexpr size_t kBatchBytes = size_t{1} << 20;  // handed over at once
constexpr size_t kBytesPerThread = size_t{16} << 20;
constexpr size_t kBytesAboutText = 320;  // twice its entry, as vectors grow, and what allocators add to it
constexpr auto kSignEvery = std::chrono::milliseconds(100);

}  // namespace

EncodeAhead::EncodeAhead(int64_t threads, std::function<void()> while_waiting, Encode encode)
    : while_waiting_(std::move(while_waiting)),
      encode_(std::move(encode)),
      most_bytes_(kBytesPerThread * static_cast<size_t>(threads)) {}

/// The other constructor has ended before threads start, so that an error ends those that did.
EncodeAhead::EncodeAhead(const Tokenizer& tokenizer, int64_t threads, std::function<void()> while_waiting,
                         Encode encode)
    : EncodeAhead(std::max<int64_t>(1, threads), std::move(while_waiting), std::move(encode)) {
  start_threads(std::max<int64_t>(1, threads), 1, [&] {
    threads_.emplace_back([this, mine = std::shared_ptr(tokenizer.for_another_thread())] { run(*mine); });
  });
}

EncodeAhead::~EncodeAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    to_do_.clear();
  }
  handed_over_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void EncodeAhead::add(std::string_view text, Take take) {
  filling_.texts.push_back({.text = std::string(text), .take = std::move(take)});
  filling_.bytes += text.size() * (1 + sizeof(int32_t)) + kBytesAboutText;
  if (filling_.bytes >= kBatchBytes) hand_over();
}

void EncodeAhead::finish() {
  hand_over();
  while (!in_order_.empty()) take_oldest();
}

bool EncodeAhead::has_room_for_batch() {
  const std::lock_guard lock(mutex_);
  return bytes_ + filling_.bytes <= most_bytes_;
}

void EncodeAhead::hand_over() {
  if (filling_.texts.empty()) return;
  take_ready();
  while (!in_order_.empty() && !has_room_for_batch()) take_oldest();
  const auto batch = std::make_shared<Batch>(std::exchange(filling_, {}));
  in_order_.push_back(batch);
  {
    const std::lock_guard lock(mutex_);
    bytes_ += batch->bytes;
    to_do_.push_back(batch);
  }
  handed_over_.notify_one();
}

bool EncodeAhead::is_over(const Batch& batch) {
  const std::lock_guard lock(mutex_);
  return batch.over;
}

void EncodeAhead::take_ready() {
  while (!in_order_.empty() && is_over(*in_order_.front())) take_oldest();
}

void EncodeAhead::take_oldest() {
  const std::shared_ptr<Batch> batch = in_order_.front();
  for (;;) {
    std::unique_lock lock(mutex_);
    if (ended_.wait_for(lock, kSignEvery, [&] { return batch->over; })) {
      bytes_ -= batch->bytes;
      break;
    }
    lock.unlock();
    while_waiting_();
  }
  in_order_.pop_front();
  if (batch->failure != nullptr) std::rethrow_exception(batch->failure);
  for (const Text& text : batch->texts) text.take(text.ids);
}

void EncodeAhead::run(const Tokenizer& tokenizer) {
  for (;;) {
    std::unique_lock lock(mutex_);
    handed_over_.wait(lock, [this] { return stopped_ || !to_do_.empty(); });
    if (stopped_) return;
    const std::shared_ptr<Batch> batch = std::move(to_do_.front());
    to_do_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    size_t bytes = 0;
    try {
      for (Text& text : batch->texts) {
        text.ids = encode_ ? encode_(tokenizer, text.text) : tokenizer.encode(text.text);
        std::string().swap(text.text);
        bytes += text.ids.capacity() * sizeof(int32_t) + kBytesAboutText;
      }
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    batch->failure = failure;
    bytes_ -= std::exchange(batch->bytes, bytes);
    bytes_ += bytes;
    batch->over = true;
    lock.unlock();
    ended_.notify_all();
  }
}

}  // namespace trireme::data
