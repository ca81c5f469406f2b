#include "trireme/plan/buckets.h"

#include <gtest/gtest.h>

#include <limits>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::plan {
namespace {

std::vector<ParamSpec> random_vectors(uint64_t seed) {
  std::vector<ParamSpec> params;
  const uint64_t count = 1 + mix64(seed, 0) % 40;
  for (uint64_t i = 0; i < count; ++i) {
    params.push_back({fmt::format("p{}", i), {static_cast<int64_t>(1 + mix64(seed, i + 1) % 300'000)}});
  }
  return params;
}

TEST(Buckets, HoldEveryParameterOnceFromTheLastToTheFirst) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto params = random_vectors(seed);
    size_t left = params.size();
    for (const UnitSpec& bucket : make_buckets(params, 4, 1 << 20)) {
      ASSERT_FALSE(bucket.params.empty());
      ASSERT_LE(bucket.params.size(), left);
      left -= bucket.params.size();
      for (size_t i = 0; i < bucket.params.size(); ++i)
        EXPECT_EQ(bucket.params[i].name, params[left + i].name);
    }
    EXPECT_EQ(left, 0u);
  }
}

TEST(Buckets, HaveCapsOfAnySize) {
  EXPECT_EQ(bucket_bytes(25.0), int64_t{25} << 20);
  EXPECT_EQ(bucket_bytes(1e-9), 1);
  for (const double mib : {1e13, 1e30, std::numeric_limits<double>::infinity()})
    EXPECT_EQ(bucket_bytes(mib), std::numeric_limits<int64_t>::max()) << mib;
}

TEST(Buckets, CloseAsSoonAsTheyReachTheirCap) {
  constexpr int64_t kCap = 3 << 20;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto buckets = make_buckets(random_vectors(seed), 4, kCap);
    for (size_t i = 0; i < buckets.size(); ++i) {
      const int64_t cap = i == 0 ? kFirstBucketBytes : kCap;
      const int64_t without_last_taken = 4 * (buckets[i].numel() - buckets[i].params.front().numel());
      EXPECT_LT(without_last_taken, cap) << "it was full before it took " << buckets[i].params.front().name;
      if (i + 1 < buckets.size()) {
        EXPECT_GE(4 * buckets[i].numel(), cap);
      }
    }
  }
}

}  // namespace
}  // namespace trireme::plan
