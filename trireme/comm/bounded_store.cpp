#include "trireme/comm/bounded_store.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <thread>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/comm/name_server.h"

namespace trireme::comm {
namespace {

constexpr double kSlice_s = 0.1;
/// A process that was stopped for a while counts at most this as its own waiting. A thread that got its core
/// late has waited all the same.
constexpr double kLongestSlice_s = 2 * kSlice_s;

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

/// The store and the thread that calls it. A thread that is stuck in a call is left behind with its store and
/// ends when the call does.
class BoundedStore::Line {
 public:
  using Job = std::function<void(Line&)>;

  static std::shared_ptr<Line> start() {
    auto line = std::make_shared<Line>();
    line->thread_ = std::thread([line] { line->run(); });
    return line;
  }

  void post(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

  void stop(bool stuck) {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    stuck ? thread_.detach() : thread_.join();
  }

  c10::intrusive_ptr<c10d::Store> store;  ///< of the thread
  bool lost = false;                      ///< of the callers

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (stopping_) break;
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job(*this);
      lock.lock();
    }
    lock.unlock();
    store.reset();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

BoundedStore::BoundedStore(Open open, double open_s, double answer_s)
    : BoundedStore(std::move(open), open_s, answer_s, answer_s, {}) {}

BoundedStore::BoundedStore(Open open, double open_s, double answer_s, double longest_s, Pulse pulse)
    : answer_s_(open_s),
      longest_s_(std::max(open_s, longest_s)),
      pulse_(std::move(pulse)),
      line_(Line::start()) {
  auto task = std::make_shared<std::packaged_task<void(Line&)>>(
      [open = std::move(open)](Line& line) { line.store = open(); });
  std::future<void> opened = task->get_future();
  line_->post([task](Line& line) { (*task)(line); });
  const bool answered = is_ready_within(opened, 0.0);
  try {
    if (!answered) C10_THROW_ERROR(DistNetworkError, fmt::format("no answer within {:.1f} s", open_s));
    opened.get();
    answer_s_ = answer_s;
    longest_s_ = longest_s;
  } catch (...) {
    line_->stop(!answered);
    throw;
  }
}

BoundedStore::~BoundedStore() {
  line_->stop(line_->lost);
}

void BoundedStore::follow(Pulse pulse, double longest_s) {
  pulse_ = std::move(pulse);
  answer_s_ = kStoreSilence_s;
  longest_s_ = std::max(longest_s, kStoreSilence_s);
}

void BoundedStore::limit_rest(double silence_s, double all_s) {
  answer_s_ = silence_s;
  rest_s_ = all_s;
}

/// The limits may change while this waits. Silence counts from when the answer is due, `wait_s` from now.
template <typename Result>
bool BoundedStore::is_ready_within(std::future<Result>& answer, double wait_s) {
  double waited = 0.0, heard = wait_s, beat = pulse_ ? pulse_() : 0.0;
  while (waited < std::min(heard + answer_s_, wait_s + longest_s_) && rest_s_ > 0.0) {
    const double before = monotonic_seconds();
    const auto status = answer.wait_for(std::chrono::duration<double>(kSlice_s));
    const double slice = std::min(monotonic_seconds() - before, kLongestSlice_s);
    waited += slice;
    rest_s_ -= slice;
    if (status == std::future_status::ready) return true;
    const bool alive = pulse_ && waited > wait_s && pulse_() > beat;
    if (!alive) continue;
    heard = waited;
    beat = pulse_();
  }
  return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

template <typename Result>
Result BoundedStore::call(double wait_s, std::function<Result(c10d::Store&)> body) {
  const std::lock_guard one_at_a_time(calls_);
  if (line_->lost) C10_THROW_ERROR(DistNetworkError, "the store has stopped answering");
  auto task = std::make_shared<std::packaged_task<Result(c10d::Store&)>>(std::move(body));
  std::future<Result> answer = task->get_future();
  line_->post([task](Line& line) { (*task)(*line.store); });
  if (!is_ready_within(answer, wait_s)) {
    line_->lost = true;
    C10_THROW_ERROR(DistNetworkError,
                    fmt::format("the store did not answer within {:.1f} s", wait_s + answer_s_));
  }
  return answer.get();
}

c10::intrusive_ptr<BoundedStore> BoundedStore::clone(double timeout_s) {
  const Open open = [store = line_->store] {
    const WithoutNameServer unnamed;
    return store->clone();
  };
  auto made = c10::make_intrusive<BoundedStore>(open, answer_s_, answer_s_, longest_s_, pulse_);
  made->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000.0)));
  return made;
}

c10::intrusive_ptr<c10d::Store> BoundedStore::clone() {
  return clone(seconds(timeout_));
}

void BoundedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  call<void>(0.0, [=](c10d::Store& store) { store.set(key, value); });
}

std::vector<uint8_t> BoundedStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                              const std::vector<uint8_t>& desired) {
  return call<std::vector<uint8_t>>(
      0.0, [=](c10d::Store& store) { return store.compareSet(key, expected, desired); });
}

std::vector<uint8_t> BoundedStore::get(const std::string& key) {
  return call<std::vector<uint8_t>>(seconds(timeout_), [=](c10d::Store& store) { return store.get(key); });
}

int64_t BoundedStore::add(const std::string& key, int64_t value) {
  return call<int64_t>(0.0, [=](c10d::Store& store) { return store.add(key, value); });
}

bool BoundedStore::deleteKey(const std::string& key) {
  return call<bool>(0.0, [=](c10d::Store& store) { return store.deleteKey(key); });
}

bool BoundedStore::check(const std::vector<std::string>& keys) {
  return call<bool>(0.0, [=](c10d::Store& store) { return store.check(keys); });
}

int64_t BoundedStore::getNumKeys() {
  return call<int64_t>(0.0, [](c10d::Store& store) { return store.getNumKeys(); });
}

void BoundedStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void BoundedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  call<void>(seconds(timeout), [=](c10d::Store& store) { store.wait(keys, timeout); });
}

void BoundedStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  call<void>(0.0, [=](c10d::Store& store) { store.append(key, value); });
}

std::vector<std::vector<uint8_t>> BoundedStore::multiGet(const std::vector<std::string>& keys) {
  return call<std::vector<std::vector<uint8_t>>>(seconds(timeout_),
                                                 [=](c10d::Store& store) { return store.multiGet(keys); });
}

void BoundedStore::multiSet(const std::vector<std::string>& keys,
                            const std::vector<std::vector<uint8_t>>& values) {
  call<void>(0.0, [=](c10d::Store& store) { store.multiSet(keys, values); });
}

void BoundedStore::setTimeout(const std::chrono::milliseconds& timeout) {
  timeout_ = timeout;
  call<void>(0.0, [=](c10d::Store& store) { store.setTimeout(timeout); });
}

}  // namespace trireme::comm
