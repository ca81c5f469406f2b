#pragma once
// Ranks meet at a place in the store: each leaves a text there and waits for the texts of the others. A rank
// makes a handful of store calls, however many ranks there are. Internal to this room.
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::comm {

struct Meeting {
  std::string op;              ///< opens error messages: "comm.join"
  std::string where;           ///< what people call the place: "at 127.0.0.1:29500"
  std::string place;           ///< prefix of its keys in the store
  std::vector<int64_t> ranks;  ///< who is expected, this rank included
  int64_t rank = 0;            ///< this rank
  double timeout_s = 0.0;
};

/// The store ended, or does not answer, while ranks met in it.
class StoreLost : public CommError {
 public:
  using CommError::CommError;
};

/// Leaves `text`, waits for all, returns the texts in the order of `ranks`. Says every 10 s on stderr who is
/// missing. Throws CommError that names the missing ranks when the deadline passes or somebody has ended the
/// meeting, and StoreLost.
std::vector<std::string> meet(c10d::Store& store, const Meeting& meeting, const std::string& text);

/// Ends the wait of all ranks at the meeting, even if ranks are missing: they throw CommError that says the
/// `reason`; empty: they name the missing ranks.
void end_meeting(c10d::Store& store, const Meeting& meeting, const std::string& reason) noexcept;

/// Waits for one key. Returns false when `timeout_s` passed; throws c10::Error when the store was lost.
bool wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, double timeout_s);

/// For a library whose ranks each set one key, and then read the keys of all others: the values travel
/// through a meeting instead of a call for every pair of ranks. Calls that no such exchange makes go to
/// `store`.
c10::intrusive_ptr<c10d::Store> exchange_through_meetings(c10::intrusive_ptr<c10d::Store> store,
                                                          Meeting meeting);

/// Texts by rank, as one rank after the other has appended them. A damaged end is left out.
std::string to_entry(int64_t rank, const std::string& text);
std::map<int64_t, std::string> parse_entries(const std::string& log);

}  // namespace trireme::comm
