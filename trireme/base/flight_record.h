#pragma once
// The last operations of the ranks of a host, in memory that outlives them: the launcher makes it, each rank
// notes its own operations there, and when one has died the launcher reads what all were doing.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/descriptor.h"

namespace trireme {

/// One operation of a rank. Texts are cut to what the memory holds.
struct FlightEntry {
  char state = 'i';  ///< 'i' inside, 'd' done, 'f' failed
  int64_t sequence = 0;
  double since = 0.0;  ///< seconds since 1970 of the last change of `state`
  std::string operation;
  std::string group;
  std::string subject = {};  ///< what the operation works on; may be empty
};

/// The record of one rank.
struct Flight {
  bool joined = false;                                      ///< it has begun to join the other ranks
  std::vector<FlightEntry> entries = {};                    ///< its last operations, the newest last
  std::map<std::string, std::vector<int64_t>> groups = {};  ///< ranks by name, of the groups that it has made
};

class FlightRecord {
 public:
  /// Operations that are kept for each rank.
  static constexpr size_t kKept = 8;

  /// A new record for `ranks` ranks. Throws EnvironmentError when there is no memory for it.
  static FlightRecord make(int64_t ranks);
  /// Opens, as `rank`, the record behind a descriptor that the launcher has handed on. Throws
  /// EnvironmentError when the descriptor is no record, or the record has no such rank.
  static FlightRecord open(int descriptor, int64_t rank);
  /// This rank joins the others.
  void note_joined() noexcept;
  FlightRecord(FlightRecord&& other) noexcept;
  FlightRecord& operator=(FlightRecord&&) = delete;
  ~FlightRecord();

  /// For the launcher to hand on to its ranks; closes on exec.
  int descriptor() const { return memory_.get(); }

  /// Records the newest operation of this rank; a note of the same operation in another state replaces the
  /// one before. `now`: seconds since 1970. Copies a few words. One thread at a time.
  void note(char state, std::string_view operation, int64_t sequence, std::string_view group,
            std::string_view subject, double now) noexcept;
  /// Records that this rank has made a group of the global ranks `ranks`. Groups beyond 16, and those whose
  /// list of ranks takes more than 215 characters, are not kept. One thread at a time, as note().
  void note_group(std::string_view name, const std::vector<int64_t>& ranks) noexcept;

  /// The signs of life of this rank (base/heartbeat.h); every note is one.
  std::atomic<uint64_t>& beats() noexcept;
  /// How many each rank has given, by rank.
  std::vector<uint64_t> all_beats() const;

  /// The records by rank. An entry that a rank was writing when it died is left out.
  std::vector<Flight> read() const;

 private:
  struct Slot;
  FlightRecord(void* data, size_t bytes, Descriptor memory, int64_t rank);
  Slot* slots() const;

  void* data_;
  size_t bytes_;
  Descriptor memory_;
  int64_t rank_;
};

}  // namespace trireme
