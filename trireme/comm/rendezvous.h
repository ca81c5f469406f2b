#pragma once
// Finding the store of a job: rank 0 hosts it on a socket that we bind ourselves, the others connect. torch's
// own server socket would listen on every interface.
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "trireme/plan/world.h"

namespace c10d {
class Store;
}

namespace trireme::comm {

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  ///< keys carry the job's prefix
  std::string where;                      ///< "127.0.0.1:29500"
  std::string address;                    ///< numeric address at which the other ranks reach this one
  bool hosts_store = false;
};

/// Opens the store. Throws CommError when the port is in use, the address is not of this host, or nobody
/// listens there until `timeout_s` has passed.
Rendezvous open_rendezvous(const plan::WorldSpec& spec, double timeout_s);

}  // namespace trireme::comm
