// Every call of a store ends, whatever has become of the process that hosts it.
#include "trireme/comm/bounded_store.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "tests/comm/stores.h"
#include "trireme/base/clock.h"

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

TEST(BoundedStore, ALowerLimitEndsTheCallUnderWay) {
  const auto inner = c10::make_intrusive<FreezingStore>();
  const auto store = c10::make_intrusive<BoundedStore>(
      [inner]() -> c10::intrusive_ptr<c10d::Store> { return inner; }, 5.0, 60.0);
  inner->freeze();
  const double started = monotonic_seconds();
  std::thread caller([&] { EXPECT_THROW(store->check({"a"}), c10::DistNetworkError); });
  std::this_thread::sleep_for(200ms);
  store->limit_answer(0.3);
  caller.join();
  EXPECT_LT(monotonic_seconds() - started, 30.0) << "far below the 60 s that it began with";
  inner->thaw();
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
