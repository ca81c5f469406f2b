#pragma once
// The workers of this thread's program.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "trireme/gt/session.h"

namespace gt {

struct Options {
  std::string signals = {};  ///< a file of signals (docs/guide/signals.md); empty: scopes need none
  bool is_explicit = false;  ///< what would move between workers unasked is an error
  bool auto_shard = false;   ///< outside of scopes tensors are split by rows over all workers
};

/// As long as it lives, this thread's calls make the program of its workers; tensors end with it.
class [[nodiscard]] Workers {
 public:
  /// Throws trireme::ConfigError where the thread has workers, and as plan::load_signals() does.
  Workers(std::shared_ptr<Session> session, const Options& options);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int64_t size() const { return session_->workers(); }
  /// Gives workers what they were not given yet; a fetch does so by itself.
  void flush();

 private:
  std::shared_ptr<Session> session_;
};

}  // namespace gt
