#pragma once
// The run directory: everything a run leaves behind, and the only thing reports read.
// `<root>/<name>-<time>-<id>/` { manifest.json config.yaml metrics.jsonl summary.json logs/ tensorboard/
// checkpoints/ pictures/curves.svg }, schedule.csv of a run with pipeline.file,
// tokenizer.txt (its name, and the digest of its files) of one whose text is not read as bytes,
// and of images { validation.json pictures/confusion.svg pictures/mistakes.svg } (classification_view.h).
// Images in pictures/, and traces/pipeline.svg, are shown by report.html (trireme report), which draws curves
// itself.
// LOCK is locked by the launcher while the run goes on (base/lock_file.h).
// Files that a later attempt replaces stay as config.attempt-N.yaml, schedule.attempt-N.csv and
// summary.attempt-N.json.
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/base/lock_file.h"
#include "trireme/base/sink.h"

namespace trireme::report {

struct Manifest {
  std::string command;       ///< as typed
  std::string program = {};  ///< that trains instead of `trireme train` (cli/train_main.h); empty: none
  std::string config_yaml;   ///< resolved, with origins; goes to config.yaml
  std::string device;        ///< "cpu" or "cuda"
  std::string mesh;          ///< "dp_shard=2"
  int64_t ranks = 1;
  /// Copies of files that the config names (plan::texts_to_keep()): name in the run's directory and text.
  std::map<std::string, std::string> files = {};
};

/// How an attempt at a run ended. A run has several when it goes on after it has ended.
struct AttemptEnd {
  int exit_code = 0;
  std::string cause = {};            ///< in words; empty: its exit code says it all
  std::string error = {};            ///< the message of the error itself; empty: nobody could write one
  std::optional<int64_t> rank = {};  ///< whose failure that was
};

/// An attempt as manifest.json has it.
struct Attempt {
  std::string started, ended;        ///< UTC; `ended` is empty while it goes on, or when its launcher died
  std::optional<int> exit_code;      ///< likewise
  std::string cause;                 ///< as AttemptEnd has it
  std::string error;                 ///< likewise
  std::optional<int64_t> rank;       ///< likewise
  std::optional<int64_t> last_step;  ///< the last that metrics.jsonl had when it ended
  std::optional<int64_t>
      resumed_from;                   ///< the step that it went on after; 0: it began again; none: the first
  std::optional<int64_t> steps_lost;  ///< recorded before that step was gone back to, so made again
  /// As Manifest has them; empty and 0: the manifest is of an old version.
  std::string command, device, mesh;
  int64_t ranks = 0;
};

class RunDirectory {
 public:
  /// Makes the folder (unique even for two runs in one second), config.yaml and manifest.json (with version,
  /// machine, start time, exit_code null), and points `root`/latest at it. Throws EnvironmentError, and
  /// ConfigError for a name that is too long for a folder.
  static RunDirectory create(const std::string& root, const std::string& name, const Manifest& manifest);
  /// Opens an existing one. Throws ConfigError when `path` is not a run directory, DataError when its
  /// manifest is damaged or of another version. From then on a manifest that has gone or is damaged is made
  /// again from what this process has read and written; where the folder itself was moved or removed, all
  /// that reads or writes the manifest throws EnvironmentError.
  static RunDirectory open(const std::string& path);

  /// Moves a run that was made elsewhere on the same disk to `root`, and points `root`/latest at it: from
  /// then on it is one of its runs, with all that is in it. Throws EnvironmentError.
  RunDirectory move_to(const std::string& root) const;

  /// Absolute. A run that a link in its parent folder stands for lies where the link is.
  const std::string& path() const { return path_; }
  std::string file(const std::string& relative) const { return path_ + "/" + relative; }

  /// The exit code in the manifest; none: the run still goes on, or was killed with its launcher.
  std::optional<int> exit_code() const;

  /// Whether the run has come to its end and is still as that attempt has left it: one that was refused or
  /// trained nothing later does not count.
  bool has_finished() const;

  /// Attempt `number`, counted from 1, goes on in this directory: set_summary_aside() for the attempt before,
  /// then note_attempt(). Nothing where manifest.json has that attempt already.
  void begin_attempt(int64_t number, const Manifest& manifest) const;
  /// Renames the summary.json of attempt `attempt`, counted from 1, to summary.attempt-N.json: the run goes
  /// on, and may end without a summary.
  void set_summary_aside(int64_t attempt) const;
  /// Adds an attempt to manifest.json, whose device, mesh and ranks become those of the run, and clears the
  /// end time and exit code. The run becomes the newest of its parent folder, and a link `latest` there is
  /// made to point at it. Files that a killed process has not finished are removed.
  void note_attempt(const Manifest& manifest) const;

  /// Notes in manifest.json that the current attempt has resumed after `step`, and how many steps were lost.
  /// Called before metrics.jsonl is cut.
  void note_resumed(int64_t step) const;

  /// All attempts, the current or last one at the end.
  std::vector<Attempt> attempts() const;

  /// The last step of metrics.jsonl; none: it has none.
  std::optional<int64_t> last_step() const;

  /// Makes `yaml` the config that the run goes on with. An earlier config with other values stays as
  /// config.attempt-N.yaml of the attempt before; values that did not change keep the origins that it gives.
  /// `files` (Manifest::files) replace the run's copies in the same way; others stay.
  void replace_config(const std::string& yaml, const std::map<std::string, std::string>& files = {}) const;

  /// Makes this process the one that writes to the run; none: another one does. Throws EnvironmentError.
  std::optional<LockFile> hold() const;
  /// The number of the process that does, or that writes its checkpoints (writer()); none: it does not run.
  std::optional<std::string> holder() const;
  /// The number of the process that holds checkpoints/LOCK, as a run does while it can save.
  std::optional<std::string> writer() const;
  /// writer() of a run whose launcher was killed: its ranks are about to end.
  std::optional<std::string> orphan() const;

  /// Completes manifest.json with the end time and the exit code, and its last attempt with its end.
  void finish(const AttemptEnd& end) const;
  void finish(int exit_code) const { finish({.exit_code = exit_code}); }

  /// Throws EnvironmentError when the folder that was opened is no longer at path().
  void check_there() const;

 private:
  class Known;

  explicit RunDirectory(std::string path);

  std::string path_;
  std::shared_ptr<Known> known_;  ///< of the manifest, by this process
};

/// `path` as a user would type it: relative where it lies below the current folder.
std::string as_typed(const std::string& path);

/// How a user goes on with `run`, given as typed: "trireme train --resume RUN -n 4", or the program that has
/// trained it in place of the first two words. `ranks` as the user asked for them; 0: as many as there are by
/// default.
std::string resume_command(const std::string& run, int64_t ranks);
/// "trireme train RUN/config.yaml -n 4".
std::string again_command(const std::string& run, int64_t ranks);

/// Paths of the run directories below `root`, newest first: by the sequence number that each got when it last
/// began or went on, so that no clock has a say. With a name only those that were made with it. A link to a
/// run elsewhere counts, and a folder whose manifest cannot be read is left out with a warning.
std::vector<std::string> list_runs(const std::string& root, const std::string& name = {});

/// The attempt with which a run goes on.
struct Continuation {
  int64_t attempt = 0;  ///< the number of the attempt, which begins when the run has gone on; 0: it has begun
  /// Its config_yaml becomes config.yaml, and its files replace the run's; empty: they stay.
  Manifest manifest = {};
};

/// metrics.jsonl and summary.json: a line of to_json_line() a step, and one at the end. `next` takes effect
/// once the run has gone on from a checkpoint: one that the checkpoint refuses leaves the run as it was.
std::unique_ptr<Sink> make_run_files_sink(const RunDirectory& run, Continuation next = {});

/// tensorboard/events.out.tfevents.*: scalars loss, val_loss, grad_norm, lr, tokens_per_s, step_ms,
/// steps_per_s, peak_bytes; tflops_per_rank, loss_scale, communication_ms, exposed_ms and communication_share
/// where metrics.jsonl has numbers; val_top1 and val_top5 of images; and active_bytes and reserved_bytes of
/// GPUs.
std::unique_ptr<Sink> make_tensorboard_sink(const RunDirectory& run);

/// Writes pictures/curves.svg at the end, of all that metrics.jsonl has by then: it must come after the sink
/// of the run's files. `name` is its title.
std::unique_ptr<Sink> make_curves_sink(const RunDirectory& run, std::string name);

/// One StepRecord as one line of JSON, and the summary object. Non-finite numbers are strings; null stands
/// where nothing was measured. A step has step, loss, grad_norm, lr, tokens, tokens_per_s, tflops_per_rank,
/// step_ms, steps_per_s, communication_ms, exposed_ms, communication_share (exposed_ms / step_ms),
/// peak_bytes; on a GPU active_bytes and reserved_bytes; loss_scale and skipped under loss scaling; val_loss
/// when it validated, of images val_top1 and val_top5, shares that were right; images count as tokens;
/// checkpoint_ms, what it waited for, when it was saved. The summary has what RunSummary and RunCost have,
/// with predicted and measured numbers side by side; its weights is the path of the final ones or null, its
/// stop_signal the number of the signal that ended the run early or null.
std::string to_json_line(const StepRecord& record);
/// The summary as one line, without a newline.
std::string to_json_line(const RunSummary& summary);

}  // namespace trireme::report
