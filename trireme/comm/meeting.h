#pragma once
// Ranks meet at a place in the store: each leaves a text there and waits for the texts of the others.
#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace trireme::comm {

struct Meeting {
  std::string op;              ///< opens error messages: "comm.join"
  std::string where;           ///< what people call the place: "at 127.0.0.1:29500"
  std::string place;           ///< prefix of its keys in the store
  std::vector<int64_t> ranks;  ///< who is expected, this rank included
  int64_t rank = 0;            ///< this rank
  double timeout_s = 0.0;
};

/// Leaves `text`, waits for all, returns the texts in the order of `ranks`. Says every 10 s on stderr who is
/// missing. Throws CommError that names the missing ranks when the deadline passes, or that the store was
/// lost.
std::vector<std::string> meet(c10d::Store& store, const Meeting& meeting, const std::string& text);

/// Waits for one key. Returns false when `timeout_s` passed; throws c10::Error when the store was lost.
bool wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, double timeout_s);

}  // namespace trireme::comm
