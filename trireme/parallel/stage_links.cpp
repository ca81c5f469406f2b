#include "trireme/parallel/stage_links.h"

#include <ATen/ATen.h>

#include <set>

#include "trireme/base/error.h"
#include "trireme/comm/world.h"

namespace trireme::parallel {
namespace {

using plan::Action;
using plan::ActionKind;
using plan::Message;

constexpr int64_t kMostDims = 8;
constexpr int64_t kShapeNumbers = kMostDims + 2;  // dtype, dims, sizes

}  // namespace

std::string StageLinks::Boundary::in_words() const {
  return fmt::format("({}) {}", fmt::join(sizes, ", "), c10::toString(dtype));
}

StageLinks::StageLinks(comm::World& world, std::vector<int64_t> ranks, const plan::StageActions& program)
    : device_(world.device()) {
  // In one order on all ranks, since both ends meet.
  std::map<std::pair<int64_t, int64_t>, int64_t> pairs;  // of global ranks: the peer in the pipeline
  for (const Action& action : program) {
    if (!action.is_message()) continue;
    const int64_t peer = ranks.at(static_cast<size_t>(action.peer));
    const bool sends = action.kind == ActionKind::kSend;
    pairs[sends ? std::pair(world.rank(), peer) : std::pair(peer, world.rank())] = action.peer;
  }
  for (const auto& [pair, peer] : pairs) {
    const auto& [from, to] = pair;
    auto link = comm::make_link(world, from, to);
    (from == world.rank() ? outgoing_[peer] : incoming_[peer].link) = std::move(link);
  }
}

void StageLinks::send(const Action& action, const at::Tensor& tensor) {
  const at::Tensor contiguous = tensor.contiguous();
  comm::Link& link = *outgoing_.at(action.peer);
  if (action.message != Message::kGradient) {
    const Boundary boundary{contiguous.scalar_type(), contiguous.sizes().vec()};
    const auto [known, is_new] = shapes_.emplace(item_of(action), boundary);
    if (is_new) {
      send_shape(link, contiguous);
      // Its gradient comes back in the same shape.
      if (action.message == Message::kActivation)
        shapes_.emplace(Item{Message::kGradient, action.stage - 1, action.micro_batch}, boundary);
    } else {
      check_shape(action, known->second, boundary);
    }
  }
  link.send(contiguous);
  if (const auto back = incoming_.find(action.peer); back != incoming_.end()) post_known(back->second);
}

void StageLinks::check_shape(const Action& action, const Boundary& before, const Boundary& now) const {
  if (now == before) return;
  if (action.message != Message::kActivation) {
    throw LogicError(
        "[parallel.pipeline] '{}' has {} for micro-batch {}, but had {} in the first step; use micro-batches "
        "of the same shapes in every step",
        plan::stage_text(action), now.in_words(), action.micro_batch, before.in_words());
  }
  throw LogicError(
      "[parallel.pipeline] stage {} produced {} for micro-batch {}, but stage {} received {} in the first "
      "step; use micro-batches of the same shapes in every step",
      action.stage - 1, now.in_words(), action.micro_batch, action.stage, before.in_words());
}

void StageLinks::send_shape(comm::Link& link, const at::Tensor& tensor) const {
  TRIREME_CHECK(tensor.dim() <= kMostDims,
                "[parallel.pipeline] a stage produced a tensor of {} dimensions, which is too many",
                tensor.dim());
  std::vector<int64_t> numbers(kShapeNumbers, 0);
  numbers[0] = static_cast<int64_t>(tensor.scalar_type());
  numbers[1] = tensor.dim();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) numbers[static_cast<size_t>(dim) + 2] = tensor.size(dim);
  link.send(at::tensor(numbers, at::kLong).to(device_));
}

StageLinks::Boundary StageLinks::receive_shape(comm::Link& link) const {
  at::Tensor numbers = at::empty({kShapeNumbers}, at::TensorOptions().dtype(at::kLong).device(device_));
  link.post(numbers);
  const at::Tensor host = link.wait().cpu();
  const auto* const first = host.const_data_ptr<int64_t>();
  return {static_cast<at::ScalarType>(first[0]), std::vector<int64_t>(first + 2, first + 2 + first[1])};
}

void StageLinks::post(const Action& action) {
  Incoming& incoming = incoming_.at(action.peer);
  incoming.waiting.push_back(action);
  post_known(incoming);
}

void StageLinks::post_known(Incoming& incoming) {
  while (!incoming.waiting.empty() && shapes_.contains(item_of(incoming.waiting.front()))) {
    incoming.link->post(buffer_for(incoming.waiting.front()));
    incoming.waiting.pop_front();
  }
}

at::Tensor StageLinks::take(const Action& action) {
  Incoming& incoming = incoming_.at(action.peer);
  // Messages are taken in the order of posts: what is ahead of the shape has arrived.
  if (!incoming.waiting.empty() && item_of(incoming.waiting.front()) == item_of(action)) {
    shapes_[item_of(action)] = receive_shape(*incoming.link);
    post_known(incoming);
  }
  return incoming.link->wait();
}

at::Tensor StageLinks::buffer_for(const Action& action) {
  const Boundary& shape = shapes_.at(item_of(action));
  const int64_t numel = c10::multiply_integers(shape.sizes);
  at::Tensor& buffer = buffers_[{action.message, action.stage, action.buffer}];
  if (!buffer.defined() || buffer.numel() < numel || buffer.scalar_type() != shape.dtype)
    buffer = at::empty({numel}, at::TensorOptions().dtype(shape.dtype).device(device_));
  return buffer.narrow(0, 0, numel).view(shape.sizes);
}

void StageLinks::settle() {
  for (const auto& [peer, link] : outgoing_) link->settle();
}

void StageLinks::flush() {
  for (const auto& [peer, link] : outgoing_) link->flush();
}

int64_t StageLinks::sent_bytes() const {
  int64_t bytes = 0;
  for (const auto& [peer, link] : outgoing_) bytes += link->sent_bytes();
  return bytes;
}

int64_t StageLinks::buffer_bytes() const {
  int64_t bytes = 0;
  for (const auto& [place, buffer] : buffers_) bytes += static_cast<int64_t>(buffer.nbytes());
  return bytes;
}

void StageLinks::close() noexcept {
  outgoing_.clear();
  incoming_.clear();
}

}  // namespace trireme::parallel
