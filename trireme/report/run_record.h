#pragma once
// A run directory as it was found: whatever a run has left, whole or not, with what is wrong with it.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/sink.h"
#include "trireme/report/config_entries.h"
#include "trireme/report/curve.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {

/// The numbers of metrics.jsonl by key.
struct Metrics {
  std::vector<double> steps;
  std::map<std::string, Curve> curves;  ///< over steps, of each key that ever had a number, but "step"
  std::vector<double> skipped;          ///< steps whose gradients were not applied
  /// Lines that are no record of a step, with the reason: the first of them.
  std::vector<std::string> damage;
  int64_t damaged_lines = 0;
  int64_t made_again = 0;           ///< steps of which only the later record counts
  bool ends_inside_a_line = false;  ///< the last line has no end: a process is writing it, or was killed

  /// The curve of a key; empty where there is none.
  const Curve& curve(const std::string& key) const;
};

/// Reads the metrics.jsonl at `path`. A line needs a "step" and may have any keys with numbers; "NaN",
/// "Infinity" and "-Infinity" are numbers, null is none.
Metrics read_metrics(const std::string& path);

/// The facts of manifest.json that hold for the whole run.
struct RunFacts {
  std::string version, torch, command, hostname, cpu, kernel, device, mesh, started;
  int64_t cores = 0, memory_bytes = 0, ranks = 0;
};

struct NamedText {
  std::string name;  ///< relative to the run directory
  std::string text;
};

/// An image file of the run.
struct PictureFile {
  std::string name;  ///< relative to the run directory
  bool svg = false;  ///< else PNG
  std::string content;
};

struct RunRecord {
  std::string path;    ///< real
  std::string folder;  ///< its last part
  std::string name;    ///< of the config; of the folder where the config does not say
  RunFacts facts;
  std::vector<Attempt> attempts;  ///< one at least
  bool running = false;           ///< a process writes to it
  std::string error;              ///< the last error of the last attempt in its own words; empty: not known
  bool has_checkpoints = false;   ///< that it can go on from
  Metrics metrics;
  std::string written;  ///< UTC, when metrics.jsonl was last written to; empty: there is none
  std::optional<RunSummary> summary;
  std::string config_yaml;
  std::vector<ConfigEntry> config;
  std::vector<NamedText> earlier_configs;  ///< config.attempt-N.yaml, by N
  std::vector<NamedText> crash_reports;    ///< crash-N.txt, by N
  std::vector<NamedText> log_ends;  ///< the last lines of logs/rank-N.log, of ranks that the end is about
  std::vector<PictureFile> pictures;
  std::vector<std::string> problems;  ///< a sentence each: files that are damaged, or too large to show

  const Attempt& last_attempt() const { return attempts.back(); }
  /// The value of `key` in config.yaml; empty: there is none.
  std::string config_value(const std::string& key) const;
};

/// The samples that the run read: "images", which its records count as tokens, or "tokens".
std::string counted_in(const RunRecord& run);
/// Whether all runs have read images, or all have read tokens.
bool count_the_same(const std::vector<RunRecord>& runs);
/// "images" when all runs have read images; else "tokens", where an image counts as a token.
std::string counted_in(const std::vector<RunRecord>& runs);

/// Throws ConfigError and DataError as RunDirectory::open(); all else that is wrong is in `problems`.
RunRecord read_run(const std::string& path);

}  // namespace trireme::report
