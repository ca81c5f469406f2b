// Sums modulo 10 as a data set of your own, with a metric and a callback: ./own_data config.yaml -n 2
#include <ATen/ATen.h>

#include <random>

#include "trireme/cli/train_main.h"

using namespace trireme;

constexpr int64_t kPlus = 10, kEquals = 11, kComma = 12, kTokens = 13;
constexpr int64_t kLength = 6;  // of "7+5=2,"
constexpr int64_t kAnswer = 4;  // where its result stands

/// Rows of sums: row i is a pure function of i, so that any rank can make it, and a run that goes on finds it
/// again.
class Sums : public data::TokenSamples {
 public:
  Sums(int64_t first, int64_t count, int64_t seq_len) : first_(first), count_(count), seq_len_(seq_len) {}

  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return seq_len_; }
  uint64_t digest() const override {
    std::seed_seq seeds{first_, count_, seq_len_};
    return std::mt19937_64(seeds)();
  }
  void read(int64_t index, std::span<int64_t> tokens) const override {
    std::mt19937_64 random(static_cast<uint64_t>(first_ + index));
    for (size_t at = 0; at < tokens.size(); at += kLength) {
      const auto a = static_cast<int64_t>(random() % 10), b = static_cast<int64_t>(random() % 10);
      const int64_t sum[kLength] = {a, kPlus, b, kEquals, (a + b) % 10, kComma};
      std::copy_n(sum, std::min<size_t>(kLength, tokens.size() - at),
                  tokens.begin() + static_cast<int64_t>(at));
    }
  }

 private:
  int64_t first_, count_, seq_len_;
};

/// How many results are guessed right, and how many there are: logits (B, T, V), targets (B, T).
std::vector<double> count_right(const at::Tensor& logits, const at::Tensor& targets) {
  const auto results = [](const at::Tensor& of_all) {
    return of_all.slice(1, kAnswer - 1, c10::nullopt, kLength);
  };
  const at::Tensor right = results(logits.argmax(-1)).eq(results(targets));
  return {right.sum().item<double>(), static_cast<double>(right.numel())};
}

/// Ends the run after two validations in a row without a mistake.
class StopsWhenItCanAdd : public train::Callback {
 public:
  std::optional<std::string> on_validation(const StepRecord& step) override {
    perfect_ = step.val_metrics.at("accuracy") == 1.0 ? perfect_ + 1 : 0;
    if (perfect_ < 2) return std::nullopt;
    return "it has added without a mistake twice";
  }
  std::string state() const override { return std::to_string(perfect_); }
  void restore(const std::string& state) override { perfect_ = std::stoi(state); }

 private:
  int perfect_ = 0;
};

int main(int argc, char** argv) {
  train::Program program;
  program.open_data = [](const plan::Config& config) {
    const int64_t seq_len = config.data.seq_len;
    return train::make_run_data(config, {.train = std::make_shared<Sums>(0, 4096, seq_len),
                                         .held_out = std::make_shared<Sums>(4096, 128, seq_len),
                                         .vocab_size = kTokens,
                                         .description = "sums modulo 10"});
  };
  program.metrics = {{.name = "accuracy", .add = count_right}};
  program.callbacks = {std::make_shared<StopsWhenItCanAdd>()};
  return cli::train_main(argc, argv, program);
}
