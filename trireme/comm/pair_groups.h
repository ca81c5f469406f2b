#pragma once
// Groups of two for links over NCCL. Internal to this room.
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace trireme::comm {

class Group;

/// Ending a group of NCCL waits for its other rank, which may end its links in another order. So the group of
/// a link that has ended is kept for links to come, and all end together, in the order in which they were
/// made.
class PairGroups {
 public:
  ~PairGroups();

  /// Names of the groups from rank `from` to rank `to` that no link uses, one a line.
  std::string unused(int64_t from, int64_t to) const;
  /// The first one that both ends have, as unused() of the sender and the receiver says; from now on it is in
  /// use. None: there is none.
  std::shared_ptr<Group> take(const std::string& senders, const std::string& receivers);
  /// Adds a new group, which is in use.
  void add(const std::string& name, int64_t from, int64_t to, std::shared_ptr<Group> group);
  /// A link has ended. `can_go_on` false: its group ends with it.
  void give_back(const std::shared_ptr<Group>& group, bool can_go_on);
  /// Other ranks are lost, and ending a group would wait for them: the groups are kept until the process
  /// ends.
  void abandon();

 private:
  struct Pair {
    std::string name;
    int64_t from, to;
    std::shared_ptr<Group> group;
    bool in_use;
  };
  mutable std::mutex mutex_;
  std::vector<Pair> pairs_;  ///< in the order in which they were made
};

}  // namespace trireme::comm
