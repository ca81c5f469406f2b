#pragma once
// The messages of one rank of a pipeline: a link to and from each rank that it talks to, receive buffers that
// stay, and the shapes of what travels, which the first step finds out.
#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "trireme/comm/link.h"
#include "trireme/plan/lowering.h"

namespace trireme::comm {
class World;
}

namespace trireme::parallel {

class StageLinks {
 public:
  struct Boundary {
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> sizes;
    bool operator==(const Boundary&) const = default;
    std::string in_words() const;
  };
  /// A message, with the stage and the micro-batch of the pass that needs it.
  using Item = std::tuple<plan::Message, int64_t, int64_t>;
  using Shapes = std::map<Item, Boundary>;

  /// Links for the messages of `program`, whose ranks are `ranks` of the world. Collective over those of them
  /// that talk to each other.
  StageLinks(comm::World& world, std::vector<int64_t> ranks, const plan::StageActions& program);

  /// kSend: `tensor` leaves; nobody writes to it afterwards. It must have the shape and dtype that it had in
  /// the first step, else LogicError names the stages.
  void send(const plan::Action& action, const at::Tensor& tensor);
  /// kPost: the message may arrive from now on, or once its shape is known.
  void post(const plan::Action& action);
  /// kRecv: the message, in a buffer that the program posts again when it is not used any more.
  at::Tensor take(const plan::Action& action);

  /// What is known of shapes; messages of a program whose shapes are not known tell them anew. Between two
  /// programs, on all ranks.
  Shapes exchange_shapes(Shapes shapes) { return std::exchange(shapes_, std::move(shapes)); }

  /// As comm::Link::settle(), for all links.
  void settle();
  /// The host waits until everything that was sent has left.
  void flush();
  /// Bytes that this rank has sent.
  int64_t sent_bytes() const;
  /// Bytes of the receive buffers.
  int64_t buffer_bytes() const;
  /// Ends all links: ranks that wait for this one meet an error.
  void close() noexcept;

 private:
  struct Incoming {
    std::shared_ptr<comm::Link> link;
    std::deque<plan::Action> waiting;  ///< posts from the first one whose shape is not known on
  };
  static Item item_of(const plan::Action& action) {
    return {action.message, action.stage, action.micro_batch};
  }
  void send_shape(comm::Link& link, const at::Tensor& tensor) const;
  Boundary receive_shape(comm::Link& link) const;
  void check_shape(const plan::Action& action, const Boundary& before, const Boundary& now) const;
  void post_known(Incoming& incoming);
  at::Tensor buffer_for(const plan::Action& action);

  at::Device device_;
  std::map<int64_t, std::shared_ptr<comm::Link>> outgoing_;  ///< by rank of the pipeline
  std::map<int64_t, Incoming> incoming_;
  Shapes shapes_;
  std::map<std::tuple<plan::Message, int64_t, int64_t>, at::Tensor> buffers_;  ///< with stage and number
};

}  // namespace trireme::parallel
