#pragma once
// Stores for tests: one that freezes, and one that counts its calls.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

namespace trireme::test {

/// A store whose calls each pass before_call().
class HookedStore : public c10d::HashStore {
 public:
  using Bytes = std::vector<uint8_t>;
  using HashStore::set;
  using HashStore::wait;

  void set(const std::string& key, const Bytes& value) override {
    before_call("set");
    HashStore::set(key, value);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    before_call("compareSet");
    return HashStore::compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override {
    before_call("get");
    return HashStore::get(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    before_call("wait");
    HashStore::wait(keys, timeout);
  }
  int64_t add(const std::string& key, int64_t value) override {
    before_call("add");
    return HashStore::add(key, value);
  }
  int64_t getNumKeys() override {
    before_call("getNumKeys");
    return HashStore::getNumKeys();
  }
  bool check(const std::vector<std::string>& keys) override {
    before_call("check");
    return HashStore::check(keys);
  }
  bool deleteKey(const std::string& key) override {
    before_call("deleteKey");
    return HashStore::deleteKey(key);
  }
  void append(const std::string& key, const Bytes& value) override {
    before_call("append");
    HashStore::append(key, value);
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    before_call("multiGet");
    return HashStore::multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    before_call("multiSet");
    HashStore::multiSet(keys, values);
  }

 protected:
  virtual void before_call(const std::string& name) = 0;
};

/// Like a host that is stopped or out of reach: from freeze() on no call returns, until thaw().
class FreezingStore final : public HookedStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }
  void freeze() {
    const std::lock_guard lock(mutex_);
    frozen_ = true;
  }
  void thaw() {
    const std::lock_guard lock(mutex_);
    frozen_ = false;
    changed_.notify_all();
  }

 protected:
  void before_call(const std::string&) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !frozen_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool frozen_ = false;
};

class CountingStore final : public HookedStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }
  /// Since the last call of it, by name.
  std::map<std::string, int64_t> take_counts() {
    const std::lock_guard lock(mutex_);
    return std::exchange(counts_, {});
  }

 protected:
  void before_call(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    ++counts_[name];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace trireme::test
