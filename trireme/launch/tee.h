#pragma once
// Copies what ranks write to the launcher's stdout and stderr, and to one log file a rank.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/launch/lines.h"
#include "trireme/launch/outlet.h"

namespace trireme::launch {

enum class Stream { kOut, kErr };

struct TeeOptions {
  int64_t ranks = 1;
  std::string log_dir;    ///< holds rank-N.log; empty: no logs
  bool terminal = false;  ///< stderr is one: bytes of rank 0's stderr go there as they come
  double merge_window_s = 0.2;
};

/// rank-N.log: all lines of one rank, unprefixed and without escape sequences. A write that fails ends the
/// log with one warning, not the job.
class RankLog {
 public:
  /// Appends to an existing file. Throws EnvironmentError when it cannot be opened.
  explicit RankLog(const std::string& path) : path_(path), file_(std::make_unique<LineFile>(path)) {}
  void append(std::string_view line);

 private:
  std::string path_;
  std::unique_ptr<LineFile> file_;
};

class Tee {
 public:
  /// Makes log_dir and the logs. Throws EnvironmentError.
  explicit Tee(const TeeOptions& options);

  /// Bytes that `rank` wrote. Rank 0's stdout passes verbatim; the rest is shown line by line on stderr.
  void feed(int64_t rank, Stream stream, std::string_view bytes, double now);
  /// The stream has ended: its last line may lack a newline.
  void end(int64_t rank, Stream stream, double now);
  /// Shows the lines that have waited long enough for equal ones.
  void tick(double now);
  std::optional<double> next_due() const { return held_ ? std::nullopt : merger_.next_due(); }
  /// While held, lines wait however long they have waited; settle() shows them all the same.
  void hold(bool on) { held_ = on; }
  /// From now on only lines of `ranks` are shown, also of those that still wait; the logs get all lines.
  void show_only(std::vector<int64_t> ranks);
  /// Shows every line that still waits for equal ones and ends an open line. Call it before the launcher
  /// writes a log line of its own.
  void settle();

  Outlet& out() { return out_; }
  Outlet& err() { return err_; }

 private:
  struct RankStreams {
    LineSplitter out, err;
    std::unique_ptr<RankLog> log;
  };

  bool passes_raw(int64_t rank, Stream stream) const;
  void take_line(int64_t rank, Stream stream, std::string_view line, double now);
  void show_raw_err(std::string_view bytes);
  void show_line(std::string_view line);
  void show_before_results();
  void leave_open_line();

  TeeOptions options_;
  Outlet out_, err_;
  LineMerger merger_;
  std::vector<RankStreams> streams_;
  std::optional<std::vector<int64_t>> only_;  ///< ranks whose lines are shown; none: all of them
  bool held_ = false;
  bool line_open_ = false, line_is_bar_ = false;  ///< where rank 0's raw bytes left the cursor
};

}  // namespace trireme::launch
