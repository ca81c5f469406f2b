#pragma once
// A call into a library that may never return. Internal to this room.
#include <functional>
#include <string>

namespace trireme::comm {

/// Calls `body` on a thread of its own and waits for it; throws what it throws. Gives up once `timeout_s` has
/// passed, or lost() says why the wait is in vain: then the thread is left behind with all that `body` holds,
/// and ends when the call does. Returns why it gave up, as the middle of a sentence; empty: the call is done.
std::string call_bounded(std::function<void()> body, double timeout_s,
                         const std::function<std::string()>& lost);

}  // namespace trireme::comm
