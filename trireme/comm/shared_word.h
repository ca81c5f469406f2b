#pragma once
// A number in host memory by which GPUs of two processes wait for each other without occupying a
// multiprocessor, and which either host can write to end a wait. Internal to this room.
#include <cstdint>
#include <memory>
#include <string>

namespace trireme::comm {

class SharedPages;

class SharedWord {
 public:
  /// Zero at first. None where the current GPU cannot reach memory that processes share.
  static std::unique_ptr<SharedWord> make();
  /// Maps the word whose text() this is; none when it cannot be mapped here.
  static std::unique_ptr<SharedWord> open(const std::string& text);
  SharedWord(const SharedWord&) = delete;
  SharedWord& operator=(const SharedWord&) = delete;
  /// Nothing enqueued may use it any more.
  ~SharedWord();

  std::string text() const;
  /// Makes `stream` (a cudaStream_t) wait for `value` or up to 2^31 - 1 more; numbers wrap around.
  void wait_for(uint32_t value, void* stream) const;
  /// Enqueues a write; whoever sees it also sees what the stream has written before.
  void write(uint32_t value, void* stream) const;
  void write_from_host(uint32_t value);
  uint32_t value() const;

 private:
  explicit SharedWord(std::unique_ptr<SharedPages> pages);
  static std::unique_ptr<SharedWord> over(std::unique_ptr<SharedPages> pages);

  std::unique_ptr<SharedPages> pages_;
  bool registered_ = false;
  uint64_t on_gpu_ = 0;  ///< the word's address there; 0 when it has none
};

}  // namespace trireme::comm
