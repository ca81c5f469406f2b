#pragma once
// A store whose every call ends. torch's TCP client waits for answers without a limit: a host that is frozen,
// or that a broken network hides, would hold its callers for ever. A host that is only slow, since many ranks
// share its cores, is waited for. Internal to this room.
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace trireme::comm {

/// How long a store of which nothing is known may take to answer what it need not wait for.
inline constexpr double kStoreAnswer_s = 10.0;
/// How long it may give no sign of life where the process that hosts it can be seen.
inline constexpr double kStoreSilence_s = 5.0;

/// Calls another store on a thread of its own and gives up on an answer that is late: c10::DistNetworkError,
/// at once from then on. Calls that wait for keys have the timeout of the call, or getTimeout(), in addition.
/// One call at a time; any thread may call.
class BoundedStore final : public c10d::Store {
 public:
  using Open = std::function<c10::intrusive_ptr<c10d::Store>()>;
  /// A number that grows as long as the process that hosts the store gets on.
  using Pulse = std::function<double()>;

  /// Opens the store on that thread. Throws what `open` throws, or DistNetworkError after `open_s`.
  BoundedStore(Open open, double open_s, double answer_s = kStoreAnswer_s);
  /// Follows `pulse`, as follow() says, from the start.
  BoundedStore(Open open, double open_s, double answer_s, double longest_s, Pulse pulse);
  BoundedStore(const BoundedStore&) = delete;
  BoundedStore& operator=(const BoundedStore&) = delete;
  ~BoundedStore() override;

  /// A connection of its own, with the limits of this one and another timeout.
  c10::intrusive_ptr<BoundedStore> clone(double timeout_s);
  c10::intrusive_ptr<c10d::Store> clone() override;

  /// From now on a late answer is given up once the pulse has stood still for kStoreSilence_s, or it is
  /// `longest_s` late. Clones follow it as well. No call may be under way.
  void follow(Pulse pulse, double longest_s);

  /// From now on an answer is given up after `silence_s` without a sign of life, and all calls, the one under
  /// way among them, have `all_s` together: after that the store is lost. Another limit replaces this one.
  void limit_rest(double silence_s, double all_s);

  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  void setTimeout(const std::chrono::milliseconds& timeout) override;

 private:
  class Line;

  template <typename Result>
  Result call(double wait_s, std::function<Result(c10d::Store&)> body);
  template <typename Result>
  bool is_ready_within(std::future<Result>& answer, double wait_s);

  std::atomic<double> answer_s_;                                          ///< silence
  std::atomic<double> longest_s_;                                         ///< of one answer
  std::atomic<double> rest_s_ = std::numeric_limits<double>::infinity();  ///< of all calls that are to come
  Pulse pulse_;  ///< none: every moment without an answer is silence
  std::mutex calls_;
  std::shared_ptr<Line> line_;
};

}  // namespace trireme::comm
