#include "trireme/comm/world.h"

#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "trireme/base/build_info.h"
#include "trireme/base/clock.h"
#include "trireme/base/cores.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/flight_record.h"
#include "trireme/base/hash.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/log.h"
#include "trireme/comm/backend_group.h"
#include "trireme/comm/bounded_call.h"
#include "trireme/comm/bounded_store.h"
#include "trireme/comm/cause.h"
#include "trireme/comm/meeting.h"
#include "trireme/comm/open_files.h"
#include "trireme/comm/pair_groups.h"
#include "trireme/comm/peer_memory.h"
#include "trireme/comm/peer_news.h"
#include "trireme/comm/process_id.h"
#include "trireme/comm/progress_board.h"
#include "trireme/comm/rendezvous.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/repeatable.h"

namespace trireme::comm {

struct World::Seat {
  c10::intrusive_ptr<BoundedStore> store = {};
  int64_t rank = 0;
  int64_t size = 1;
  c10::Device device = c10::kCPU;
  double timeout_s = 0.0;
  std::string address = "127.0.0.1";
  bool hosts_store = false;
  bool rank_0_hosts_store = false;
  std::string store_host = "the process that hosts it";
  PeerOptions peers;
  std::vector<ProcessId> processes = {};      ///< by rank
  std::shared_ptr<FlightRecord> record = {};  ///< our launcher's
};

namespace {

constexpr double kFarewell_s = 5.0;
constexpr double kFarewellAfterFailure_s = 1.0;
// Limits of store calls in reports: the launcher kills ranks a few seconds after the first failure.
constexpr double kBoardWait_s = 0.5;
constexpr double kReportSilence_s = 1.5;
constexpr double kReportCalls_s = 3.0;               ///< all together
constexpr size_t kMaxSharedBytes = size_t{4} << 20;  // the store refuses values above 8 MiB

std::vector<int64_t> ranks_below(int64_t size) {
  std::vector<int64_t> ranks(static_cast<size_t>(size));
  for (int64_t r = 0; r < size; ++r) ranks[static_cast<size_t>(r)] = r;
  return ranks;
}

std::string build_name() {
  return fmt::format("trireme {}, torch {}", kVersion, kTorchVersion);
}

/// Greetings are "build\nprocess". Returns the processes.
std::vector<ProcessId> read_greetings(const std::vector<std::string>& greetings) {
  const auto build_of = [](const std::string& greeting) { return greeting.substr(0, greeting.find('\n')); };
  std::vector<ProcessId> processes;
  for (size_t r = 0; r < greetings.size(); ++r) {
    const std::string build = build_of(greetings[r]), first = build_of(greetings[0]);
    if (build != first) {
      throw EnvironmentError(
          "[comm.join] rank {} runs {}, but rank 0 runs {}; install the same build on every host", r, build,
          first);
    }
    processes.push_back(parse_process(greetings[r].substr(std::min(build.size() + 1, greetings[r].size()))));
  }
  return processes;
}

/// Gloo writes to sockets whose other end may be closed: the write must fail, and not end the process.
void ignore_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

/// Exchanges builds and processes with all other ranks. The store ends with its host, so a host that gives up
/// first lets the others read why.
void arrive(World::Seat& seat, const std::string& where, double timeout_s) {
  const Meeting meeting{.op = "comm.join",
                        .where = where,
                        .place = "arrived",
                        .ranks = ranks_below(seat.size),
                        .rank = seat.rank,
                        .timeout_s = timeout_s};
  const std::string greeting = fmt::format("{}\n{}", build_name(), to_text(own_process()));
  try {
    seat.store->setTimeout(std::chrono::milliseconds(std::llround(seat.timeout_s * 1000.0)));
    claim_rank(*seat.store, seat.rank);
    if (seat.rank_0_hosts_store) follow_host(*seat.store, seat.timeout_s);
    agree_on_size(*seat.store, meeting);
    ProgressBoard::enter(*seat.store, seat.rank);
    seat.processes = read_greetings(meet(*seat.store, meeting, greeting));
  } catch (const StoreLost&) {
    throw;
  } catch (const Error&) {
    if (seat.hosts_store) {
      end_meeting(*seat.store, meeting, {});
      std::this_thread::sleep_for(std::chrono::duration<double>(kFarewellAfterFailure_s));
    }
    throw;
  } catch (const c10::Error& error) {
    throw_if_out_of_descriptors("comm.join");
    throw StoreLost(
        "[comm.join] rank {} lost the connection to the store {} ({}); check that the process that hosts it "
        "is still running",
        seat.rank, where, cause_of(error));
  }
}

std::shared_ptr<ProgressBoard> make_board(const World::Seat& seat) {
  try {
    const auto store = seat.store->clone(kBoardWait_s);
    return std::make_shared<ProgressBoard>(
        store, seat.rank,
        ProgressBoard::Options{.listens = !seat.device.is_cpu(),
                               .host = seat.store_host,
                               .record = seat.record,
                               .hurry = [store] { store->limit_rest(kReportSilence_s, kReportCalls_s); }});
  } catch (const c10::Error& error) {
    throw_if_out_of_descriptors("comm.join");
    throw CommError(
        "[comm.join] rank {} lost the connection to the store ({}); check that {} is still running",
        seat.rank, cause_of(error), seat.store_host);
  }
}

/// The record that a launcher of this host reads when ranks have died; training goes on without it.
std::shared_ptr<FlightRecord> launchers_record(int64_t rank) {
  const auto descriptor = Environment::process().get_int("TRIREME_FLIGHT_FD");
  if (!descriptor) return nullptr;
  try {
    const auto record =
        std::make_shared<FlightRecord>(FlightRecord::open(static_cast<int>(*descriptor), rank));
    record->note_joined();
    return record;
  } catch (const EnvironmentError& error) {
    log_debug("{}", error.what());
    return nullptr;
  }
}

/// Torch would take all cores of each rank's affinity mask, and threads of ranks that share cores wait for
/// each other. Ranks that were bound to cores of their own keep these, and OMP_NUM_THREADS is the user's
/// word.
void share_cores(const std::vector<ProcessId>& processes) {
  if (Environment::process().get("OMP_NUM_THREADS")) return;
  const int64_t sharing = processes_on_our_cores(processes);
  if (sharing > 1) at::set_num_threads(static_cast<int>(std::max<int64_t>(1, usable_cores() / sharing)));
}

World::Seat take_seat(const plan::WorldSpec& spec, c10::Device device, double timeout_s, PeerOptions peers,
                      double deadline) {
  Rendezvous met = open_rendezvous(spec, deadline - monotonic_seconds());
  World::Seat seat{
      .store = met.store,
      .rank = spec.rank,
      .size = spec.world_size,
      .device = device,
      .timeout_s = timeout_s,
      .address = met.address,
      .hosts_store = met.hosts_store,
      .rank_0_hosts_store = !spec.agent_store,
      .store_host = fmt::format("{} at {}", spec.agent_store ? "the agent" : "rank 0", met.where),
      .peers = peers,
      .processes = {},
      .record = spec.launcher == "trireme" ? launchers_record(spec.rank) : nullptr};
  arrive(seat, "at " + met.where, deadline - monotonic_seconds());
  share_cores(seat.processes);
  note_join(spec);
  return seat;
}

void check_deadline(double timeout_s) {
  constexpr double kLongest_s = 86400.0;  // torch counts in nanoseconds, and nobody waits for longer
  TRIREME_CHECK(timeout_s > 0.0 && timeout_s <= kLongest_s,
                "[comm.join] the timeout is {} s; it must be above 0 and at most {} s", timeout_s,
                kLongest_s);
}

void check_ranks(const std::string& name, const std::vector<int64_t>& ranks, int64_t rank, int64_t size) {
  std::vector<int64_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const bool unique = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  const bool inside = !sorted.empty() && sorted.front() >= 0 && sorted.back() < size;
  const bool member = std::binary_search(sorted.begin(), sorted.end(), rank);
  TRIREME_CHECK(unique && inside && member,
                "[comm.make_group] group {} of ranks ({}) was requested on rank {} in a world of {}; the "
                "ranks must differ, be in the world and include this one",
                name, fmt::join(ranks, ", "), rank, size);
}

/// The store through which the ranks of a new backend find each other. With Gloo every rank asks for the
/// address of every other one: these go through one meeting.
c10::intrusive_ptr<c10d::Store> connecting_store(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const Meeting& meeting, c10::Device device) {
  if (device.is_cpu()) return exchange_through_meetings(store, meeting);
  return c10::make_intrusive<c10d::PrefixStore>(meeting.place, store);
}

/// `lost` says why a rank of the group need not be waited for. Returns why there is no backend; empty: there
/// is one. NCCL is called by this thread, whose GPU is the rank's.
std::string connect(const BackendSpec& spec, const std::function<std::string()>& lost,
                    c10::intrusive_ptr<c10d::Backend>& backend) {
  try {
    if (!spec.device.is_cpu()) {
      backend = make_nccl_backend(spec);
      return {};
    }
    const auto made = std::make_shared<c10::intrusive_ptr<c10d::Backend>>();
    std::string gave_up =
        call_bounded([spec, made] { *made = make_gloo_backend(spec); }, spec.timeout_s, lost);
    if (gave_up.empty()) backend = std::move(*made);
    return gave_up;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw_if_out_of_descriptors("comm.make_group");
    throw CommError(
        "[comm.make_group] group {} of ranks ({}) cannot be connected ({}); look at the logs of these ranks",
        spec.name, fmt::join(spec.ranks, ", "), cause_of(error));
  }
}

/// `use` counts the groups of this name and these ranks.
c10::intrusive_ptr<c10d::Backend> connect_or_throw(const BackendSpec& spec, int64_t use, ProgressBoard& board,
                                                   const PeerNews& news) {
  c10::intrusive_ptr<c10d::Backend> backend;
  const double started = monotonic_seconds();
  const std::string gave_up = connect(
      spec, [&] { return news.about(spec.ranks); }, backend);
  if (gave_up.empty()) return backend;
  const double waited_s = monotonic_seconds() - started;
  throw CommError(
      "[comm.make_group] connecting group {} of ranks ({}) {} on rank {} after {:.1f} s (deadline {:g} s): "
      "{}; look at the log of the missing rank, and raise the timeout if it is only slow",
      spec.name, fmt::join(spec.ranks, ", "), gave_up, spec.ranks[static_cast<size_t>(spec.rank)], waited_s,
      spec.timeout_s, board.report_failure({"make_group", use, spec.name}, spec.ranks).text);
}

/// What the ranks of a group offer each other of their memory.
struct MemoryOffers {
  std::unique_ptr<MemoryOffer> mine;  ///< none: this rank keeps its memory to itself
  std::vector<std::string> all;       ///< by group rank
};

MemoryOffers exchange_offers(c10d::Store& store, const Meeting& meeting, const BackendSpec& spec,
                             const PeerOptions& options) {
  MemoryOffers offers;
  if (options.share) {
    const auto size = static_cast<int64_t>(spec.ranks.size());
    offers.mine = offer_memory(spec.rank, size, spec.device, options);
  }
  offers.all = meet(store, meeting, offers.mine ? offers.mine->text() : "");
  return offers;
}

/// The memory of the other ranks where every rank has mapped it; none otherwise. All ranks have connected
/// when this returns: a rank that drops the group at once breaks nobody's connections.
std::unique_ptr<PeerMemory> agree_on_peers(c10d::Store& store, const Meeting& meeting,
                                           const MemoryOffers& offers) {
  auto peers = offers.mine ? offers.mine->accept(offers.all, meeting.timeout_s) : nullptr;
  const std::vector<std::string> have_peers = meet(store, meeting, peers ? "shares memory" : "");
  if (std::ranges::count(have_peers, "") > 0) peers.reset();
  return peers;
}

}  // namespace

std::shared_ptr<World> World::join(const plan::WorldSpec& spec, c10::Device device, double timeout_s,
                                   PeerOptions peers) {
  if (spec.world_size == 1) return join_store({}, 0, 1, device, timeout_s);
  check_deadline(timeout_s);
  const double deadline = monotonic_seconds() + timeout_s;
  for (;;) {
    try {
      return std::make_shared<World>(take_seat(spec, device, timeout_s, peers, deadline));
    } catch (const StoreLost&) {
      // A rank that joins its next world may still find the store of its last world, which the store's host
      // is about to end.
      const bool has_joined = joins_so_far(spec) > 0 && spec.rank != 0;
      if (!has_joined || monotonic_seconds() >= deadline) throw;
    }
  }
}

std::shared_ptr<World> World::join_environment(double timeout_s) {
  const plan::WorldSpec spec = plan::detect_world(Environment::process());
  return join(spec, take_device(plan::Device::kAuto, spec), timeout_s);
}

c10::Device take_device(plan::Device device, const plan::WorldSpec& spec) {
  using plan::Device;
  if (device == Device::kCpu || (device == Device::kAuto && kernels::gpus().empty())) return c10::kCPU;
  kernels::set_gpu(spec.local_rank);
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(spec.local_rank)};
}

std::shared_ptr<World> World::join_store(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size,
                                         c10::Device device, double timeout_s, PeerOptions peers) {
  TRIREME_CHECK(rank >= 0 && rank < size, "[comm.join] rank {} is outside a world of {} ranks", rank, size);
  check_deadline(timeout_s);
  Seat seat{.rank = rank, .size = size, .device = device, .timeout_s = timeout_s, .peers = peers};
  if (size > 1) seat.store = c10::make_intrusive<BoundedStore>([store] { return store; }, kStoreAnswer_s);
  if (size > 1) arrive(seat, "in the given store", timeout_s);
  return std::make_shared<World>(std::move(seat));
}

World::World(Seat seat)
    : store_(seat.store),
      rank_(seat.rank),
      size_(seat.size),
      device_(seat.device),
      timeout_s_(seat.timeout_s),
      address_(std::move(seat.address)),
      hosts_store_(seat.hosts_store),
      peers_(seat.peers) {
  ignore_broken_pipes();
  kernels::choose_vector_functions();  // ranks may be threads of one process
  TRIREME_CHECK(device_.is_cpu() || device_.has_index(), "[comm.join] device {} has no index", device_.str());
  if (size_ == 1) return;
  pairs_ = std::make_shared<PairGroups>();
  board_ = make_board(seat);
  news_ = std::make_shared<PeerNews>(seat.processes, board_);
}

World::~World() {
  if (!board_) return;
  const bool failed = board_->failed(), unwinding = std::uncaught_exceptions() > 0;
  if (failed || unwinding) pairs_->abandon();
  pairs_.reset();
  board_->leave();
  if (board_->store_lost()) return;
  try {
    if (store_->add("left/count", 1) == size_) store_->set("left/all", std::vector<uint8_t>{1});
    if (!hosts_store_ || (unwinding && !failed)) return;
    // The store ends with this process: other ranks may still be reading from it.
    wait_for_keys(*store_, {"left/all"}, failed ? kFarewellAfterFailure_s : kFarewell_s);
  } catch (const std::exception&) {
    // The job is over for this rank in any case.
  }
}

std::string World::unique_place(const std::string& place) {
  return fmt::format("{}/{}", place, uses_[place]++);
}

std::shared_ptr<Group> World::make_group(const std::string& name, const std::vector<int64_t>& ranks) {
  return make_group(name, ranks, peers_);
}

std::shared_ptr<Group> World::make_group(const std::string& name, const std::vector<int64_t>& ranks,
                                         PeerOptions peer_options) {
  check_ranks(name, ranks, rank_, size_);
  const int64_t group_rank = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
  BackendSpec spec{.store = {},
                   .name = name,
                   .ranks = ranks,
                   .rank = group_rank,
                   .device = device_,
                   .timeout_s = timeout_s_,
                   .address = address_};
  if (ranks.size() == 1) return make_backend_group(std::move(spec), {}, {}, {}, {});
  if (device_.is_cpu()) require_descriptors("comm.make_group", std::ssize(ranks) - 1);
  board_->note_group(name, ranks);
  const std::string members = hex64(xxh3(fmt::format("{}", fmt::join(ranks, ","))));
  const std::string use = fmt::format("group/{}/{}", name, members), place = unique_place(use);
  Meeting meeting{.op = "comm.make_group",
                  .where = "to make group " + name,
                  .place = place,
                  .ranks = ranks,
                  .rank = rank_,
                  .timeout_s = timeout_s_};
  const MemoryOffers offers = exchange_offers(*store_, meeting, spec, peer_options);
  meeting.place = place + "/connect";
  spec.store = connecting_store(store_, meeting, device_);
  auto backend = connect_or_throw(spec, uses_[use], *board_, *news_);
  meeting.place = place + "/connected";
  auto peers = agree_on_peers(*store_, meeting, offers);
  return make_backend_group(std::move(spec), std::move(backend), std::move(peers), board_, news_);
}

std::string World::share_from_root(const std::string& key, const std::string& text_on_root) {
  if (size_ == 1) return text_on_root;
  const std::string place = unique_place("share/" + key);
  beat();
  try {
    if (rank_ == 0) {
      TRIREME_CHECK(text_on_root.size() <= kMaxSharedBytes,
                    "[comm.share_from_root] '{}' has {} bytes, but the limit is {}", key, text_on_root.size(),
                    kMaxSharedBytes);
      store_->set(place, text_on_root);
      return text_on_root;
    }
    if (wait_for_keys(*store_, {place}, timeout_s_)) return store_->get_to_str(place);
  } catch (const c10::Error& error) {
    throw CommError(
        "[comm.share_from_root] rank {} lost the connection to the store while sharing '{}' ({}); check that "
        "rank 0 is still running",
        rank_, key, cause_of(error));
  }
  const Operation waiting{"share_from_root", uses_["share/" + key], key};
  throw CommError(
      "[comm.share_from_root] rank {} waited {:.1f} s for rank 0 to share '{}': {}; look at the log of rank "
      "0, and raise the timeout if it is only slow",
      rank_, timeout_s_, key, board_->report_failure(waiting, {0}).text);
}

std::vector<std::string> World::gather_texts(const std::string& key, const std::string& text) {
  if (size_ == 1) return {text};
  const Meeting meeting{.op = "comm.gather_texts",
                        .where = fmt::format("to exchange '{}'", key),
                        .place = unique_place("gather/" + key),
                        .ranks = ranks_below(size_),
                        .rank = rank_,
                        .timeout_s = timeout_s_};
  return meet(*store_, meeting, text);
}

void World::announce(const std::string& key, const std::string& text) noexcept {
  if (size_ == 1) return;
  try {
    const auto bytes = [](const std::string& words) {
      return std::vector<uint8_t>(words.begin(), words.end());
    };
    store_->compareSet("told/" + key, {}, bytes(text));
  } catch (const std::exception&) {
    // A rank that fails has its own error to report.
  }
}

std::string World::announced(const std::string& key) noexcept {
  if (size_ == 1) return {};
  try {
    const std::string place = "told/" + key;
    return store_->check({place}) ? store_->get_to_str(place) : std::string();
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace trireme::comm
