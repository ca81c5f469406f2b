// Every collective against a closed formula, for 1 to 4 ranks as threads, over all dtypes that make sense.
#include "trireme/comm/group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/support/sockets.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::Group;
using comm::ReduceOp;
using comm::World;
using test::run_ranks;

constexpr int64_t kCount = 17;

const std::vector<at::ScalarType> kNumbers = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                              at::kInt,   at::kLong,   at::kChar, at::kByte};
const std::vector<at::ScalarType> kMovable = {at::kFloat,         at::kDouble,      at::kHalf, at::kBFloat16,
                                              at::kInt,           at::kLong,        at::kChar, at::kBool,
                                              at::kFloat8_e4m3fn, at::kComplexFloat};

std::shared_ptr<Group> everyone(World& world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return world.make_group("everyone", ranks);
}

/// first, first + 1, ...: at most 120, so that bf16, e4m3 (through bytes) and int8 hold it.
at::Tensor counting(int64_t first, int64_t count, at::ScalarType type) {
  return at::arange(first, first + count, at::kLong).to(type);
}

void expect_same_bytes(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_TRUE(at::equal(got.view({-1}).view(at::kByte), wanted.view({-1}).view(at::kByte)))
      << c10::toString(got.scalar_type()) << ": " << got << "\ninstead of\n"
      << wanted;
}

void for_world_sizes(const test::RankBody& body, int64_t least = 1) {
  for (const bool peer_memory : test::kBothTransports) {
    for (int64_t size = least; size <= 4; ++size) run_ranks(size, body, 20.0, 90.0, peer_memory);
  }
}

TEST(Collectives, AllReduceSumsInPlace) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const int64_t n = group->size();
    for (const auto type : kNumbers) {
      at::Tensor tensor = counting(group->rank(), kCount, type);
      group->all_reduce(tensor, ReduceOp::kSum);
      // sum over r of (r + i) = n(n-1)/2 + n i
      expect_same_bytes(tensor, (at::arange(kCount) * n + n * (n - 1) / 2).to(type));
    }
  });
}

TEST(Collectives, AllReduceTakesMaximumAndMinimum) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    for (const auto type : kNumbers) {
      at::Tensor most = counting(group->rank(), kCount, type), least = most.clone();
      group->all_reduce(most, ReduceOp::kMax);
      group->all_reduce(least, ReduceOp::kMin);
      expect_same_bytes(most, counting(group->size() - 1, kCount, type));
      expect_same_bytes(least, counting(0, kCount, type));
    }
  });
}

TEST(Collectives, MaximaAndMinimaKeepNanAndTheOrderOfAllNumbers) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const double nan = std::numeric_limits<double>::quiet_NaN(),
                 inf = std::numeric_limits<double>::infinity();
    for (const int64_t count : {int64_t{8}, int64_t{70000}}) {  // by one gather, and by the backend's ring
      for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        for (int64_t with_nan = 0; with_nan < group->size(); ++with_nan) {
          at::Tensor mine = at::zeros({count}, type);
          const auto rank = static_cast<double>(group->rank());
          mine.narrow(0, 0, 6).copy_(
              at::tensor({group->rank() == with_nan ? nan : 1.0, -1.0 - rank, rank - 0.5,
                          rank == 0.0 ? inf : 0.0, rank == 0.0 ? -inf : 0.0, rank * 1e-3},
                         at::kDouble));
          at::Tensor most = mine.clone(), least = mine.clone();
          group->all_reduce(most, ReduceOp::kMax);
          group->all_reduce(least, ReduceOp::kMin);
          const auto last = static_cast<double>(group->size() - 1);
          const auto others = [](const at::Tensor& all) { return all.narrow(0, 1, 5); };
          const auto wanted = [&](const std::vector<double>& values) {
            return at::tensor(values, at::kDouble).to(type);
          };
          EXPECT_TRUE(most[0].isnan().item<bool>() && least[0].isnan().item<bool>()) << count << type;
          EXPECT_TRUE(
              at::equal(others(most), wanted({-1.0, last - 0.5, inf, last > 0.0 ? 0.0 : -inf, last * 1e-3})));
          EXPECT_TRUE(
              at::equal(others(least), wanted({-1.0 - last, -0.5, last > 0.0 ? 0.0 : inf, -inf, 0.0})));
          EXPECT_EQ(most.narrow(0, 6, count - 6).count_nonzero().item<int64_t>(), 0);
        }
      }
    }
  });
}

TEST(Collectives, AllGatherOrdersByRankInEveryDtype) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    for (const auto type : kMovable) {
      at::Tensor output = at::zeros({group->size(), kCount}, at::kLong).to(type);
      group->all_gather(output, counting(group->rank() * kCount, kCount, type));
      expect_same_bytes(output, counting(0, group->size() * kCount, type));
    }
  });
}

TEST(Collectives, AllGatherInPlaceEqualsOutOfPlace) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    at::Tensor output = at::full({group->size() * kCount}, -1.0f);
    at::Tensor mine = output.narrow(0, group->rank() * kCount, kCount);
    mine.copy_(counting(group->rank() * kCount, kCount, at::kFloat));
    group->all_gather(output, mine);
    expect_same_bytes(output, counting(0, group->size() * kCount, at::kFloat));
  });
}

TEST(Collectives, ReduceScatterGivesEachRankItsSlot) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const int64_t n = group->size();
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kLong}) {
      at::Tensor output = at::zeros({5}, type);
      group->reduce_scatter(output, counting(group->rank(), n * 5, type));
      expect_same_bytes(output, ((at::arange(5) + group->rank() * 5) * n + n * (n - 1) / 2).to(type));
    }
  });
}

TEST(Collectives, AllToAllTransposesRanksAndChunks) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const int64_t n = group->size(), me = group->rank();
    for (const auto type : kMovable) {
      // The chunk from rank r to rank c is filled with 4 r + c.
      at::Tensor output = at::zeros({n, 3}, at::kLong).to(type);
      const at::Tensor input = (at::arange(n).view({n, 1}).expand({n, 3}) + 4 * me).contiguous().to(type);
      group->all_to_all(output, input);
      expect_same_bytes(output, (at::arange(n).view({n, 1}).expand({n, 3}) * 4 + me).contiguous().to(type));
    }
  });
}

TEST(Collectives, BroadcastFromEveryRoot) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    for (int64_t root = 0; root < group->size(); ++root) {
      for (const auto type : kMovable) {
        at::Tensor tensor = counting(group->rank() * 10, kCount, type);
        group->broadcast(tensor, root);
        expect_same_bytes(tensor, counting(root * 10, kCount, type));
      }
    }
  });
}

TEST(Collectives, ReduceToEveryRootSumsInPlaceThere) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const int64_t n = group->size();
    for (int64_t root = 0; root < n; ++root) {
      for (const auto type : kNumbers) {
        at::Tensor tensor = counting(group->rank(), kCount, type);
        group->reduce(tensor, ReduceOp::kSum, root);
        if (group->rank() == root)
          expect_same_bytes(tensor, (at::arange(kCount) * n + n * (n - 1) / 2).to(type));
      }
    }
  });
}

TEST(Collectives, ReduceToEveryRootTakesMaximumAndMinimumAndKeepsNan) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    for (int64_t root = 0; root < group->size(); ++root) {
      for (const auto type : kNumbers) {
        at::Tensor most = counting(group->rank(), kCount, type), least = most.clone();
        if (most.is_floating_point() && group->rank() == group->size() - 1)
          for (at::Tensor* one : {&most, &least}) (*one)[3] = std::nan("");
        group->reduce(most, ReduceOp::kMax, root);
        group->reduce(least, ReduceOp::kMin, root);
        if (group->rank() != root) continue;
        at::Tensor highest = counting(group->size() - 1, kCount, type), lowest = counting(0, kCount, type);
        if (most.is_floating_point()) {
          EXPECT_TRUE(most[3].isnan().item<bool>() && least[3].isnan().item<bool>()) << type;
          for (at::Tensor* one : {&most, &least, &highest, &lowest}) (*one)[3] = 0;
        }
        expect_same_bytes(most, highest);
        expect_same_bytes(least, lowest);
      }
    }
  });
}

/// Both forms; what is no rank's slot may be anything, or undefined on ranks other than root.
TEST(Collectives, GatherToEveryRootOrdersByRank) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const int64_t n = group->size(), me = group->rank();
    for (int64_t root = 0; root < n; ++root) {
      for (const auto type : kMovable) {
        const at::Tensor mine = counting(me * kCount, kCount, type), all = counting(0, n * kCount, type);
        at::Tensor output = me == root ? at::zeros({n, kCount}, at::kLong).to(type) : at::Tensor();
        group->gather(output, mine, root);
        if (me == root) expect_same_bytes(output, all);
        at::Tensor slots = at::zeros({n, kCount}, at::kLong).to(type);
        slots[me].copy_(mine);
        group->gather(slots, slots[me], root);
        if (me == root) expect_same_bytes(slots, all);
        if (me != root) expect_same_bytes(slots[me], mine);
      }
    }
  });
}

TEST(Collectives, ScatterFromEveryRootGivesEachRankItsChunk) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const int64_t n = group->size(), me = group->rank();
    for (int64_t root = 0; root < n; ++root) {
      for (const auto type : kMovable) {
        const at::Tensor all = counting(root, n * kCount, type).view({n, kCount});
        const at::Tensor input = me == root ? all : at::Tensor();
        at::Tensor output = at::zeros({kCount}, at::kLong).to(type);
        group->scatter(output, input, root);
        expect_same_bytes(output, all[me]);
        at::Tensor slots = me == root ? all.clone() : at::zeros({n, kCount}, at::kLong).to(type);
        at::Tensor slot = slots[me];
        group->scatter(slot, slots, root);
        expect_same_bytes(slot, all[me]);
        if (me == root) expect_same_bytes(slots, all);
      }
    }
  });
}

TEST(Collectives, SendAndRecvAroundTheRingKeepTheirOrder) {
  for_world_sizes(
      [](std::shared_ptr<World> world) {
        const auto group = everyone(*world);
        const int64_t n = group->size(), me = group->rank();
        const auto send_two = [&] {
          group->send(counting(me, kCount, at::kFloat), (me + 1) % n);
          group->send(counting(me + 50, kCount, at::kBFloat16), (me + 1) % n);
        };
        at::Tensor first = at::zeros({kCount}), second = at::zeros({kCount}, at::kBFloat16);
        if (me == 0) send_two();
        const int64_t left = (me + n - 1) % n;
        group->recv(first, left);
        group->recv(second, left);
        if (me != 0) send_two();
        expect_same_bytes(first, counting(left, kCount, at::kFloat));
        expect_same_bytes(second, counting(left + 50, kCount, at::kBFloat16));
      },
      2);
}

/// Every permutation without a fixed point: a ring either way, pairs, and others.
TEST(Collectives, SendRecvAnswersEveryPermutation) {
  for (int64_t size = 2; size <= 4; ++size) {
    run_ranks(size, [size](std::shared_ptr<World> world) {
      const auto group = everyone(*world);
      std::vector<int64_t> to(static_cast<size_t>(size));
      std::iota(to.begin(), to.end(), int64_t{0});
      const int64_t me = group->rank();
      int64_t exchanges = 0;
      do {
        bool fixed = false;
        for (int64_t rank = 0; rank < size; ++rank) fixed = fixed || to[static_cast<size_t>(rank)] == rank;
        if (fixed) continue;
        const int64_t from = std::find(to.begin(), to.end(), me) - to.begin();
        at::Tensor got = at::zeros({kCount});
        group->send_recv(counting(10 * me, kCount, at::kFloat), to[static_cast<size_t>(me)], got, from);
        expect_same_bytes(got, counting(10 * from, kCount, at::kFloat));
        ++exchanges;
        EXPECT_EQ(group->traffic().at(plan::Collective::kSend).bytes, exchanges * 4 * kCount);
      } while (std::next_permutation(to.begin(), to.end()));
    });
  }
}

TEST(Collectives, BarrierLetsNobodyPassBeforeTheLastHasArrived) {
  for (const bool peer_memory : test::kBothTransports) {
    for (int64_t size = 1; size <= 4; ++size) {
      std::atomic<int64_t> arrived = 0;
      const auto body = [&](std::shared_ptr<World> world) {
        const auto group = everyone(*world);
        for (int64_t round = 1; round <= 3; ++round) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5 * group->rank()));
          ++arrived;
          group->barrier();
          EXPECT_EQ(arrived.load(), round * size);
          group->barrier();
        }
      };
      run_ranks(size, body, 20.0, 90.0, peer_memory);
    }
  }
}

TEST(Collectives, EmptyTensorsPassThroughEverything) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    at::Tensor empty = at::empty({0}), other = at::empty({0});
    group->all_reduce(empty, ReduceOp::kSum);
    group->all_gather(empty, other);
    group->reduce_scatter(empty, other);
    group->all_to_all(empty, other);
    group->broadcast(empty, 0);
    group->reduce_scatter_ordered(empty, other);
    for (int64_t root = 0; root < group->size(); ++root) {
      group->reduce(empty, ReduceOp::kSum, root);
      group->gather(empty, other, root);
      group->scatter(empty, other, root);
    }
    for (const auto& row : gather_scalars(*group, {})) EXPECT_TRUE(row.empty());
    EXPECT_EQ(gather_scalars(*group, {}).size(), static_cast<size_t>(group->size()));
    group->barrier();  // the ranks are still in step
  });
}

TEST(Collectives, ASingleElementMayHaveAnyStride) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const at::Tensor one = at::arange(6, at::kFloat).view({3, 2}).slice(0, 1, 2).slice(1, 0, 1).view({1});
    const at::Tensor strided = at::arange(6, at::kFloat).slice(0, 2, 4, 2);
    ASSERT_EQ(strided.stride(0), 2);
    for (const at::Tensor& input : {one, strided}) {
      at::Tensor output = at::empty({group->size()});
      group->all_gather(output, input);
      EXPECT_TRUE(at::equal(output, at::full({group->size()}, 2.0)));
    }
  });
}

TEST(Collectives, GatherScalarsKeepsEveryBitOfAWordInHalves) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const uint64_t words[] = {0, 1, 0xffffffff, uint64_t{1} << 32, 0x0123456789abcdef, ~uint64_t{0}};
    for (const uint64_t word : words) {
      const uint64_t mine = word ^ static_cast<uint64_t>(group->rank());
      const auto [upper, lower] = comm::in_halves(mine);
      const auto rows = gather_scalars(*group, {upper, lower});
      for (size_t rank = 0; rank < rows.size(); ++rank)
        EXPECT_EQ(comm::from_halves(rows[rank][0], rows[rank][1]), word ^ rank);
    }
  });
}

TEST(Collectives, GatherScalarsKeepsDoublesExactly) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const auto rows = gather_scalars(*group, {1.0 / (3.0 + static_cast<double>(group->rank())), 1e-300});
    ASSERT_EQ(rows.size(), static_cast<size_t>(group->size()));
    for (size_t r = 0; r < rows.size(); ++r) {
      EXPECT_EQ(rows[r], (std::vector<double>{1.0 / (3.0 + static_cast<double>(r)), 1e-300}));
    }
  });
}

TEST(Collectives, ShareFromRootGivesAllTheRootsText) {
  for_world_sizes([](std::shared_ptr<World> world) {
    for (const std::string text : {"first", "second, under the same key", ""}) {
      EXPECT_EQ(world->share_from_root("name", world->rank() == 0 ? text : "ignored"), text);
    }
  });
}

TEST(Collectives, TensorsThatRequireGradAreMovedBehindAutogradsBack) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    at::Tensor leaf = at::ones({4}).requires_grad_(true);
    const auto version = leaf._version();
    group->all_reduce(leaf, ReduceOp::kSum);
    EXPECT_EQ(leaf.detach().sum().item<double>(), 4.0 * static_cast<double>(group->size()));
    EXPECT_EQ(leaf._version(), version);
    EXPECT_FALSE(leaf.grad_fn());
  });
}

// The formulas of nccl-tests' PERFORMANCE.md, written out here a second time.
TEST(Collectives, CountedBytesAreTheFormulas) {
  for_world_sizes([](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    const int64_t n = group->size(), m = 12;
    at::Tensor shard = at::zeros({m}), full = at::zeros({n * m}), other = at::zeros({n * m});
    at::Tensor large = at::zeros({64 << 10});  // too large to be gathered and summed by all
    const int64_t bytes = n * m * 4, large_bytes = 4 * large.numel();
    group->all_reduce(large, ReduceOp::kSum);
    group->all_gather(full, shard);
    group->reduce_scatter(shard, full);
    group->all_to_all(other, full);
    group->reduce_scatter_ordered(shard, full);
    group->broadcast(full, 0);
    const int64_t root = n - 1;
    group->reduce(full, ReduceOp::kSum, root);
    group->gather(full, shard, root);
    group->scatter(shard, full, root);
    group->barrier();
    const auto& traffic = group->traffic();
    const auto sent = [&](plan::Collective kind) { return traffic.at(kind).bytes; };
    EXPECT_EQ(sent(plan::Collective::kAllReduce),
              plan::wire_bytes(plan::Collective::kAllReduce, large_bytes, n));
    EXPECT_EQ(sent(plan::Collective::kAllReduce), 2 * (large_bytes - large_bytes / n));
    EXPECT_EQ(sent(plan::Collective::kAllGather), bytes * (n - 1) / n);
    EXPECT_EQ(sent(plan::Collective::kReduceScatter), 2 * bytes * (n - 1) / n) << "Gloo's is an all-reduce";
    EXPECT_EQ(sent(plan::Collective::kAllToAll), (n > 1 ? 2 : 1) * bytes * (n - 1) / n);
    EXPECT_EQ(sent(plan::Collective::kBroadcast), n > 1 ? bytes : 0);
    const bool is_root = group->rank() == root;
    EXPECT_EQ(sent(plan::Collective::kReduce), n == 1 ? 0 : bytes - (is_root ? bytes / n : 0))
        << "Gloo's is a ring that leaves a part on every rank, and a gather";
    EXPECT_EQ(sent(plan::Collective::kGather), is_root ? 0 : bytes / n);
    EXPECT_EQ(sent(plan::Collective::kScatter),
              is_root ? plan::wire_bytes(plan::Collective::kScatter, bytes, n) : 0);
    EXPECT_EQ(sent(plan::Collective::kBarrier), 0);
    EXPECT_EQ(traffic.at(plan::Collective::kAllReduce).calls, 1);
  });
}

TEST(Collectives, SmallAllReducesOverSharedMemoryCostWhatAGatherDoes) {
  for (int64_t size = 2; size <= 4; ++size) {
    run_ranks(size, [](std::shared_ptr<World> world) {
      const auto group = everyone(*world);
      at::Tensor tensor = at::zeros({100});
      group->all_reduce(tensor, ReduceOp::kSum);
      EXPECT_EQ(group->traffic().at(plan::Collective::kAllReduce).bytes, 400 * (group->size() - 1));
    });
  }
}

TEST(Collectives, SocketsCarryWhatIsCounted) {
  constexpr int64_t kHeaders = 20'000;  // of messages, and barriers
  for (int64_t size = 2; size <= 4; ++size) {
    run_ranks(
        size,
        [](std::shared_ptr<World> world) {
          const auto group = everyone(*world);
          const int64_t n = group->size(), m = 120'000;
          at::Tensor shard = at::zeros({m}), full = at::zeros({n * m}), other = at::zeros({n * m});
          const auto expect_counted = [&](plan::Collective kind, const auto& call) {
            const int64_t counted_before =
                group->traffic().contains(kind) ? group->traffic().at(kind).bytes : 0;
            test::CarriedBytes carried(*group);
            call();
            const int64_t sent = carried.so_far();
            const auto mine = static_cast<double>(group->traffic().at(kind).bytes - counted_before);
            int64_t counted = 0;
            for (const auto& row : gather_scalars(*group, {mine})) counted += static_cast<int64_t>(row[0]);
            if (group->rank() != 0) return;
            EXPECT_GE(sent, counted) << plan::name(kind) << " of " << n;
            EXPECT_LE(sent, counted + kHeaders) << plan::name(kind) << " of " << n;
          };
          expect_counted(plan::Collective::kAllReduce, [&] { group->all_reduce(full, ReduceOp::kSum); });
          expect_counted(plan::Collective::kAllGather, [&] { group->all_gather(full, shard); });
          expect_counted(plan::Collective::kReduceScatter, [&] { group->reduce_scatter(shard, full); });
          expect_counted(plan::Collective::kAllToAll, [&] { group->all_to_all(other, full); });
          expect_counted(plan::Collective::kAllToAll, [&] { group->reduce_scatter_ordered(shard, full); });
          for (const int64_t root : {int64_t{0}, n - 1}) {
            expect_counted(plan::Collective::kReduce, [&] { group->reduce(full, ReduceOp::kSum, root); });
            expect_counted(plan::Collective::kGather, [&] { group->gather(full, shard, root); });
            expect_counted(plan::Collective::kScatter, [&] { group->scatter(shard, full, root); });
          }
        },
        20.0, 90.0, /*peer_memory=*/false);
  }
}

TEST(Collectives, SendCountsItsBytesAndRecvNone) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    at::Tensor tensor = at::zeros({10}, at::kBFloat16);
    world->rank() == 0 ? group->send(tensor, 1) : group->recv(tensor, 0);
    const auto kind = world->rank() == 0 ? plan::Collective::kSend : plan::Collective::kRecv;
    EXPECT_EQ(group->traffic().at(kind).bytes, world->rank() == 0 ? 20 : 0);
  });
}

template <typename Call>
void expect_refusal(const Call& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was refused; expected an error about " << words.front();
  } catch (const LogicError& error) {
    for (const auto& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(Collectives, RefuseSizesThatDoNotDivideNamingBothNumbers) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    at::Tensor four = at::zeros({4}), seven = at::zeros({7});
    expect_refusal([&] { group->all_gather(seven, four); }, {"all_gather", "7", "4", "everyone"});
    expect_refusal([&] { group->reduce_scatter(four, seven); }, {"reduce_scatter", "7", "4"});
    expect_refusal([&] { group->all_to_all(seven, seven); }, {"all_to_all", "7"});
    expect_refusal([&] { group->reduce_scatter_ordered(four, seven); }, {"reduce_scatter_ordered", "7", "4"});
    // Root alone knows both sizes, and refuses before anything is sent.
    if (world->rank() == 0) {
      expect_refusal([&] { group->gather(seven, four, 0); }, {"gather", "7", "4", "everyone"});
      expect_refusal([&] { group->scatter(four, seven, 0); }, {"scatter", "7", "4", "everyone"});
    }
    group->barrier();  // refused calls leave the group usable
  });
}

TEST(Collectives, RefuseWrongDtypesStridesAndRanks) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = everyone(*world);
    at::Tensor floats = at::zeros({4}), halves = at::zeros({8}, at::kHalf), flags = at::zeros({4}, at::kBool);
    at::Tensor slanted = at::zeros({4, 4}).t();
    const at::Tensor elsewhere = at::empty({4}, at::TensorOptions(at::kMeta));
    at::Tensor meta = elsewhere;
    expect_refusal([&] { group->all_gather(halves, floats); }, {"Half", "Float"});
    expect_refusal([&] { group->all_reduce(flags, ReduceOp::kSum); }, {"Bool", "cannot be reduced"});
    expect_refusal([&] { group->broadcast(slanted, 0); }, {"contiguous", "(1, 4)"});
    expect_refusal([&] { group->broadcast(meta, 0); }, {"meta", "cpu"});
    expect_refusal([&] { group->broadcast(floats, 2); }, {"rank 2", "0 to 1"});
    expect_refusal([&] { group->reduce(slanted, ReduceOp::kSum, 0); },
                   {"comm.reduce]", "contiguous", "(1, 4)"});
    expect_refusal([&] { group->reduce(flags, ReduceOp::kSum, 0); }, {"Bool", "cannot be reduced"});
    for (const int64_t root : {-1, 2}) {
      const std::string rank = "rank " + std::to_string(root);
      expect_refusal([&] { group->reduce(floats, ReduceOp::kSum, root); }, {"comm.reduce]", rank, "0 to 1"});
      expect_refusal([&] { group->gather(halves, halves, root); }, {"comm.gather]", rank, "0 to 1"});
      expect_refusal([&] { group->scatter(halves, halves, root); }, {"comm.scatter]", rank, "0 to 1"});
    }
    for (const int64_t root : {0, 1}) {  // as root, and not
      expect_refusal([&] { group->gather(slanted, slanted, root); }, {"comm.gather]", "contiguous"});
      expect_refusal([&] { group->scatter(slanted, slanted, root); }, {"comm.scatter]", "contiguous"});
    }
    const int64_t me = world->rank();
    expect_refusal([&] { group->gather(halves, floats, me); }, {"Half", "Float"});
    expect_refusal([&] { group->scatter(floats, halves, me); }, {"Half", "Float"});
    expect_refusal([&] { group->send(floats, world->rank()); }, {"own peer"});
    expect_refusal([&] { group->reduce_scatter_ordered(halves, halves); }, {"Half", "float"});
    expect_refusal([&] { world->make_group("twice", {0, 0, 1}); }, {"twice", "0, 0, 1"});
    expect_refusal([&] { world->make_group("others", {1 - world->rank()}); }, {"others", "include this one"});
    expect_refusal([&] { world->make_group("beyond", {0, 1, 2}); }, {"beyond", "world of 2"});
  });
}

}  // namespace
}  // namespace trireme
