// The document's demo: a mini-GPT on eight workers, tensor parallelism of two in a pipeline of four stages.
// One program, this one, drives them; a file of signals says who does what. It starts its workers itself, or
// joins a server with --port (the document's ten terminals: 'trireme serve -n 8' and eight times 'trireme
// worker'). With --checkpoint FILE it goes on from there when it is started again, and with --max-restarts it
// starts again by itself when a worker is lost. With --data PATH it learns from a text, which workers read.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "model.h"
#include "trireme/base/error.h"
#include "trireme/gt/capture.h"
#include "trireme/gt/dataset.h"
#include "trireme/gt/save.h"
#include "trireme/gt/schedule.h"
#include "trireme/gt/workers.h"

namespace {

struct Flags {
  std::map<std::string, std::string> values = {
      {"--config", ""},     {"--workers", "8"},        {"--port", ""},          {"--batch-size", "32"},
      {"--seq-len", "128"}, {"--micro-batches", "8"},  {"--steps", "10"},       {"--schedule", "1f1b"},
      {"--stages", "4"},    {"--num-layers", "8"},     {"--width", "1024"},     {"--heads", "16"},
      {"--hidden", "4096"}, {"--vocabulary", "50257"}, {"--lr", "0.0003"},      {"--precision", "fp32"},
      {"--checkpoint", ""}, {"--save-every", "100"},   {"--max-restarts", "0"}, {"--capture", "1"},
      {"--recompute", "0"}, {"--timeout", "300"},      {"--data", ""},          {"--tokenizer", "byte"}};

  int64_t number(const std::string& name, int64_t least = 1) const {
    char* end = nullptr;
    const std::string& text = values.at(name);
    const int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != 0 || value < least)
      throw trireme::ConfigError("{} is '{}', but must be a whole number from {} on", name, text, least);
    return value;
  }

  void read(int count, char** words) {
    for (int i = 1; i < count; i += 2) {
      const auto found = values.find(words[i]);
      if (found == values.end() || i + 1 == count)
        throw trireme::ConfigError("'{}' is no flag with a value; flags are {}", words[i], names());
      found->second = words[i + 1];
    }
  }

  std::string names() const {
    std::string all;
    for (const auto& [name, value] : values) all += (all.empty() ? "" : ", ") + name;
    return all;
  }
};

/// Words whose successors can be learned: each is a function of the one before it.
std::vector<int64_t> some_words(int64_t count, int64_t step, int64_t vocabulary) {
  std::vector<int64_t> words(static_cast<size_t>(count));
  int64_t word = 17 * step + 1;
  for (int64_t& one : words) one = word = (5 * word + 3) % std::min<int64_t>(vocabulary, 97);
  return words;
}

void train(const Flags& flags) {
  const mini_gpt::Config config{.layers = flags.number("--num-layers"),
                                .width = flags.number("--width"),
                                .heads = flags.number("--heads"),
                                .hidden = flags.number("--hidden"),
                                .vocabulary = flags.number("--vocabulary"),
                                .tokens = flags.number("--seq-len"),
                                .stages = flags.number("--stages"),
                                .recompute = flags.number("--recompute", 0) > 0};
  const int64_t micro_batches = flags.number("--micro-batches"), batch = flags.number("--batch-size");
  if (batch % micro_batches != 0)
    throw trireme::ConfigError("--batch-size {} is no multiple of --micro-batches {}", batch, micro_batches);
  const int64_t sequences = batch / micro_batches, words = sequences * config.tokens;
  const std::string& precision = flags.values.at("--precision");
  if (precision != "fp32" && precision != "bf16")
    throw trireme::ConfigError("--precision is '{}'; use fp32 or bf16", precision);
  const gt::autocast products(precision == "bf16" ? gt::Dtype::kBf16 : gt::Dtype::kFp32);
  const mini_gpt::MiniGpt model(config);
  std::vector<gt::Tensor> parameters;
  for (const auto& [name, tensor] : model.parameters()) parameters.push_back(tensor);
  gt::AdamW optimizer(parameters, std::strtod(flags.values.at("--lr").c_str(), nullptr));
  const std::string& checkpoint = flags.values.at("--checkpoint");
  const int64_t steps = flags.number("--steps"), save_every = flags.number("--save-every");
  const bool captured = flags.number("--capture", 0) > 0;
  gt::Capture capture;
  const std::string& path = flags.values.at("--data");
  gt::Dataset text;
  if (!path.empty())
    text = gt::dataset({.path = path,
                        .tokenizer = flags.values.at("--tokenizer"),
                        .seq_len = config.tokens,
                        .batch = sequences,
                        .vocab_size = config.vocabulary});
  // A micro-batch of the text, which workers read, or of words that this program makes.
  const auto loss_of = [&](int64_t number) {
    if (!path.empty()) {
      const auto [inputs, targets] = text.batch(number);
      return model.loss(inputs, targets);
    }
    const std::vector<int64_t> made = some_words(words + 1, number, config.vocabulary);
    return model.loss({made.begin(), made.end() - 1}, {made.begin() + 1, made.end()}, sequences);
  };
  const bool goes_on = !checkpoint.empty() && std::filesystem::exists(checkpoint);
  for (int64_t step = goes_on ? gt::load_training(checkpoint, model.parameters(), optimizer) : 0;
       step < steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<gt::Tensor> losses;
    gt::Tensor norm;
    const auto make = [&] {
      losses = gt::schedule(flags.values.at("--schedule"), micro_batches,
                            [&](int64_t micro_batch) { return loss_of(step * micro_batches + micro_batch); });
      norm = gt::clip_grad_norm(parameters, 1.0);
      optimizer.step();
      optimizer.zero_grad();
    };
    captured ? capture(make) : make();
    double loss = 0;
    for (const gt::Tensor& one : losses) loss += one.item() / static_cast<double>(micro_batches);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("step %ld  loss %.4f  gradient norm %.4f  %.0f ms  %.0f tokens/s\n",
                static_cast<long>(step + 1), loss, norm.item(), 1e3 * seconds.count(),
                static_cast<double>(batch * config.tokens) / seconds.count());
    std::fflush(stdout);
    if (!checkpoint.empty() && ((step + 1) % save_every == 0 || step + 1 == steps))
      gt::save_training(checkpoint, model.parameters(), optimizer, step + 1);
  }
}

/// Workers live as long as the run: the next one has others.
void run(const Flags& flags, const gt::Options& options) {
  const gt::Workers workers = flags.values.at("--port").empty()
                                  ? gt::gpu_workers(flags.number("--workers"), options)
                                  : gt::connect(flags.number("--port"), options);
  train(flags);
}

/// Starts again when a worker is lost, as often as it may.
void run_with_restarts(const Flags& flags, const gt::Options& options) {
  int64_t left = flags.number("--max-restarts", 0);
  if (left > 0 && flags.values.at("--checkpoint").empty())
    throw trireme::ConfigError("--max-restarts begins from nothing without --checkpoint FILE; name a file");
  for (;; --left) {
    try {
      return run(flags, options);
    } catch (const trireme::CommError& error) {
      if (left == 0) throw;
      std::fprintf(stderr, "%s\nnew workers; restarts left: %ld\n", error.what(),
                   static_cast<long>(left - 1));
    }
  }
}

}  // namespace

int main(int count, char** words) {
  try {
    Flags flags;
    flags.read(count, words);
    gt::Options options = gt::Options::from_environment();
    if (!flags.values.at("--config").empty()) options.signals = flags.values.at("--config");
    if (options.signals.empty()) options.signals = MINI_GPT_SIGNALS;
    options.timeout_s = static_cast<double>(flags.number("--timeout"));
    run_with_restarts(flags, options);
    return 0;
  } catch (const trireme::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
}
