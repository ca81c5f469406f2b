#include "trireme/comm/link.h"

#include "trireme/base/error.h"
#include "trireme/comm/gpu_link.h"
#include "trireme/comm/host_link.h"
#include "trireme/comm/meeting.h"
#include "trireme/comm/pair_groups.h"
#include "trireme/comm/progress_board.h"
#include "trireme/comm/world.h"

namespace trireme::comm {
namespace {

constexpr const char* kThroughMemory = "memory";

void check_ends(const World& world, int64_t from, int64_t to) {
  const auto inside = [&](int64_t rank) { return rank >= 0 && rank < world.size(); };
  TRIREME_CHECK(inside(from) && inside(to) && from != to && (world.rank() == from || world.rank() == to),
                "[comm.make_link] a link from rank {} to rank {} was requested on rank {} in a world of {}; "
                "the two ranks must differ and be in the world, and only they can make it",
                from, to, world.rank(), world.size());
}

/// The receiver's part: it offers memory and a port, and the sender says which of them it has taken.
std::unique_ptr<ByteStream> listen(c10d::Store& store, Meeting meeting, const std::string& address,
                                   bool shares) {
  const std::unique_ptr<StreamOffer> memory = shares ? offer_memory_stream() : nullptr;
  const std::unique_ptr<StreamOffer> socket = offer_socket_stream(address);
  meet(store, meeting, fmt::format("{}\n{}", memory ? memory->text() : "", socket->text()));
  meeting.place += "/connected";
  const std::string taken = meet(store, meeting, "").front();
  return (taken == kThroughMemory ? memory : socket)->accept(meeting.timeout_s);
}

std::unique_ptr<ByteStream> connect(c10d::Store& store, Meeting meeting) {
  const std::string offers = meet(store, meeting, "").back();
  const size_t end = offers.find('\n');
  TRIREME_CHECK(end != std::string::npos, "[comm.make_link] '{}' is not a valid offer", offers);
  std::unique_ptr<ByteStream> stream = open_memory_stream(offers.substr(0, end));
  const bool through_memory = stream != nullptr;
  if (!stream) stream = open_socket_stream(offers.substr(end + 1), meeting.timeout_s);
  meeting.place += "/connected";
  meet(store, meeting, through_memory ? kThroughMemory : "socket");
  return stream;
}

}  // namespace

std::shared_ptr<Link> make_link(World& world, int64_t from, int64_t to) {
  check_ends(world, from, to);
  LinkEnd end{.name = fmt::format("{}->{}", from, to),
              .from = from,
              .to = to,
              .sends = world.rank() == from,
              .device = world.device(),
              .timeout_s = world.timeout_s(),
              .board = world.board_,
              .news = world.news_};
  if (end.board) end.board->note_group(end.name, {from, to});
  Meeting meeting{.op = "comm.make_link",
                  .where = "to make link " + end.name,
                  .place = world.unique_place("link/" + end.name),
                  .ranks = {from, to},
                  .rank = world.rank(),
                  .timeout_s = world.timeout_s()};
  if (world.device().is_cpu()) {
    std::unique_ptr<ByteStream> stream =
        end.sends ? connect(*world.store_, meeting)
                  : listen(*world.store_, meeting, world.address_, world.peers_.share);
    return make_host_link(std::move(end), std::move(stream));
  }
  const auto exchange = [&](const std::string& mine) {
    meeting.place += "/next";
    const std::vector<std::string> texts = meet(*world.store_, meeting, mine);
    return end.sends ? texts.back() : texts.front();
  };
  std::shared_ptr<Link> link = world.peers_.share ? make_gpu_copy_link(end, exchange) : nullptr;
  if (link) return link;
  PairGroups& pairs = *world.pairs_;
  const std::string mine = pairs.unused(from, to), others = exchange(mine);
  std::shared_ptr<Group> pair = end.sends ? pairs.take(mine, others) : pairs.take(others, mine);
  if (!pair) {
    pair = world.make_group(end.name, {from, to}, {.share = false});
    pairs.add(meeting.place, from, to, pair);
  }
  return make_gpu_link(end, std::move(pair), world.pairs_);
}

}  // namespace trireme::comm
