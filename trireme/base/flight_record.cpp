#include "trireme/base/flight_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/shared_memory.h"
#include "trireme/base/text.h"

namespace trireme {
namespace {

constexpr uint64_t kMagic = 0x7472697265666c33;  // "triref" and the version of what follows
constexpr size_t kGroups = 16;

template <size_t kSize>
using Text = std::array<char, kSize>;

template <size_t kSize>
void put(Text<kSize>& to, std::string_view text) {
  const size_t count = std::min(text.size(), kSize - 1);
  std::memcpy(to.data(), text.data(), count);
  to[count] = '\0';
}

template <size_t kSize>
std::string get(const Text<kSize>& text) {
  return {text.data(), ::strnlen(text.data(), kSize)};
}

template <size_t kSize>
bool holds(const Text<kSize>& kept, std::string_view text) {
  return std::string_view(kept.data()) == text.substr(0, kSize - 1);
}

struct Entry {
  std::atomic<uint64_t> number;  ///< from 1; 0 while it is written
  int64_t sequence;
  double since;
  char state;
  Text<24> operation;
  Text<40> group;
  Text<64> subject;
};

struct GroupRanks {
  Text<40> name;
  Text<216> ranks;  ///< to_words(); a group whose ranks do not fit is not kept
};

constexpr int64_t kMostRanks = 1'000'000;

/// "0,2,8-15,16-64/8": ranks one by one, and runs of at least three as their first, last and step.
std::string to_words(const std::vector<int64_t>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    const int64_t step = i + 1 < ranks.size() ? ranks[i + 1] - ranks[i] : 0;
    size_t last = i;
    while (step > 0 && last + 1 < ranks.size() && ranks[last + 1] - ranks[last] == step) ++last;
    if (last < i + 2) last = i;
    text += (text.empty() ? "" : ",") + std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    if (last > i && step > 1) text += "/" + std::to_string(step);
    i = last + 1;
  }
  return text;
}

/// Takes the number that the text begins with; none: it begins with something else.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > kMostRanks) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

/// Reads the text that to_words() wrote; no ranks if it is another text, or cut off.
std::vector<int64_t> to_ranks(const std::string& text) {
  std::vector<int64_t> ranks;
  for (const std::string& word : split(text, ',')) {
    std::string_view rest = word;
    const auto take_behind = [&](char mark) {
      if (!rest.starts_with(mark)) return std::optional<int64_t>();
      rest.remove_prefix(1);
      return take_number(rest);
    };
    const auto first = take_number(rest);
    if (!first) return {};
    const int64_t last = take_behind('-').value_or(*first), step = take_behind('/').value_or(1);
    if (!rest.empty() || step == 0) return {};
    for (int64_t rank = *first; rank <= last && std::ssize(ranks) < kMostRanks; rank += step)
      ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

/// A rank's part. All of it is written by that rank alone.
struct FlightRecord::Slot {
  uint64_t magic;  ///< of the first slot, as the launcher has made it
  std::atomic<uint64_t> beats;
  std::atomic<uint32_t> joined;
  std::atomic<uint32_t> groups;  ///< how many there are
  std::array<GroupRanks, kGroups> group;
  std::atomic<uint64_t> noted;  ///< operations so far
  std::array<Entry, kKept> entry;
};

FlightRecord::FlightRecord(void* data, size_t bytes, Descriptor memory, int64_t rank)
    : data_(data), bytes_(bytes), memory_(std::move(memory)), rank_(rank) {}

FlightRecord::FlightRecord(FlightRecord&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      memory_(std::move(other.memory_)),
      rank_(other.rank_) {}

FlightRecord::~FlightRecord() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

FlightRecord::Slot* FlightRecord::slots() const {
  return static_cast<Slot*>(data_);
}

FlightRecord FlightRecord::make(int64_t ranks) {
  const size_t bytes = sizeof(Slot) * static_cast<size_t>(ranks);
  Descriptor memory = make_shared_memory("trireme-flights", bytes);
  void* const data = memory ? map_shared_memory(memory, bytes) : nullptr;
  if (data == nullptr) {
    throw EnvironmentError(
        "[base.flight_record] cannot allocate {} bytes of shared memory for the ranks: {}; free some memory",
        bytes, errno_text(errno));
  }
  FlightRecord record(data, bytes, std::move(memory), -1);
  record.slots()[0].magic = kMagic;
  return record;
}

FlightRecord FlightRecord::open(int descriptor, int64_t rank) {
  struct stat file {};
  const size_t needed = sizeof(Slot) * static_cast<size_t>(rank + 1);
  const bool fits = rank >= 0 && ::fstat(descriptor, &file) == 0 && S_ISREG(file.st_mode) &&
                    static_cast<size_t>(file.st_size) >= needed;
  const auto bytes = static_cast<size_t>(file.st_size);
  Descriptor own(fits ? ::fcntl(descriptor, F_DUPFD_CLOEXEC, 3) : -1);
  void* const data = own ? map_shared_memory(own, bytes) : nullptr;
  if (data == nullptr || static_cast<const Slot*>(data)->magic != kMagic) {
    if (data != nullptr) ::munmap(data, bytes);
    throw EnvironmentError(
        "[base.flight_record] file descriptor {} is not a flight record with a slot for rank {}; unset "
        "TRIREME_FLIGHT_FD",
        descriptor, rank);
  }
  return FlightRecord(data, bytes, std::move(own), rank);
}

void FlightRecord::note_joined() noexcept {
  slots()[rank_].joined = 1;
}

std::atomic<uint64_t>& FlightRecord::beats() noexcept {
  return slots()[rank_].beats;
}

std::vector<uint64_t> FlightRecord::all_beats() const {
  std::vector<uint64_t> beats(bytes_ / sizeof(Slot));
  for (size_t rank = 0; rank < beats.size(); ++rank)
    beats[rank] = slots()[rank].beats.load(std::memory_order_relaxed);
  return beats;
}

void FlightRecord::note(char state, std::string_view operation, int64_t sequence, std::string_view group,
                        std::string_view subject, double now) noexcept {
  Slot& slot = slots()[rank_];
  slot.beats.fetch_add(1, std::memory_order_relaxed);
  const uint64_t noted = slot.noted.load(std::memory_order_relaxed);
  Entry& last = slot.entry[(noted + kKept - 1) % kKept];
  const bool same =
      noted > 0 && last.sequence == sequence && holds(last.operation, operation) && holds(last.group, group);
  const uint64_t number = same ? noted : noted + 1;
  Entry& entry = slot.entry[(number - 1) % kKept];
  entry.number.store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_release);
  entry.sequence = sequence;
  entry.since = now;
  entry.state = state;
  put(entry.operation, operation);
  put(entry.group, group);
  put(entry.subject, subject);
  entry.number.store(number, std::memory_order_release);
  slot.noted.store(number, std::memory_order_release);
}

void FlightRecord::note_group(std::string_view name, const std::vector<int64_t>& ranks) noexcept {
  Slot& slot = slots()[rank_];
  const uint32_t count = slot.groups.load(std::memory_order_relaxed);
  uint32_t place = 0;
  while (place < count && !holds(slot.group[place].name, name)) ++place;
  const std::string text = to_words(ranks);
  if (place == kGroups || text.size() >= sizeof(slot.group[place].ranks)) return;
  put(slot.group[place].ranks, text);
  put(slot.group[place].name, name);
  slot.groups.store(std::max(count, place + 1), std::memory_order_release);
}

std::vector<Flight> FlightRecord::read() const {
  std::vector<Flight> flights(bytes_ / sizeof(Slot));
  for (size_t rank = 0; rank < flights.size(); ++rank) {
    const Slot& slot = slots()[rank];
    Flight& flight = flights[rank];
    flight.joined = slot.joined != 0;
    for (uint32_t i = 0; i < std::min<uint32_t>(slot.groups, kGroups); ++i)
      flight.groups[get(slot.group[i].name)] = to_ranks(get(slot.group[i].ranks));
    const uint64_t noted = slot.noted;
    for (uint64_t number = noted < kKept ? 1 : noted - kKept + 1; number <= noted; ++number) {
      const Entry& entry = slot.entry[(number - 1) % kKept];
      if (entry.number != number) continue;
      flight.entries.push_back({.state = entry.state,
                                .sequence = entry.sequence,
                                .since = entry.since,
                                .operation = get(entry.operation),
                                .group = get(entry.group),
                                .subject = get(entry.subject)});
    }
  }
  return flights;
}

}  // namespace trireme
