#pragma once
// Cuts byte streams into lines, and merges equal lines of several ranks into one. Pure: time is an argument.
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::launch {

using LineSink = std::function<void(std::string_view)>;

/// `line` without the sequences that move a terminal's cursor or colour its text.
std::string without_escapes(std::string_view line);

/// Cuts a stream into lines without their newline. With kCollapse only what a terminal would still show of a
/// redrawn line remains: the text after its last carriage return. A line longer than kMaxLine is cut.
class LineSplitter {
 public:
  enum class Returns { kKeep, kCollapse };
  static constexpr size_t kMaxLine = 1 << 20;

  explicit LineSplitter(Returns returns) : returns_(returns) {}
  void push(std::string_view bytes, const LineSink& sink);
  void finish(const LineSink& sink);  ///< the last line, when it lacks its newline

 private:
  void emit(const LineSink& sink);
  void forget_redrawn();

  Returns returns_;
  std::string line_;
};

/// Holds each line for a moment and merges it with equal lines of other ranks: "text (x4 ranks)". Time stamps
/// ("12:34:56 ") and rank prefixes do not make lines different. Lines leave in the order of their first
/// arrival.
class LineMerger {
 public:
  /// `window_s`: how long a line waits for others; 0 shows each at once.
  explicit LineMerger(double window_s) : window_s_(window_s) {}

  void add(int64_t rank, std::string_view line, double now);
  /// Shows the lines whose wait is over. Each has its prefix ("[r1] "; rank 0 none) and no newline.
  void take_due(double now, const LineSink& sink);
  void take_all(const LineSink& sink);
  /// Shows the lines up to the last that `rank` has a part in, whatever their wait.
  void take_through(int64_t rank, const LineSink& sink);
  std::optional<double> next_due() const;
  /// Forgets the lines that none of `ranks` has a part in.
  void drop_others(const std::vector<int64_t>& ranks);

 private:
  struct Held {
    std::string text, key;  ///< of the lowest rank; what equal lines share
    std::vector<int64_t> ranks;
    double due;
  };
  static constexpr size_t kMaxHeld = 512;

  void show_first(const LineSink& sink);

  double window_s_;
  std::deque<Held> held_;
};

}  // namespace trireme::launch
