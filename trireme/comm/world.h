#pragma once
// The ranks of a job: rendezvous, and the factory of groups. Nothing here is global; a test may hold several
// worlds in one process, one per thread.
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/plan/world.h"

namespace c10d {
class Store;
}

namespace trireme::comm {

class Link;
class PairGroups;
class PeerNews;
class ProgressBoard;

/// A member of a job. Destroying it leaves the job; collectives in flight on other ranks then fail.
class World {
 public:
  /// Meets the other ranks at the address in `spec`. Blocks until all have arrived or `timeout_s` has passed;
  /// throws CommError that names the address, the time waited and the ranks that are missing, or that the
  /// port is in use. The store listens on loopback when master_addr is a loopback name, else on that address
  /// only. A process may join further worlds if every rank joins equally many, and be in two at a time if the
  /// launcher has passed on a listening socket. Throws CommError when another process has joined as this
  /// rank, EnvironmentError when ranks run different builds, LogicError for a deadline beyond a day. SIGPIPE
  /// is ignored from here on unless the program handles it. Unless OMP_NUM_THREADS is set, torch's operators
  /// use as many threads as this rank has cores, those that it shares with other ranks divided among them.
  static std::shared_ptr<World> join(const plan::WorldSpec& spec, c10::Device device, double timeout_s,
                                     PeerOptions peers = {});

  /// The world that this process's environment describes (plan::detect_world), on GPU LOCAL_RANK in a build
  /// with CUDA on a machine with GPUs, else on the CPU. Throws ConfigError for variables that make no sense,
  /// and as join().
  static std::shared_ptr<World> join_environment(double timeout_s = 300.0);

  /// join() over a given store, for ranks that are threads of a test.
  static std::shared_ptr<World> join_store(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size,
                                           c10::Device device, double timeout_s, PeerOptions peers = {});

  /// Publishes `text` under `key` to all ranks; only the first text under a key counts. Waits for no other
  /// rank. Does not throw: ranks that fail call it.
  void announce(const std::string& key, const std::string& text) noexcept;
  /// The text announced under `key` by now; empty: there is none, or the store is lost. Does not wait for
  /// one.
  std::string announced(const std::string& key) noexcept;

  struct Seat;  ///< what joining found out
  explicit World(Seat seat);
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World();

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  c10::Device device() const { return device_; }
  double timeout_s() const { return timeout_s_; }
  const PeerOptions& peer_options() const { return peers_; }

  /// A group over `ranks` (global ranks in the order of their group ranks; this rank must be among them).
  /// Collective over those ranks: each calls it with the same arguments, and all groups are made in the same
  /// order. Throws CommError that names the ranks that did not come, LogicError when the ranks make no group.
  std::shared_ptr<Group> make_group(const std::string& name, const std::vector<int64_t>& ranks);
  /// The same, with `peers` instead of the world's options.
  std::shared_ptr<Group> make_group(const std::string& name, const std::vector<int64_t>& ranks,
                                    PeerOptions peers);

  /// Returns rank 0's `text_on_root`, of at most 4 MiB, on all ranks. Collective over the world, with a `key`
  /// that all ranks share. Blocks up to the deadline, then throws CommError; rank 0 throws LogicError for a
  /// longer text.
  std::string share_from_root(const std::string& key, const std::string& text_on_root);
  /// Returns every rank's `text`, by rank: a handful of calls of the store for each rank. All texts together
  /// have at most 4 MiB. Collective over the world, with a `key` that all ranks share. Blocks up to the
  /// deadline, then throws CommError that names the ranks that did not come.
  std::vector<std::string> gather_texts(const std::string& key, const std::string& text);

 private:
  friend std::shared_ptr<Link> make_link(World& world, int64_t from, int64_t to);
  std::string unique_place(const std::string& place);

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_, size_;
  c10::Device device_;
  double timeout_s_;
  std::string address_;  ///< where other ranks reach this one
  bool hosts_store_;
  PeerOptions peers_;
  std::map<std::string, int64_t> uses_;   ///< how often a place in the store was used
  std::shared_ptr<ProgressBoard> board_;  ///< none in a world of one
  std::shared_ptr<PeerNews> news_;        ///< likewise
  std::shared_ptr<PairGroups> pairs_;     ///< links may outlive the world
};

/// The device that `device` (cpu, cuda or auto: a GPU where there is one) means for the rank of `spec`, made
/// the current one. Throws EnvironmentError when there is no such GPU.
c10::Device take_device(plan::Device device, const plan::WorldSpec& spec);

}  // namespace trireme::comm
