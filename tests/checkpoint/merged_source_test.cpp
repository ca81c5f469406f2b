// Adapters added to weights on the way out of their files, against the formula in plain loops.
#include "trireme/checkpoint/merged_source.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "trireme/base/hash.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/low_rank.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/peft.h"

namespace trireme::checkpoint::testing {
namespace {

plan::ModelConfig model_of(plan::ModelFamily family, plan::AdapterKind kind) {
  plan::ModelConfig model{.family = family,
                          .n_layers = 2,
                          .d_model = 16,
                          .n_heads = 4,
                          .n_kv_heads = family == plan::ModelFamily::kLlama ? 2 : 4,
                          .d_ff = 24,
                          .vocab_size = 32,
                          .max_seq_len = 64};
  model.adapter = {.kind = kind, .rank = 3, .alpha = 7.5};
  return plan::complete(model, 64);
}

/// Random tensors in memory, of a model's parameters that `select` wants.
class Memory : public Source {
 public:
  Memory(const plan::ModelConfig& model, bool frozen, const std::string& dtype,
         const std::string& prefix = "")
      : Source("memory") {
    std::mt19937 random(frozen ? 1 : 2);
    std::normal_distribution<float> normal;
    for (const plan::UnitSpec& unit : plan::describe(model, 64).units) {
      for (const plan::ParamSpec& param : frozen ? unit.frozen() : unit.trained()) {
        std::vector<float> values(static_cast<size_t>(param.numel()));
        for (float& value : values) value = normal(random);
        std::vector<char> bytes(values.size() * (dtype == "F32" ? 4 : 2));
        cast("F32", values.data(), dtype, bytes.data(), param.numel());
        cast(dtype, bytes.data(), "F32", values.data(), param.numel());
        tensors_[prefix + param.name] = {dtype, param.shape};
        bytes_[prefix + param.name] = std::move(bytes);
        values_[prefix + param.name] = std::move(values);
      }
    }
  }
  const std::map<std::string, std::string>& metadata() const override { return none_; }
  void read(const std::string& name, const plan::Region& region, void* out) const override {
    const size_t size = tensors_.at(name).dtype == "F32" ? 4 : 2;
    for (plan::RunCursor cursor(tensors_.at(name).shape, region); !cursor.done(); cursor.next()) {
      const plan::Run run = cursor.run();
      std::memcpy(static_cast<char*>(out) + static_cast<size_t>(run.local) * size,
                  bytes_.at(name).data() + static_cast<size_t>(run.begin) * size,
                  static_cast<size_t>(run.length) * size);
    }
  }
  const std::vector<float>& values(const std::string& name) const { return values_.at(name); }
  const std::vector<char>& bytes(const std::string& name) const { return bytes_.at(name); }

 private:
  std::map<std::string, std::string> none_;
  std::map<std::string, std::vector<char>> bytes_;
  std::map<std::string, std::vector<float>> values_;  ///< after rounding
};

/// The sum that adapters make of a layer, in double, with rows that give an output: (out, in).
struct Dense {
  int64_t out, in;
  std::vector<double> values;
  double& at(int64_t o, int64_t i) { return values[static_cast<size_t>(o * in + i)]; }
};

struct Case {
  plan::ModelFamily family;
  plan::AdapterKind kind;
  bool changes;  ///< of lengths; else the lengths themselves
  std::string dtype;
};

class Merged : public ::testing::TestWithParam<Case> {};

TEST_P(Merged, IsTheSumOfItsFormula) {
  const auto& [family, kind, changes, dtype] = GetParam();
  const plan::ModelConfig model = model_of(family, kind);
  const std::string prefix = changes ? "" : plan::kPeftPrefix;
  const bool in_out = plan::record_of(family).in_out;
  auto base = std::make_unique<Memory>(model, true, dtype);
  auto adapters = std::make_unique<Memory>(model, false, "F32", prefix);
  const Memory weights = *base, trained = *adapters;
  const auto merged = merge_adapters(
      std::move(base), {.source = std::move(adapters), .prefix = prefix, .lengths_are_changes = changes},
      model);
  ASSERT_EQ(merged->tensors().size(), weights.tensors().size());
  size_t adapted = 0;
  for (const auto& [name, tensor] : merged->tensors()) {
    EXPECT_EQ(tensor.dtype, "F32");
    std::vector<float> read(static_cast<size_t>(tensor.numel()));
    merged->read(name, plan::Region::whole(tensor.shape), read.data());
    const plan::AdapterNames names = plan::adapter_names(name);
    if (!trained.tensors().contains(prefix + names.first)) {
      EXPECT_EQ(read, weights.values(name)) << name;
      continue;
    }
    ++adapted;
    const std::vector<float>&a = trained.values(prefix + names.first),
          &b = trained.values(prefix + names.second), &w = weights.values(name);
    Dense dense{.out = tensor.shape[in_out ? 1 : 0], .in = tensor.shape[in_out ? 0 : 1], .values = {}};
    dense.values.resize(read.size());
    const auto place = [&](int64_t o, int64_t i) {
      return static_cast<size_t>(in_out ? i * dense.out + o : o * dense.in + i);
    };
    for (int64_t o = 0; o < dense.out; ++o) {
      double before = 0.0, after = 0.0;
      for (int64_t i = 0; i < dense.in; ++i) {
        double sum = w[place(o, i)];
        before += sum * sum;
        for (int64_t r = 0; r < 3; ++r)
          sum += 7.5 / 3.0 * a[static_cast<size_t>(r * dense.in + i)] * b[static_cast<size_t>(o * 3 + r)];
        dense.at(o, i) = sum;
        after += sum * sum;
      }
      double factor = 1.0;
      if (kind == plan::AdapterKind::kDora) {
        const double length = trained.values(prefix + names.magnitude)[static_cast<size_t>(o)];
        factor = (length + (changes ? std::sqrt(before) : 0.0)) / std::sqrt(after);
      }
      for (int64_t i = 0; i < dense.in; ++i)
        ASSERT_NEAR(read[place(o, i)], dense.at(o, i) * factor, 2e-5) << name << " " << o << " " << i;
    }
  }
  EXPECT_EQ(adapted, family == plan::ModelFamily::kLlama ? 14u : 8u);
}

INSTANTIATE_TEST_SUITE_P(
    Files, Merged,
    ::testing::Values(Case{plan::ModelFamily::kLlama, plan::AdapterKind::kLora, false, "F32"},
                      Case{plan::ModelFamily::kLlama, plan::AdapterKind::kDora, true, "BF16"},
                      Case{plan::ModelFamily::kGpt2, plan::AdapterKind::kLora, true, "F16"},
                      Case{plan::ModelFamily::kGpt2, plan::AdapterKind::kDora, false, "F32"}));

TEST(MergedSource, GivesAnyRegionOfEachOfItsTensorsInAnyOrder) {
  const plan::ModelConfig model = model_of(plan::ModelFamily::kLlama, plan::AdapterKind::kLora);
  const auto merged = merge_adapters(std::make_unique<Memory>(model, true, "BF16"),
                                     {.source = std::make_unique<Memory>(model, false, "F32")}, model);
  for (const std::string name : {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight",
                                 "model.layers.0.mlp.up_proj.weight"}) {
    const plan::Shape& shape = merged->tensors().at(name).shape;
    std::vector<float> whole(static_cast<size_t>(shape[0] * shape[1])), box(6), flat(5);
    merged->read(name, plan::Region::whole(shape), whole.data());
    merged->read(name, plan::Region::box({4, 3}, {2, 3}), box.data());
    merged->read(name, plan::Region::flat(shape, {14, 19}), flat.data());
    for (size_t i = 0; i < 6; ++i)
      EXPECT_EQ(box[i], whole[(4 + i / 3) * static_cast<size_t>(shape[1]) + 3 + i % 3]);
    for (size_t i = 0; i < 5; ++i) EXPECT_EQ(flat[i], whole[14 + i]);
  }
}

TEST(MergedSource, ARowOfZerosHasNoLengthToBecomeAnother) {
  std::vector<float> weight = {0.0F, 0.0F, 3.0F, 4.0F};
  const std::vector<float> first = {1.0F, 1.0F}, second = {0.0F, 0.0F}, lengths = {2.0F, 10.0F};
  add_low_rank(layer_weight(weight, {2, 2}, false), {.first = first, .second = second, .lengths = lengths});
  EXPECT_EQ(weight, (std::vector<float>{0.0F, 0.0F, 6.0F, 8.0F}));
}

TEST(MergedSource, TheDigestOfABaseIsThatOfItsFrozenValuesInOneDtype) {
  const plan::ModelConfig model = model_of(plan::ModelFamily::kGpt2, plan::AdapterKind::kLora);
  const plan::ModelFacts facts = plan::describe(model, 64);
  const Memory base(model, true, "BF16");
  StreamingHash narrow, wide;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.frozen()) {
      narrow.update(base.bytes(param.name).data(), base.bytes(param.name).size());
      wide.update(base.values(param.name).data(), base.values(param.name).size() * sizeof(float));
    }
  }
  EXPECT_EQ(digest_of_frozen(base, facts, "BF16"), hex64(narrow.digest()));
  EXPECT_EQ(digest_of_frozen(base, facts, "F32"), hex64(wide.digest()));
}

}  // namespace
}  // namespace trireme::checkpoint::testing
