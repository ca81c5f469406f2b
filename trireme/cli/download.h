#pragma once
// Files from the network by the program curl, which knows proxies, certificates and file systems' limits;
// what arrives is believed once its sum is right.
#include <cstdint>
#include <string>

#include "trireme/base/env.h"

namespace trireme::cli {

struct Remote {
  std::string url;
  int64_t bytes = 0;
  std::string sha256;  ///< lower-case hex
};

/// Puts the file at `path`, unless it is there with this sum. What an earlier call has left at `path` +
/// ".part" is gone on with, if the server can. Throws EnvironmentError when there is no curl or no
/// connection, naming what to put where, and DataError when other bytes came, which are removed.
void download(const Remote& remote, const std::string& path, const Environment& environment);

/// Unpacks a tar.gz of one folder: `archive`'s `folder` appears in `parent` whole, by rename, or not at all.
/// Throws EnvironmentError when tar fails.
void unpack(const std::string& archive, const std::string& folder, const std::string& parent,
            const Environment& environment);

}  // namespace trireme::cli
