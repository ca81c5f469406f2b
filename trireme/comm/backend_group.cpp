#include "trireme/comm/backend_group.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/comm/cause.h"
#include "trireme/comm/checks.h"
#include "trireme/comm/device_watch.h"
#include "trireme/comm/ordered.h"
#include "trireme/comm/peer_news.h"
#include "trireme/comm/progress_board.h"

namespace trireme::comm {
namespace {

using plan::Collective;
using State = ProgressBoard::State;

constexpr int64_t kSmallBytes = 64 << 10;  // up to here one gather is faster than a ring of messages
constexpr int64_t kMaxExchanged = 512;
/// Operations whose subjects are kept for error messages: a host enqueues about so many ahead of its GPU.
constexpr int64_t kSubjectsRemembered = 1024;
constexpr int kTag = 0;  // messages between two ranks arrive in the order in which they were sent

/// A view of the tensor as bytes, without autograd: backends refuse some dtypes. A single element counts as
/// contiguous whatever its stride is, but cannot be viewed as bytes with any.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

constexpr const char* kLate = "passed its deadline";
constexpr const char* kRankMissing =
    "look at the log of the missing rank, and raise the timeout if it is only slow";
constexpr const char* kRanksDiverged =
    "all ranks are present but ran different operations, as when one has no batch left, takes another path "
    "through the model or has frozen other parameters; all ranks must run the same units in the same order: "
    "with uneven data, validate "
    "within engine.evaluate() and train with any_rank() and shadow_micro_batch()";

constexpr const char* kRankElsewhere =
    "all ranks are present, but one of them waits or has failed in a group with others: look first at the "
    "message of that rank, which says for whom";

const char* advice_for(ProgressBoard::Cause cause) {
  switch (cause) {
    case ProgressBoard::Cause::kDiverged:
      return kRanksDiverged;
    case ProgressBoard::Cause::kElsewhere:
      return kRankElsewhere;
    case ProgressBoard::Cause::kMissing:
      break;
  }
  return kRankMissing;
}

bool is_disagreement(const std::exception& error) {
  return dynamic_cast<const Disagreement*>(&error) != nullptr;
}

/// What happened to an operation that threw, as the middle of a sentence.
std::string explain(const std::exception& error) {
  if (is_disagreement(error)) return error.what();
  const std::string cause = cause_of(error);
  return is_timeout(cause) ? kLate : fmt::format("lost a peer ({})", cause);
}

void copy_within(at::Tensor& output, const at::Tensor& input) {
  if (output.const_data_ptr() != input.const_data_ptr())
    output.detach().view({-1}).copy_(input.detach().view({-1}));
}

c10d::ReduceOp::RedOpType to_torch(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  throw LogicError("[comm.all_reduce] unknown reduce operation {}", static_cast<int>(op));
}

/// Integers in the order of the numbers whose bits these are, and back: the sign stays, and the other bits of
/// negative numbers turn.
at::Tensor turned_below_zero(const at::Tensor& bits) {
  const int64_t places = 8 * static_cast<int64_t>(bits.element_size()) - 1;
  const int64_t others = bits.scalar_type() == at::kLong ? std::numeric_limits<int64_t>::max()
                                                         : std::numeric_limits<int32_t>::max();
  return at::bitwise_xor(bits, at::bitwise_and(at::bitwise_right_shift(bits, places), others));
}

/// Floating-point numbers as integers of the same order, of which NaN is the largest for a maximum and the
/// least for a minimum.
at::Tensor as_integers(const at::Tensor& values, ReduceOp op) {
  const bool is_double = values.scalar_type() == at::kDouble;
  const at::Tensor wide = is_double ? values : values.to(at::kFloat);
  const at::Tensor integers = turned_below_zero(wide.view(is_double ? at::kLong : at::kInt));
  const int64_t most = is_double ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
  return integers.masked_fill(wide.isnan(), op == ReduceOp::kMax ? most : -most - 1);
}

int to_int(int64_t rank) {
  return static_cast<int>(rank);
}

int64_t bytes_in(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

class BackendGroup final : public Group {
 public:
  BackendGroup(BackendSpec spec, c10::intrusive_ptr<c10d::Backend> backend, std::unique_ptr<PeerMemory> peers,
               std::shared_ptr<ProgressBoard> board, std::shared_ptr<PeerNews> news)
      : spec_(std::move(spec)),
        board_(std::move(board)),
        news_(std::move(news)),
        backend_(std::move(backend)),
        peers_(std::move(peers)) {
    spec_.store.reset();
    if (backend_ && !spec_.device.is_cpu()) watch_ = make_watch();
  }
  BackendGroup(const BackendGroup&) = delete;
  BackendGroup& operator=(const BackendGroup&) = delete;
  ~BackendGroup() override;

  const std::string& name() const override { return spec_.name; }
  int64_t rank() const override { return spec_.rank; }
  int64_t size() const override { return static_cast<int64_t>(spec_.ranks.size()); }
  const std::vector<int64_t>& ranks() const override { return spec_.ranks; }
  c10::Device device() const override { return spec_.device; }
  const std::map<Collective, Traffic>& traffic() const override { return traffic_; }

  void all_reduce(at::Tensor& tensor, ReduceOp op) override;
  void all_gather(at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter(at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) override;
  void all_to_all(at::Tensor& output, const at::Tensor& input) override;
  void broadcast(at::Tensor& tensor, int64_t root) override;
  void reduce(at::Tensor& tensor, ReduceOp op, int64_t root) override;
  void gather(at::Tensor& output, const at::Tensor& input, int64_t root) override;
  void scatter(at::Tensor& output, const at::Tensor& input, int64_t root) override;
  void send(const at::Tensor& tensor, int64_t to) override;
  void recv(at::Tensor& tensor, int64_t from) override;
  void send_recv(const at::Tensor& mine, int64_t to, at::Tensor& theirs, int64_t from) override;
  void barrier() override;
  void set_subject(std::string_view subject) override { subject_ = subject; }
  void check() override;
  at::Tensor scratch(int64_t bytes) override;
  at::Tensor symmetric_empty(int64_t count, c10::ScalarType dtype) override;
  int64_t symmetric_bytes() const override { return peers_ ? peers_->allocated_bytes() : 0; }

 private:
  Call call(Collective kind) const { return {plan::name(kind), spec_.name, size(), spec_.device}; }
  Operation next_operation(Collective kind);
  int64_t moved_bytes() const { return given_bytes_ + (peers_ ? peers_->moved_bytes() : 0); }
  template <typename Start>
  void run(Collective kind, int64_t bytes, const Start& start);
  void reduce_in_order(at::Tensor& tensor, ReduceOp op, std::optional<int64_t> root);
  void reduce_among_peers(at::Tensor& tensor, ReduceOp op);
  std::string about_subject() const;
  bool serve(Collective kind, const at::Tensor& input) const { return peers_ && peers_->serves(kind, input); }
  std::vector<std::string> exchange(const std::string& mine);
  void record_failure(const Operation& operation, const std::string& subject, double elapsed_s,
                      const std::string& what, bool disagrees);
  void remember_subject(const Operation& operation);
  std::string subject_of(const Operation& operation);
  std::unique_ptr<DeviceWatch> make_watch();
  void abort(const Operation& operation, double elapsed_s, const std::string& reason);

  BackendSpec spec_;
  std::shared_ptr<ProgressBoard> board_;
  std::shared_ptr<PeerNews> news_;
  c10::intrusive_ptr<c10d::Backend> backend_;  ///< none in a group of one, and on a CPU none after a failure
  std::unique_ptr<PeerMemory> peers_;          ///< where there is none, the backend does everything
  std::map<Collective, Traffic> traffic_;
  int64_t given_bytes_ = 0;                ///< to the backend, for other ranks
  std::map<int64_t, at::Tensor> scratch_;  ///< by stream
  int64_t sequence_ = 0;
  std::string subject_;
  std::map<int64_t, std::string> subjects_;  ///< by sequence number, of operations that the watch may report
  std::mutex subjects_mutex_;
  std::mutex failure_mutex_;
  std::string failure_;
  std::atomic<bool> failed_ = false;
  std::unique_ptr<DeviceWatch> watch_;  ///< last, so that its thread ends before what it uses
};

BackendGroup::~BackendGroup() {
  if (peers_ && !failed_ && std::uncaught_exceptions() == 0) peers_->finish();
  watch_.reset();
  if (!backend_) return;
  try {
    // shutdown() waits for the other ranks, which after an error may not come.
    failed_ || std::uncaught_exceptions() > 0 ? backend_->abort() : backend_->shutdown();
  } catch (const std::exception&) {
    // The group ends in any case.
  }
}

void BackendGroup::check() {
  if (peers_ && !failed_) {
    try {
      peers_->check();
    } catch (const Disagreement& error) {
      record_failure({"check", sequence_, spec_.name}, subject_, 0.0, error.what(), true);
    }
  }
  if (!failed_) return;
  const std::lock_guard lock(failure_mutex_);
  throw CommError("{}", failure_);
}

Operation BackendGroup::next_operation(Collective kind) {
  ++traffic_[kind].calls;
  return {plan::name(kind), ++sequence_, spec_.name};
}

/// Counts, times and reports one operation. start() begins it and returns the Work to wait for; none when it
/// is done, or enqueued on the current stream.
template <typename Start>
void BackendGroup::run(Collective kind, int64_t bytes, const Start& start) {
  check();
  const Operation operation = next_operation(kind);
  if (!backend_ || (bytes == 0 && kind != Collective::kBarrier)) return;
  const double started = monotonic_seconds();
  board_->note(State::kInside, operation, subject_);
  const int64_t moved_before = moved_bytes();
  try {
    if (peers_) peers_->announce(fmt::format("{} of {} bytes{}", operation.name, bytes, about_subject()));
    if (const c10::intrusive_ptr<c10d::Work> work = start(); work) work->wait();
    if (watch_) {
      remember_subject(operation);
      watch_->enqueued(operation);
    }
  } catch (const std::exception& error) {
    record_failure(operation, subject_, monotonic_seconds() - started, explain(error),
                   is_disagreement(error));
    // Closing the connections makes the other ranks' operations fail at once.
    if (spec_.device.is_cpu()) {
      peers_.reset();
      backend_.reset();
    }
    check();
  }
  traffic_[kind].bytes += moved_bytes() - moved_before;
  board_->note(State::kDone, operation, subject_);
}

std::string BackendGroup::about_subject() const {
  return subject_.empty() ? "" : fmt::format(" for {}", subject_);
}

void BackendGroup::remember_subject(const Operation& operation) {
  if (subject_.empty()) return;
  const std::lock_guard lock(subjects_mutex_);
  subjects_[operation.sequence] = subject_;
  subjects_.erase(subjects_.begin(), subjects_.lower_bound(operation.sequence - kSubjectsRemembered));
}

std::string BackendGroup::subject_of(const Operation& operation) {
  const std::lock_guard lock(subjects_mutex_);
  const auto found = subjects_.find(operation.sequence);
  return found == subjects_.end() ? std::string() : found->second;
}

/// `disagrees`: the ranks are known to have called different operations.
void BackendGroup::record_failure(const Operation& operation, const std::string& subject, double elapsed_s,
                                  const std::string& what, bool disagrees) {
  if (failed_) return;
  const ProgressBoard::Report others = board_->report_failure(operation, spec_.ranks, subject);
  const std::lock_guard lock(failure_mutex_);
  if (failed_) return;
  failure_ =
      fmt::format("[comm.{}] {} {} on rank {} after {:.1f} s (deadline {:g} s): {}; {}", operation.name,
                  in_words(operation, subject), what, spec_.ranks[static_cast<size_t>(spec_.rank)], elapsed_s,
                  spec_.timeout_s, others.text, disagrees ? kRanksDiverged : advice_for(others.cause));
  failed_ = true;
}

std::unique_ptr<DeviceWatch> BackendGroup::make_watch() {
  return std::make_unique<DeviceWatch>(
      watched_gpu(spec_.device), spec_.timeout_s, [this] { return news_->about(spec_.ranks); },
      [this](const Operation& operation, double elapsed_s, const std::string& reason) {
        abort(operation, elapsed_s, reason);
      });
}

/// Called by the watch's thread: records why the operation failed and ends it on the GPU.
void BackendGroup::abort(const Operation& operation, double elapsed_s, const std::string& reason) {
  std::string what = reason.empty() ? kLate : reason;
  bool disagrees = false;
  try {
    if (peers_) peers_->check();
  } catch (const Disagreement& error) {
    what = error.what();  // the reason for the delay
    disagrees = true;
  }
  record_failure(operation, subject_of(operation), elapsed_s, what, disagrees);
  if (peers_) peers_->stop();
  try {
    backend_->abort();  // ends NCCL's kernels, so that a host that waits for the stream goes on
  } catch (const std::exception&) {
    // The next call throws the failure that was recorded.
  }
}

void BackendGroup::all_reduce(at::Tensor& tensor, ReduceOp op) {
  check_tensor(call(Collective::kAllReduce), "tensor", tensor);
  check_reducible(call(Collective::kAllReduce), tensor);
  if (op != ReduceOp::kSum && tensor.is_floating_point()) return reduce_in_order(tensor, op, {});
  run(Collective::kAllReduce, bytes_in(tensor), [&]() -> c10::intrusive_ptr<c10d::Work> {
    if (serve(Collective::kAllReduce, tensor) && bytes_in(tensor) <= kSmallBytes) {
      reduce_among_peers(tensor, op);
      return {};
    }
    std::vector<at::Tensor> tensors = {tensor.detach()};
    c10d::AllreduceOptions options;
    options.reduceOp = to_torch(op);
    options.asyncOp = false;
    // A ring: every 1/n of the tensor goes round once to be summed and once to be distributed.
    given_bytes_ += 2 * (bytes_in(tensor) - bytes_in(tensor) / size());
    return backend_->allreduce(tensors, options);
  });
}

/// Backends compare floating-point numbers in ways that lose a NaN. The result is for `root`, or for all
/// ranks.
void BackendGroup::reduce_in_order(at::Tensor& tensor, ReduceOp op, std::optional<int64_t> root) {
  const at::NoGradGuard no_grad;
  at::Tensor values = tensor.variable_data();
  at::Tensor integers = as_integers(values, op);
  root ? reduce(integers, op, *root) : all_reduce(integers, op);
  values.copy_(
      turned_below_zero(integers).view(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}

void BackendGroup::reduce_among_peers(at::Tensor& tensor, ReduceOp op) {
  const at::NoGradGuard no_grad;
  at::Tensor rows = at::empty({size(), tensor.numel()}, tensor.options());
  peers_->all_gather(rows, tensor);
  at::Tensor flat =
      tensor.variable_data().view({-1});  // shares memory, but not the version counter that autograd checks
  switch (op) {
    case ReduceOp::kSum:
      flat.copy_(rows.sum(0, /*keepdim=*/false, tensor.scalar_type()));
      return;
    case ReduceOp::kMax:
      flat.copy_(rows.amax(0));
      return;
    case ReduceOp::kMin:
      flat.copy_(rows.amin(0));
      return;
  }
}

void BackendGroup::all_gather(at::Tensor& output, const at::Tensor& input) {
  check_pair(call(Collective::kAllGather), output, size(), input, 1);
  if (size() == 1) copy_within(output, input);
  run(Collective::kAllGather, bytes_in(output), [&]() -> c10::intrusive_ptr<c10d::Work> {
    if (serve(Collective::kAllGather, input)) {
      peers_->all_gather(output, input);
      return {};
    }
    at::Tensor to = bytes_of(output), from = bytes_of(input);
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    given_bytes_ += (size() - 1) * bytes_in(from);
    return backend_->_allgather_base(to, from, options);
  });
}

void BackendGroup::reduce_scatter(at::Tensor& output, const at::Tensor& input) {
  check_pair(call(Collective::kReduceScatter), output, 1, input, size());
  check_reducible(call(Collective::kReduceScatter), input);
  if (size() == 1) copy_within(output, input);
  run(Collective::kReduceScatter, bytes_in(input), [&] {
    at::Tensor to = output.detach().view({-1}), from = input.detach().view({-1});
    c10d::ReduceScatterOptions options;
    options.asyncOp = false;
    // torch's Gloo reduces all of the input on every rank, and then keeps a slot of it.
    given_bytes_ += (spec_.device.is_cpu() ? 2 : 1) * (size() - 1) * bytes_in(to);
    return backend_->_reduce_scatter_base(to, from, options);
  });
}

void BackendGroup::reduce_scatter_ordered(at::Tensor& output, const at::Tensor& input) {
  check_ordered({"reduce_scatter_ordered", spec_.name, size(), spec_.device}, output, input);
  if (size() == 1) {
    output.detach().view({-1}).copy_(input.detach().view({-1}));
    return;
  }
  const int64_t bytes = bytes_in(input);
  if (serve(Collective::kAllToAll, input)) {
    return run(Collective::kAllToAll, bytes, [&]() -> c10::intrusive_ptr<c10d::Work> {
      peers_->reduce_scatter_ordered(output, input);
      return {};
    });
  }
  at::Tensor rows = scratch(bytes).narrow(0, 0, bytes).view(input.scalar_type());  // (n*m)
  all_to_all(rows, input);
  tree_sum(output, rows, size());
}

void BackendGroup::all_to_all(at::Tensor& output, const at::Tensor& input) {
  check_pair(call(Collective::kAllToAll), output, size(), input, size());
  if (size() == 1) copy_within(output, input);
  run(Collective::kAllToAll, bytes_in(input), [&] {
    at::Tensor to = bytes_of(output), from = bytes_of(input);
    std::vector<int64_t> equal_parts;
    c10d::AllToAllOptions options;
    options.asyncOp = false;
    given_bytes_ += (size() - 1) * bytes_in(from) / size();
    return backend_->alltoall_base(to, from, equal_parts, equal_parts, options);
  });
}

void BackendGroup::broadcast(at::Tensor& tensor, int64_t root) {
  check_tensor(call(Collective::kBroadcast), "tensor", tensor);
  check_root(call(Collective::kBroadcast), root);
  run(Collective::kBroadcast, bytes_in(tensor), [&] {
    std::vector<at::Tensor> tensors = {bytes_of(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    given_bytes_ += bytes_in(tensor);
    return backend_->broadcast(tensors, options);
  });
}

void BackendGroup::reduce(at::Tensor& tensor, ReduceOp op, int64_t root) {
  check_tensor(call(Collective::kReduce), "tensor", tensor);
  check_reducible(call(Collective::kReduce), tensor);
  check_root(call(Collective::kReduce), root);
  if (op != ReduceOp::kSum && tensor.is_floating_point()) return reduce_in_order(tensor, op, root);
  run(Collective::kReduce, bytes_in(tensor), [&] {
    std::vector<at::Tensor> tensors = {tensor.detach()};
    c10d::ReduceOptions options;
    options.reduceOp = to_torch(op);
    options.rootRank = root;
    options.asyncOp = false;
    // Gloo's ring first leaves every rank a part of the result, which then goes to root.
    const int64_t from_root = spec_.device.is_cpu() ? bytes_in(tensor) - bytes_in(tensor) / size() : 0;
    given_bytes_ += rank() == root ? from_root : bytes_in(tensor);
    return backend_->reduce(tensors, options);
  });
}

void BackendGroup::gather(at::Tensor& output, const at::Tensor& input, int64_t root) {
  check_root(call(Collective::kGather), root);
  if (rank() == root) check_pair(call(Collective::kGather), output, size(), input, 1);
  if (rank() != root) check_tensor(call(Collective::kGather), "input", input);
  if (size() == 1) copy_within(output, input);
  run(Collective::kGather, size() * bytes_in(input), [&] {
    std::vector<std::vector<at::Tensor>> to;
    if (rank() == root) to.push_back(bytes_of(output).chunk(size()));
    std::vector<at::Tensor> from = {bytes_of(input)};
    c10d::GatherOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    given_bytes_ += rank() == root ? 0 : bytes_in(input);
    return backend_->gather(to, from, options);
  });
}

void BackendGroup::scatter(at::Tensor& output, const at::Tensor& input, int64_t root) {
  check_root(call(Collective::kScatter), root);
  if (rank() == root) check_pair(call(Collective::kScatter), output, 1, input, size());
  if (rank() != root) check_tensor(call(Collective::kScatter), "output", output);
  if (size() == 1) copy_within(output, input);
  run(Collective::kScatter, size() * bytes_in(output), [&] {
    std::vector<at::Tensor> to = {bytes_of(output)};
    std::vector<std::vector<at::Tensor>> from;
    if (rank() == root) from.push_back(bytes_of(input).chunk(size()));
    c10d::ScatterOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    given_bytes_ += rank() == root ? (size() - 1) * bytes_in(output) : 0;
    return backend_->scatter(to, from, options);
  });
}

void BackendGroup::send(const at::Tensor& tensor, int64_t to) {
  check_tensor(call(Collective::kSend), "tensor", tensor);
  check_peer(call(Collective::kSend), to, rank());
  run(Collective::kSend, bytes_in(tensor), [&] {
    std::vector<at::Tensor> tensors = {bytes_of(tensor)};
    given_bytes_ += bytes_in(tensor);
    return backend_->send(tensors, to_int(to), kTag);
  });
}

void BackendGroup::recv(at::Tensor& tensor, int64_t from) {
  check_tensor(call(Collective::kRecv), "tensor", tensor);
  check_peer(call(Collective::kRecv), from, rank());
  run(Collective::kRecv, bytes_in(tensor), [&] {
    std::vector<at::Tensor> tensors = {bytes_of(tensor)};
    return backend_->recv(tensors, to_int(from), kTag);
  });
}

/// A rank that waits for its own message first would wait for one that does so, too. All that NCCL is given
/// between the start and the end of a group it launches at once; a group that stays open would take in all
/// that follows.
void BackendGroup::send_recv(const at::Tensor& mine, int64_t to, at::Tensor& theirs, int64_t from) {
  check_tensor(call(Collective::kSend), "tensor", mine);
  check_peer(call(Collective::kSend), to, rank());
  check_tensor(call(Collective::kRecv), "tensor", theirs);
  check_peer(call(Collective::kRecv), from, rank());
  run(Collective::kSend, bytes_in(mine) + bytes_in(theirs), [&] {
    std::vector<at::Tensor> sent = {bytes_of(mine)}, received = {bytes_of(theirs)};
    given_bytes_ += bytes_in(mine);
    if (spec_.device.is_cpu()) {
      const auto arrives = backend_->recv(received, to_int(from), kTag);
      backend_->send(sent, to_int(to), kTag)->wait();
      return arrives;
    }
    backend_->startCoalescing();
    try {
      backend_->send(sent, to_int(to), kTag);
      backend_->recv(received, to_int(from), kTag);
    } catch (...) {
      backend_->endCoalescing();
      throw;
    }
    return backend_->endCoalescing();
  });
}

void BackendGroup::barrier() {
  run(Collective::kBarrier, 0, [&]() -> c10::intrusive_ptr<c10d::Work> {
    if (serve(Collective::kBarrier, {})) {
      peers_->barrier();
      return {};
    }
    c10d::BarrierOptions options;  // asynchronous, so that there is a Work on which the host can wait
    if (!spec_.device.is_cpu()) options.device_ids = {spec_.device.index()};
    return backend_->barrier(options);
  });
  check();
}

at::Tensor BackendGroup::scratch(int64_t bytes) {
  const c10::impl::VirtualGuardImpl guard(spec_.device.type());
  at::Tensor& kept = scratch_[static_cast<int64_t>(guard.getStream(spec_.device).id())];
  if (!kept.defined() || kept.numel() < bytes) {
    kept = at::Tensor();  // frees the old memory before the new is allocated
    kept = at::empty({bytes}, at::TensorOptions(at::kByte).device(spec_.device));
  }
  return kept;
}

/// Sends `mine`, at most kMaxExchanged bytes, to all ranks over the backend; returns all texts by group rank.
std::vector<std::string> BackendGroup::exchange(const std::string& mine) {
  TRIREME_CHECK(mine.size() <= kMaxExchanged,
                "[comm.symmetric_empty] a message of {} bytes is too long to exchange; the limit is {}",
                mine.size(), kMaxExchanged);
  at::Tensor row = at::zeros({kMaxExchanged}, at::kByte);
  std::copy(mine.begin(), mine.end(), row.mutable_data_ptr<uint8_t>());
  row = row.to(spec_.device);
  at::Tensor rows = at::empty({size() * kMaxExchanged}, row.options());
  const Operation operation{"symmetric_empty", sequence_, spec_.name};
  board_->note(State::kInside, operation);
  try {
    backend_->_allgather_base(rows, row)->wait();
    if (watch_) watch_->enqueued(operation);
  } catch (const std::exception& error) {
    record_failure(operation, subject_, 0.0, explain(error), is_disagreement(error));
  }
  const at::Tensor host = failed_ ? at::Tensor() : rows.cpu();
  check();
  board_->note(State::kDone, operation);
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < size(); ++rank) {
    const auto* const text =
        reinterpret_cast<const char*>(host.const_data_ptr<uint8_t>()) + rank * kMaxExchanged;
    texts.emplace_back(text, ::strnlen(text, kMaxExchanged));
  }
  return texts;
}

at::Tensor BackendGroup::symmetric_empty(int64_t count, c10::ScalarType dtype) {
  check();
  at::Tensor memory;
  if (peers_ && !spec_.device.is_cpu()) {
    memory = peers_->allocate(count, dtype, [this](const std::string& mine) { return exchange(mine); });
  }
  return memory.defined() ? memory : at::empty({count}, at::TensorOptions(dtype).device(spec_.device));
}

}  // namespace

std::shared_ptr<Group> make_backend_group(BackendSpec spec, c10::intrusive_ptr<c10d::Backend> backend,
                                          std::unique_ptr<PeerMemory> peers,
                                          std::shared_ptr<ProgressBoard> board,
                                          std::shared_ptr<PeerNews> news) {
  return std::make_shared<BackendGroup>(std::move(spec), std::move(backend), std::move(peers),
                                        std::move(board), std::move(news));
}

}  // namespace trireme::comm
