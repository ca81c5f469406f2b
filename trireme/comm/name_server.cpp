#include "trireme/comm/name_server.h"

#include <c10/util/Logging.h>
#include <resolv.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace trireme::comm {
namespace {

/// torch's level of words is the process's, and several threads may open stores at once.
std::mutex level_mutex;
constexpr int kErrorsOnly = 2;  // of the levels of c10/util/Logging.h
int holding_back = 0, level_before = 0;

}  // namespace

// The resolver's state belongs to the thread. A question to no server fails at once, and the resolver keeps a
// state that was changed.
WithoutNameServer::WithoutNameServer() {
  const std::lock_guard lock(level_mutex);
  if ((_res.options & RES_INIT) == 0) ::res_init();
  servers_ = std::exchange(_res.nscount, 0);
  if (holding_back++ > 0) return;
  level_before = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = std::max(level_before, kErrorsOnly);
}

WithoutNameServer::~WithoutNameServer() {
  _res.nscount = servers_;
  const std::lock_guard lock(level_mutex);
  if (--holding_back == 0) FLAGS_caffe2_log_level = level_before;
}

}  // namespace trireme::comm
