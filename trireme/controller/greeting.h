#pragma once
// The first words on a connection to the dispatcher, before a thread of its own receives.
#include <string>

#include "trireme/base/env.h"
#include "trireme/controller/address.h"
#include "trireme/controller/messages.h"

namespace trireme::controller {

/// The name of this host, cut to what fits into a message.
std::string this_host();

/// The next frame that is no ping; pings are answered. Throws CommError with the reason when the dispatcher
/// refuses or ends, and when `deadline` passes.
Frame next_of_greeting(Connection& connection, Connection::Clock::time_point deadline);

/// The state of the server at `address`, with who is connected, as an observer gets it. Throws
/// CommError when there is none, or it does not answer in time.
Status ask_status(const Address& address, const Environment& environment, double timeout_s);

}  // namespace trireme::controller
