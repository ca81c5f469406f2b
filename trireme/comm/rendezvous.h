#pragma once
// Finding the store of a job: rank 0 hosts it on a socket that we bind ourselves, the others connect. torch's
// own server socket would listen on every interface. Internal to this room.
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "trireme/comm/bounded_store.h"
#include "trireme/comm/meeting.h"
#include "trireme/plan/world.h"

namespace trireme::comm {

struct Rendezvous {
  c10::intrusive_ptr<BoundedStore> store;  ///< keys carry the job's prefix
  std::string where;                       ///< "127.0.0.1:29500"
  std::string address;                     ///< numeric address at which the other ranks reach this one
  bool hosts_store = false;
};

/// Opens the store. Throws CommError when the port is in use, the address is not of this host, another
/// process is rank 0 already, or no store answers there until `timeout_s` has passed; EnvironmentError when
/// this process is out of descriptors.
Rendezvous open_rendezvous(const plan::WorldSpec& spec, double timeout_s);

/// This process is `rank` of the world that meets in `store`. Throws CommError when another process is: the
/// two would count as one, and all wait for the rank that neither is.
void claim_rank(BoundedStore& store, int64_t rank);

/// Follows the process that hosts the store, rank 0, where that runs on this host.
void follow_host(BoundedStore& store, double longest_s);

/// Throws CommError, and lets whoever waits at `meeting` throw it, when a rank has joined with another
/// WORLD_SIZE than this one.
void agree_on_size(c10d::Store& store, const Meeting& meeting);

/// How many worlds this process has joined at this place of the job. Its next one has keys of its own in the
/// store; all ranks have joined equally many.
int64_t joins_so_far(const plan::WorldSpec& spec);
void note_join(const plan::WorldSpec& spec);

}  // namespace trireme::comm
