#pragma once
// Finding the store of a job: rank 0 hosts it on a socket that we bind ourselves, the others connect. torch's
// own server socket would listen on every interface. Internal to this room.
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "trireme/comm/bounded_store.h"
#include "trireme/plan/world.h"

namespace trireme::comm {

struct Rendezvous {
  c10::intrusive_ptr<BoundedStore> store;  ///< keys carry the job's prefix
  std::string where;                       ///< "127.0.0.1:29500"
  std::string address;                     ///< numeric address at which the other ranks reach this one
  bool hosts_store = false;
};

/// Opens the store. Throws CommError when the port is in use, the address is not of this host, or no store
/// answers there until `timeout_s` has passed.
Rendezvous open_rendezvous(const plan::WorldSpec& spec, double timeout_s);

/// This process is `rank` of the world that meets in `store`. Throws CommError when another process is: the
/// two would count as one, and all wait for the rank that neither is.
void claim_rank(BoundedStore& store, int64_t rank);

/// What every key of the job begins with: other jobs at the same store, earlier attempts of this one, and
/// processes that do not know the job's key use other keys.
std::string store_prefix(const plan::WorldSpec& spec);

}  // namespace trireme::comm
