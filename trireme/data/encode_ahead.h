#pragma once
// Texts to token ids on several threads, in the order of the texts.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "trireme/data/tokenizer.h"

namespace trireme::data {

/// Threads tokenise what was added, while the thread that adds goes on reading. Threads have a copy of the
/// text and wait for nothing but the processor, so that time that passes is headway.
class EncodeAhead {
 public:
  using Take = std::function<void(std::span<const int32_t> ids)>;
  /// Ids of a text; called on several threads, each with a tokenizer of its own.
  using Encode = std::function<std::vector<int32_t>(const Tokenizer& tokenizer, std::string_view text)>;

  /// `while_waiting` is called ten times a second while there is nothing to take; what it throws ends add()
  /// and finish(). `tokenizer` must outlive this. Goes on with fewer threads where the system has no more;
  /// throws EnvironmentError where it has none.
  /// `encode` says otherwise than Tokenizer::encode() what the ids are.
  EncodeAhead(const Tokenizer& tokenizer, int64_t threads, std::function<void()> while_waiting,
              Encode encode = {});
  EncodeAhead(const EncodeAhead&) = delete;
  EncodeAhead& operator=(const EncodeAhead&) = delete;
  /// Drops what no thread has begun, and waits for the rest.
  ~EncodeAhead();

  /// `take` gets the ids, in the order of the texts and in this thread, during a later call or finish().
  /// Waits until there is room: memory holds 16 MiB a thread, or one text that is longer. A text counts with
  /// its bytes and an id for each of them until it is tokenised, then with its ids, and always with what is
  /// kept about it. Throws what the tokenizer and those that take threw.
  void add(std::string_view text, Take take);
  /// Waits until all ids are taken. Call once, last.
  void finish();

 private:
  struct Text {
    std::string text;
    Take take;
    std::vector<int32_t> ids = {};
  };
  /// Short texts go together: a thread is woken for many.
  struct Batch {
    std::vector<Text> texts = {};
    size_t bytes = 0;   ///< of memory, at most; from hand_over() on under the mutex
    bool over = false;  ///< under the mutex; from then on the rest is the adding thread's
    std::exception_ptr failure = {};
  };

  EncodeAhead(int64_t threads, std::function<void()> while_waiting, Encode encode);
  void hand_over();
  bool has_room_for_batch();
  void take_oldest();
  void take_ready();
  bool is_over(const Batch& batch);
  void run(const Tokenizer& tokenizer);

  std::function<void()> while_waiting_;
  Encode encode_;
  size_t most_bytes_;
  Batch filling_;
  std::deque<std::shared_ptr<Batch>> in_order_;

  std::mutex mutex_;
  std::condition_variable handed_over_, ended_;
  size_t bytes_ = 0;                          ///< under the mutex, in in_order_
  std::deque<std::shared_ptr<Batch>> to_do_;  ///< under the mutex
  bool stopped_ = false;                      ///< under the mutex
  std::vector<std::thread> threads_;
};

}  // namespace trireme::data
