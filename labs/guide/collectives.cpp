// Every collective, and sending from one rank to the next, with what each rank had before and has afterwards:
// trireme launch -n 3 ./collectives
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "trireme/comm/world.h"

namespace comm = trireme::comm;

/// What a rank gives and gets in one operation.
struct Example {
  std::string name;
  at::Tensor before;
  std::function<at::Tensor()> run;  ///< returns what this rank has afterwards
  at::Tensor expected;
};

class Examples {
 public:
  explicit Examples(comm::World& world) : n_(world.size()), r_(world.rank()), device_(world.device()) {
    std::vector<int64_t> everyone;
    for (int64_t rank = 0; rank < n_; ++rank) everyone.push_back(rank);
    group_ = world.make_group("shown", everyone);
    table_ = world.make_group("table", everyone);  // for what is printed, so that it is not counted
  }

  bool show_all() {
    broadcast();
    scatter();
    gather();
    reduce_to_first();
    reduce("all_reduce sum", comm::ReduceOp::kSum, of_all(2).sum(0));
    reduce("all_reduce max", comm::ReduceOp::kMax, of_all(2).amax(0));
    reduce("all_reduce min", comm::ReduceOp::kMin, of_all(2).amin(0));
    all_gather();
    reduce_scatter("reduce_scatter", &comm::Group::reduce_scatter);
    reduce_scatter("reduce_scatter_ordered", &comm::Group::reduce_scatter_ordered);
    all_to_all();
    if (n_ > 1) ring();
    barrier();
    return right_;
  }

 private:
  /// (ranks, count): rank i begins with 10 i + 1, 10 i + 2, ...
  at::Tensor of_all(int64_t count) const {
    const auto fp32 = at::TensorOptions().dtype(at::kFloat).device(device_);
    return at::arange(n_, fp32).unsqueeze(1) * 10 + at::arange(1, count + 1, fp32);
  }
  at::Tensor mine(int64_t count) const { return of_all(count)[r_].clone(); }

  void broadcast() {
    at::Tensor values = mine(2);
    show({"broadcast from 0", values.clone(), [&] { return group_->broadcast(values, 0), values; },
          of_all(2)[0]});
  }

  void reduce_to_first() {
    at::Tensor values = mine(2);
    const auto run = [&] {
      group_->reduce(values, comm::ReduceOp::kSum, 0);
      return r_ == 0 ? values : mine(2);  // what others hold afterwards has no meaning
    };
    show({"reduce to 0", values.clone(), run, r_ == 0 ? of_all(2).sum(0) : mine(2)});
  }

  void gather() {
    at::Tensor all = at::zeros({2 * n_}, mine(2).options());
    show({"gather to 0", mine(2), [&] { return group_->gather(all, mine(2), 0), all; },
          r_ == 0 ? of_all(2).flatten() : at::zeros({2 * n_})});
  }

  void scatter() {
    at::Tensor part = at::empty({1}, mine(1).options());
    show({"scatter from 0", mine(n_), [&] { return group_->scatter(part, mine(n_), 0), part; },
          of_all(n_)[0].slice(0, r_, r_ + 1)});
  }

  void reduce(const std::string& name, comm::ReduceOp op, const at::Tensor& expected) {
    at::Tensor values = mine(2);
    show({name, values.clone(), [&] { return group_->all_reduce(values, op), values; }, expected});
  }

  void all_gather() {
    at::Tensor all = at::empty({2 * n_}, mine(2).options());
    show({"all_gather", mine(2), [&] { return group_->all_gather(all, mine(2)), all; }, of_all(2).flatten()});
  }

  void reduce_scatter(const std::string& name,
                      void (comm::Group::*operation)(at::Tensor&, const at::Tensor&)) {
    at::Tensor shard = at::empty({1}, mine(1).options());
    show({name, mine(n_), [&] { return ((*group_).*operation)(shard, mine(n_)), shard; },
          of_all(n_).sum(0).slice(0, r_, r_ + 1)});
  }

  void all_to_all() {
    at::Tensor column = at::empty({n_}, mine(1).options());
    show({"all_to_all", mine(n_), [&] { return group_->all_to_all(column, mine(n_)), column; },
          of_all(n_).select(1, r_)});
  }

  /// On a CPU send() waits for recv(): rank 0 sends first, everyone else once it has received.
  void ring() {
    at::Tensor received = at::empty({2}, mine(2).options());
    const int64_t next = (r_ + 1) % n_, previous = (r_ + n_ - 1) % n_;
    const auto pass_on = [&] {
      if (r_ == 0) group_->send(mine(2), next);
      group_->recv(received, previous);
      if (r_ != 0) group_->send(mine(2), next);
      return received;
    };
    show({"send to the next rank", mine(2), pass_on, of_all(2)[previous]});
  }

  /// Rank 0 comes late, and all others wait for it.
  void barrier() {
    if (r_ == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto began = std::chrono::steady_clock::now();
    group_->barrier();
    const std::chrono::duration<double, std::milli> waited = std::chrono::steady_clock::now() - began;
    const auto all = comm::gather_scalars(*table_, {waited.count()});
    if (r_ != 0) return;
    fmt::print("barrier: rank 0 arrives 50 ms late\n");
    for (int64_t rank = 0; rank < n_; ++rank) fmt::print("  rank {}  waited {:.1f} ms\n", rank, all[rank][0]);
  }

  int64_t moved() const {
    int64_t bytes = 0;
    for (const auto& [operation, traffic] : group_->traffic()) bytes += traffic.bytes;
    return bytes;
  }

  static std::string in_text(const std::vector<double>& values, size_t begin, size_t count) {
    std::string text;
    for (size_t i = begin; i < begin + count; ++i) text += fmt::format("{:>4.0f}", values[i]);
    return text;
  }

  /// Runs it; rank 0 prints what all ranks had and have, and the bytes that each has moved.
  void show(const Example& example) {
    const int64_t moved_before = moved();
    const at::Tensor after = example.run().cpu(), before = example.before.cpu();
    const bool as_expected = at::equal(after, example.expected.cpu());
    right_ = right_ && as_expected;
    std::vector<double> row = {as_expected ? 1.0 : 0.0, static_cast<double>(moved() - moved_before)};
    for (const at::Tensor& values : {before, after})
      for (int64_t i = 0; i < values.numel(); ++i) row.push_back(values[i].item<double>());
    const auto rows = comm::gather_scalars(*table_, row);
    if (r_ != 0) return;
    fmt::print("{}\n", example.name);
    for (int64_t rank = 0; rank < n_; ++rank) {
      const std::vector<double>& of_rank = rows[static_cast<size_t>(rank)];
      const auto had = static_cast<size_t>(before.numel()), has = static_cast<size_t>(after.numel());
      fmt::print("  rank {} {} ->{}  {:.0f} bytes moved{}\n", rank, in_text(of_rank, 2, had),
                 in_text(of_rank, 2 + had, has), of_rank[1], of_rank[0] == 1.0 ? "" : "  WRONG");
    }
  }

  int64_t n_, r_;
  at::Device device_;
  std::shared_ptr<comm::Group> group_, table_;
  bool right_ = true;
};

int main() try {
  const auto world = comm::World::join_environment();
  return Examples(*world).show_all() ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
