#pragma once
// How the ranks of a group agree before they go on together, so that none waits for one that has failed. The
// host waits in each of these functions, and all are collective.
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/comm/group.h"

namespace trireme::comm {

/// Base of what is thrown on a rank that has not failed itself; it is also the typed error of the exit code
/// of the rank that has, which throws its own error.
class FailedElsewhere {
 public:
  explicit FailedElsewhere(const Error& error) : code_(error.exit_code()), text_(error.what()) {}
  virtual ~FailedElsewhere() = default;
  ExitCode exit_code() const { return code_; }
  const char* what() const { return text_.c_str(); }

 private:
  ExitCode code_;
  std::string text_;
};

/// Exit code and text of an error; kOk and an empty text for null.
std::pair<ExitCode, std::string> code_and_text(const std::exception_ptr& error);

/// Whether `mine` is true on any rank.
bool any_rank(Group& group, bool mine);

/// The `text` of group rank `root`, on all ranks.
std::string text_of(Group& group, int64_t root, std::string text);

/// Returns every rank's `values`, by group rank, unless a rank has failed: `mine` is the error of this rank,
/// null: none. Then all ranks throw, and each returns from the last message before any of them does. The
/// lowest exit code counts, and of ranks with the same code the first. Ranks that failed with that code throw
/// their own error, the others one that is both FailedElsewhere and of its type: "[where] rank 1 failed:
/// text".
std::vector<std::vector<double>> gather_or_throw(Group& group, std::vector<double> values,
                                                 const std::exception_ptr& mine, std::string_view where);

/// Throws on all ranks, as gather_or_throw(), where a rank has failed.
void throw_together(Group& group, const std::exception_ptr& mine, std::string_view where);

}  // namespace trireme::comm
