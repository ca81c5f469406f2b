#pragma once
// Bulk bytes between the client and a worker, on a connection of their own: the worker's side. The client
// puts bytes under a number for the worker to take, and takes what the worker offers.
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "trireme/base/env.h"
#include "trireme/controller/data_address.h"

namespace trireme::controller {

class DataListener {
 public:
  /// Listens at a Unix socket in runtime_folder(). More than `most_bytes` are not stored at a time.
  DataListener(const Environment& environment, std::string build, uint64_t most_bytes);
  /// Listens at a port of `host`, an address of this host that others reach, to those who know a secret that
  /// it makes.
  DataListener(const std::string& host, std::string build, uint64_t most_bytes);
  ~DataListener();

  DataAddress address() const { return {.address = listener_.address(), .secret = secret_}; }
  /// Waits for what the client of `session` puts under `id`; it is gone from here then. Throws CommError at
  /// the deadline.
  std::string take(uint64_t session, uint64_t id, double timeout_s);
  /// The client of `session` may take it, once.
  void offer(uint64_t session, uint64_t id, std::string bytes);
  /// Frees what belongs to `session` and those before it.
  void forget(uint64_t session);

 private:
  using Key = std::pair<uint64_t, uint64_t>;  ///< session, id
  using Bytes = std::map<Key, std::string>;

  struct Visitor {
    explicit Visitor(Connection made) : connection(std::move(made)) {}
    Connection connection;
    std::thread thread;
    bool known = false, over = false;
    bool leaves = false;  ///< has been told to, and its thread is about to end
  };

  void accept_all();
  void collect_visitors();
  bool make_room();
  void serve(Visitor& visitor);
  uint64_t greet(Connection& connection);
  void store_piece(Connection& connection, Key key, const Frame& frame, std::string& partial);
  void give(Connection& connection, Key key, double timeout_s);
  std::string wait(Bytes& bytes, Key key, double timeout_s, const char* what);
  void keep(Bytes& bytes, Key key, std::string value);

  std::string secret_;  ///< of visitors from beyond this host
  Listener listener_;
  std::string build_;
  uint64_t most_bytes_, held_bytes_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  Bytes put_, offered_;
  bool closing_ = false;
  std::list<Visitor> visitors_;
  std::thread thread_;
};

}  // namespace trireme::controller
