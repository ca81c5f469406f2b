#pragma once
// Collectives over a group of ranks, each with its cost line. Tensors are contiguous and on the world's
// device. On a GPU every call is enqueued on the current stream and returns at once; on a CPU it returns when
// done. Every wait has the world's deadline: then CommError says which operation, which sequence number, and
// where the other ranks were last seen. On a GPU that error comes from the next call of the group, or from
// check(). After an error a group is broken for good. A group of one only copies. One thread of a rank uses a
// group at a time.
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/choices.h"
#include "trireme/plan/cost.h"

namespace at {
class Tensor;
}

namespace trireme::comm {

/// How all_reduce() combines the values of the ranks.
enum class ReduceOp { kSum, kMax, kMin };

/// What copies the bytes of an all-gather between GPUs that map each other's memory: kernels are faster, copy
/// engines leave the multiprocessors to computation.
using plan::GatherBy;

/// How ranks of one host use each other's memory. All ranks of a world pass the same options.
struct PeerOptions {
  bool share = true;  ///< read each other's memory where that is possible, instead of sending messages
  GatherBy gather = GatherBy::kAuto;
  /// The way of ordered sums: kCopies brings with copy engines what is then added; else kernels do both.
  GatherBy sum = GatherBy::kAuto;
};

/// What this rank has moved in a group, counted where it moves: what it copied out of other ranks' memory, or
/// what it gave the backend for other ranks. plan/cost.h predicts it.
struct Traffic {
  int64_t calls = 0;
  int64_t bytes = 0;  ///< between this rank and others; each rank counts its share
};

/// Ranks that call collectives together. Tensors are contiguous and on device(). On a GPU operations are
/// enqueued on the current stream; on a CPU they are done when the call returns. All throw LogicError for
/// arguments that do not fit, and CommError when a rank is lost, late, or calls something else.
class Group {
 public:
  virtual ~Group() = default;

  virtual const std::string& name() const = 0;
  virtual int64_t rank() const = 0;  ///< within the group
  virtual int64_t size() const = 0;
  virtual const std::vector<int64_t>& ranks() const = 0;  ///< global ranks by group rank

  /// In place, in the same order of summation on every rank. steps 2(n-1), bytes 2S(n-1)/n per rank. Where
  /// memory is shared, up to 64 KiB are gathered and summed by every rank: steps n-1, bytes S(n-1). A NaN of
  /// any rank stays one, also in maxima and minima, for which bf16 and fp16 travel in 4 bytes each
  virtual void all_reduce(at::Tensor& tensor, ReduceOp op) = 0;
  /// output (n*m), input (m), which may be this rank's slot of output. steps n-1, bytes S(n-1)/n, S = output
  virtual void all_gather(at::Tensor& output, const at::Tensor& input) = 0;
  /// output (m), input (n*m), sum in the backend's own order. steps n-1, bytes S(n-1)/n, S = input; over
  /// Gloo, which has only an all-reduce, twice that
  virtual void reduce_scatter(at::Tensor& output, const at::Tensor& input) = 0;
  /// The shard of the sum over ranks that this rank owns, summed in fp32 in a fixed pairwise tree over group
  /// ranks (contiguous groups first), whatever the dtype on the wire: an all-to-all of shards, then a local
  /// sum. Every policy and every backend gives the same bits. output (m) fp32, which may be this rank's slot
  /// of input; input (n*m) fp32 or bf16. bytes S(n-1)/n, counted as all-to-all
  virtual void reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) = 0;
  /// output and input (n*m): chunk i goes to rank i. bytes S(n-1)/n
  virtual void all_to_all(at::Tensor& output, const at::Tensor& input) = 0;
  /// From group rank `root` to all. bytes S
  virtual void broadcast(at::Tensor& tensor, int64_t root) = 0;
  /// In place on group rank `root`, sums in the backend's own order; on other ranks the tensor holds no
  /// particular values afterwards. They may be done before root has come. bytes S from every rank but root,
  /// which over Gloo gives S(n-1)/n. A NaN stays one, as in all_reduce()
  virtual void reduce(at::Tensor& tensor, ReduceOp op, int64_t root) = 0;
  /// To group rank `root`: output (n*m) by rank, which other ranks do not use and may leave undefined; input
  /// (m), which may be root's slot of output. Other ranks may be done before root has come. bytes S/n from
  /// every rank but root, S = output
  virtual void gather(at::Tensor& output, const at::Tensor& input, int64_t root) = 0;
  /// From group rank `root`: input (n*m), whose chunk i goes to rank i, and which other ranks do not use and
  /// may leave undefined; output (m), which may be root's slot of input. Root may be done before the others
  /// have come. bytes S(n-1)/n from root, S = input
  virtual void scatter(at::Tensor& output, const at::Tensor& input, int64_t root) = 0;
  /// To group rank `to`, which calls recv() with as many bytes; sends to one rank arrive in their order. On a
  /// CPU it returns when the other side has taken the tensor; on a GPU it is enqueued. bytes S
  virtual void send(const at::Tensor& tensor, int64_t to) = 0;
  /// Overwrites all of `tensor` with what group rank `from` sends; shape and dtype are the sender's. On a CPU
  /// it returns when the tensor is complete; on a GPU it is enqueued. bytes S
  virtual void recv(at::Tensor& tensor, int64_t from) = 0;
  /// send() and recv() at once: `mine` leaves for `to` while `theirs` arrives. All ranks call it, each as the
  /// `from` of its `to`. On a GPU both directions share a launch. bytes S, counted as a send
  virtual void send_recv(const at::Tensor& mine, int64_t to, at::Tensor& theirs, int64_t from) = 0;
  /// The host waits until every rank of the group has arrived.
  virtual void barrier() = 0;

  virtual const std::map<plan::Collective, Traffic>& traffic() const = 0;

  /// Names what the following operations work on ("unit block3"), for error messages; empty ends that. Where
  /// ranks share memory, an operation throws CommError on ranks that gave it different subjects.
  virtual void set_subject(std::string_view subject) = 0;

  virtual c10::Device device() const = 0;
  /// Throws CommError when an operation that was enqueued on the GPU has failed since the last call. Call it
  /// after the host has waited for the GPU, before results are used.
  virtual void check() = 0;
  /// A 1-D byte tensor of at least `bytes` on the device, for temporaries. Each stream has one, which all
  /// calls on that stream return: use it only for work on the current stream.
  virtual at::Tensor scratch(int64_t bytes) = 0;

  /// An uninitialised (count) tensor for inputs of all_gather() and reduce_scatter_ordered(). Where ranks map
  /// each other's memory, the other ranks read such inputs in place; other inputs go through the backend. An
  /// input is at the same offset in the tensor on all ranks, or is this rank's slot of the output. On a GPU
  /// the memory is freed when the group ends. Collective: every rank calls it with the same arguments; the
  /// host waits.
  virtual at::Tensor symmetric_empty(int64_t count, c10::ScalarType dtype) = 0;
  /// Device memory that symmetric_empty() has allocated; torch's allocator does not count it.
  virtual int64_t symmetric_bytes() const = 0;
};

/// Sets the subject of a group's operations as long as it lives.
class Subject {
 public:
  Subject(Group& group, std::string_view subject) : group_(group) { group_.set_subject(subject); }
  ~Subject() { group_.set_subject({}); }
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

 private:
  Group& group_;
};

/// Every rank's `values`, by group rank: (n, k). The host waits for it.
std::vector<std::vector<double>> gather_scalars(Group& group, const std::vector<double>& values);
/// The same for (k) values on the group's device: (n, k) there. On a GPU the host does not wait.
at::Tensor gather_rows(Group& group, const at::Tensor& values);
/// (n, k) fp64 as numbers; the host waits for them.
std::vector<std::vector<double>> to_numbers(const at::Tensor& rows);
/// A 64-bit word for gather_scalars(): its upper and its lower half, which doubles hold exactly.
std::array<double, 2> in_halves(uint64_t word);
/// The word that in_halves() has taken apart.
uint64_t from_halves(double upper, double lower);

}  // namespace trireme::comm
