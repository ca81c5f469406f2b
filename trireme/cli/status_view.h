#pragma once
// The status of a server, its workers and its client, for people.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/controller/messages.h"

namespace trireme::cli {

/// Seconds that a server may take to answer.
inline constexpr double kStatusAnswer_s = 5.0;

/// A line about the server at `address`, and a table of its workers in at most `columns`, where 0 is no
/// limit. `rates`: instructions a second by worker, in the order of the status; empty: they are not shown.
std::string status_text(const std::string& address, const controller::Status& status,
                        const std::vector<double>& rates, int64_t columns);

/// Instructions a second of the workers of `now`, by what they had done `seconds` before; 0 for workers that
/// were not there, or that have a new client.
std::vector<double> rates_between(const controller::Status& before, const controller::Status& now,
                                  double seconds);

}  // namespace trireme::cli
