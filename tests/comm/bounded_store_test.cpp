// Every call of a store ends, whatever has become of the process that hosts it.
#include "trireme/comm/bounded_store.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "tests/comm/stores.h"
#include "trireme/base/clock.h"
#include "trireme/base/descriptor.h"
#include "trireme/base/host.h"
#include "trireme/comm/name_server.h"

namespace trireme::comm {
namespace {

using test::FreezingStore;
using Bytes = std::vector<uint8_t>;
using namespace std::chrono_literals;

constexpr double kAnswer_s = 0.2;

c10::intrusive_ptr<BoundedStore> bounded(const c10::intrusive_ptr<c10d::Store>& store) {
  auto made = c10::make_intrusive<BoundedStore>([store] { return store; }, 5.0, kAnswer_s);
  made->setTimeout(100ms);
  return made;
}

TEST(BoundedStore, GivesWhatTheStoreGives) {
  const auto store = bounded(c10::make_intrusive<c10d::HashStore>());
  store->set("a", Bytes{1, 2});
  store->append("a", Bytes{3});
  EXPECT_EQ(store->get("a"), (Bytes{1, 2, 3}));
  EXPECT_EQ(store->add("n", 2), 2);
  EXPECT_EQ(store->add("n", 5), 7);
  EXPECT_TRUE(store->check({"a", "n"}));
  EXPECT_FALSE(store->check({"a", "b"}));
  EXPECT_EQ(store->multiGet({"a", "a"}).size(), 2u);
  EXPECT_TRUE(store->deleteKey("a"));
  EXPECT_EQ(store->getNumKeys(), 1);
}

TEST(BoundedStore, AKeyThatNeverComesIsATimeoutAndNoLoss) {
  const auto store = bounded(c10::make_intrusive<c10d::HashStore>());
  EXPECT_THROW(store->wait({"never"}, 50ms), c10::DistStoreError);
  store->set("a", Bytes{1});
  EXPECT_EQ(store->get("a"), Bytes{1});
}

TEST(BoundedStore, EveryCallOfAFrozenStoreEnds) {
  const std::vector<std::function<void(c10d::Store&)>> calls = {
      [](c10d::Store& store) { store.set("a", Bytes{1}); },
      [](c10d::Store& store) { store.compareSet("a", Bytes{1}, Bytes{2}); },
      [](c10d::Store& store) { store.get("a"); },
      [](c10d::Store& store) { store.add("n", 1); },
      [](c10d::Store& store) { store.deleteKey("a"); },
      [](c10d::Store& store) { store.check({"a"}); },
      [](c10d::Store& store) { store.getNumKeys(); },
      [](c10d::Store& store) { store.wait({"a"}); },
      [](c10d::Store& store) { store.wait({"a"}, 100ms); },
      [](c10d::Store& store) { store.append("a", Bytes{1}); },
      [](c10d::Store& store) { store.multiGet({"a"}); },
      [](c10d::Store& store) { store.multiSet({"a"}, {Bytes{1}}); },
  };
  const auto inner = c10::make_intrusive<FreezingStore>();
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto store = bounded(inner);
    inner->freeze();
    const double started = monotonic_seconds();
    EXPECT_THROW(calls[i](*store), c10::DistNetworkError) << "call " << i;
    EXPECT_LT(monotonic_seconds() - started, kAnswer_s + 0.1 + 3.0) << "call " << i;
    inner->thaw();
    EXPECT_THROW(store->check({"a"}), c10::DistNetworkError) << "a lost store is not asked again";
  }
}

/// A frozen store with a pulse that grows at every look, and what is done at one of the looks.
c10::intrusive_ptr<BoundedStore> beating(const c10::intrusive_ptr<FreezingStore>& inner, double longest_s,
                                         const std::function<void(int)>& at_look) {
  const auto looks = std::make_shared<std::atomic<int>>(0);
  auto made = c10::make_intrusive<BoundedStore>(
      [inner]() -> c10::intrusive_ptr<c10d::Store> { return inner; }, 5.0, kAnswer_s, longest_s,
      [looks, at_look] {
        at_look(++*looks);
        return static_cast<double>(*looks);
      });
  inner->freeze();
  return made;
}

TEST(BoundedStore, AHostThatIsOnlySlowIsWaitedFor) {
  const auto inner = c10::make_intrusive<FreezingStore>();
  const double started = monotonic_seconds();
  const auto store = beating(inner, 60.0, [inner](int look) {
    if (look == 30) inner->thaw();
  });
  EXPECT_FALSE(store->check({"a"}));
  EXPECT_GT(monotonic_seconds() - started, 3 * kAnswer_s) << "it was silent for longer than it may be";
}

TEST(BoundedStore, AHostThatIsSlowForEverIsGivenUp) {
  const auto inner = c10::make_intrusive<FreezingStore>();
  const auto store = beating(inner, 0.5, [](int) {});
  EXPECT_THROW(store->check({"a"}), c10::DistNetworkError);
  inner->thaw();
}

TEST(BoundedStore, AStillPulseIsSilence) {
  const auto inner = c10::make_intrusive<FreezingStore>();
  const auto store =
      c10::make_intrusive<BoundedStore>([inner]() -> c10::intrusive_ptr<c10d::Store> { return inner; }, 5.0,
                                        kAnswer_s, 60.0, [] { return 7.0; });
  inner->freeze();
  const double started = monotonic_seconds();
  EXPECT_THROW(store->check({"a"}), c10::DistNetworkError);
  EXPECT_LT(monotonic_seconds() - started, 30.0);
  inner->thaw();
}

TEST(ProcessorSeconds, GrowWithWorkAndStandStillInAStoppedProcess) {
  const double before = processor_seconds(::getpid());
  while (processor_seconds(::getpid()) <= before) {
  }
  const pid_t child = ::fork();
  if (child == 0) {
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  const double stopped = processor_seconds(child);
  EXPECT_GT(stopped, 0.0);
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(processor_seconds(child), stopped);
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  EXPECT_EQ(processor_seconds(child), 0.0);
}

TEST(NameServer, IsAskedNothing) {
  const Descriptor server(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof own;
  ASSERT_EQ(::bind(server.get(), reinterpret_cast<sockaddr*>(&own), size), 0);
  ASSERT_EQ(::getsockname(server.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
  std::thread([&] {
    ASSERT_EQ(::res_init(), 0);
    _res.nscount = 1;
    _res.nsaddr_list[0] = own;
    _res.retrans = _res.retry = 1;
    const int level = FLAGS_caffe2_log_level;
    {
      const WithoutNameServer unnamed;
      sockaddr_in stranger = own;
      stranger.sin_addr.s_addr = htonl(0xC0000201);  // 192.0.2.1, RFC 5737
      char host[NI_MAXHOST];
      ::getnameinfo(reinterpret_cast<sockaddr*>(&stranger), sizeof stranger, host, sizeof host, nullptr, 0,
                    0);
      EXPECT_GE(FLAGS_caffe2_log_level, 2) << "errors only";
    }
    EXPECT_EQ(FLAGS_caffe2_log_level, level);
    EXPECT_EQ(_res.nscount, 1) << "as before";
  }).join();
  char question[512];
  EXPECT_LT(::recv(server.get(), question, sizeof question, MSG_DONTWAIT), 0) << "a name was asked for";
}

TEST(BoundedStore, ALowerLimitEndsTheCallUnderWay) {
  const auto inner = c10::make_intrusive<FreezingStore>();
  const auto store = c10::make_intrusive<BoundedStore>(
      [inner]() -> c10::intrusive_ptr<c10d::Store> { return inner; }, 5.0, 60.0);
  inner->freeze();
  const double started = monotonic_seconds();
  std::thread caller([&] { EXPECT_THROW(store->check({"a"}), c10::DistNetworkError); });
  std::this_thread::sleep_for(200ms);
  store->limit_rest(0.3, 60.0);
  caller.join();
  EXPECT_LT(monotonic_seconds() - started, 30.0) << "far below the 60 s that it began with";
  inner->thaw();
}

/// Each of its calls takes a while.
class SlowStore final : public test::HookedStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }

 protected:
  void before_call(const std::string&) override { std::this_thread::sleep_for(100ms); }
};

TEST(BoundedStore, CallsThatFollowEachOtherHaveOneLimitTogether) {
  const auto inner = c10::make_intrusive<SlowStore>();
  const auto store = c10::make_intrusive<BoundedStore>(
      [inner]() -> c10::intrusive_ptr<c10d::Store> { return inner; }, 5.0, 60.0);
  store->limit_rest(60.0, 0.5);
  int answered = 0;
  const auto ask = [&] {
    while (answered < 20) {
      store->check({"a"});
      ++answered;
    }
  };
  EXPECT_THROW(ask(), c10::DistNetworkError);
  EXPECT_LE(answered, 5) << "of 0.1 s each";
}

TEST(BoundedStore, OpeningThatNeverEndsIsGivenUp) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  const double started = monotonic_seconds();
  const auto open = [released]() -> c10::intrusive_ptr<c10d::Store> {
    released.wait();
    return c10::make_intrusive<c10d::HashStore>();
  };
  EXPECT_THROW(c10::make_intrusive<BoundedStore>(open, 0.2), c10::DistNetworkError);
  EXPECT_LT(monotonic_seconds() - started, 1.0);
  release.set_value();
}

TEST(BoundedStore, OpeningThrowsWhatTheStoreThrew) {
  const auto open = []() -> c10::intrusive_ptr<c10d::Store> { throw std::runtime_error("no such host"); };
  EXPECT_THROW(c10::make_intrusive<BoundedStore>(open, 1.0), std::runtime_error);
}

}  // namespace
}  // namespace trireme::comm
