// controller_speed: what driving tensors from one program costs, for bench/controller_speed.py. Prints a JSON
// object a line. The workers are CPU processes behind a server of their own, or, for "SPMD", ranks that make
// the same program for themselves.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>
#include <vector>

#include "tests/controller/small_mini_gpt.h"
#include "tests/support/spawn.h"
#include "trireme/controller/worker_ranks.h"
#include "trireme/gt/capture.h"
#include "trireme/gt/schedule.h"
#include "trireme/gt/signal.h"
#include "trireme/gt/workers.h"

namespace trireme {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds of processor time that this thread has used.
double thread_s() {
  rusage use{};
  ::getrusage(RUSAGE_THREAD, &use);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

/// Seconds for a chain of products of (size, size) on every worker, until its end is known.
double chain_s(const gt::Tensor& weight, int64_t size, int64_t products) {
  gt::Tensor x = gt::full({size, size}, 1e-3);
  static_cast<void>(x.sum().item());
  const double begin = now_s();
  for (int64_t i = 0; i < products; ++i) x = gt::matmul(x, weight);
  static_cast<void>(x.sum().item());
  return now_s() - begin;
}

/// Seconds of a product in such a chain: the best of some, since whatever disturbs a machine adds time.
std::vector<double> products_s(const std::vector<int64_t>& sizes) {
  const gt::no_grad off;
  const gt::signal::context scope("all");
  std::vector<double> seconds;
  for (const int64_t size : sizes) {
    const gt::Tensor weight = gt::randn({size, size}) * 1e-3;
    const int64_t count = std::clamp<int64_t>(400'000'000 / (size * size * size), 100, 4000);
    double best = 1e9;
    for (int round = 0; round < 5; ++round) best = std::min(best, chain_s(weight, size, count));
    seconds.push_back(best / static_cast<double>(count));
  }
  return seconds;
}

const std::vector<int64_t> kSizes = {64, 128, 256, 512};

void time_instructions(int64_t workers) {
  constexpr int64_t kAdds = 50'000;
  const gt::no_grad off;
  gt::Tensor x = gt::full({4}, 0.0);
  const gt::Tensor one = gt::full({4}, 1.0);
  static_cast<void>(x.sum().item());
  const double begin = now_s(), mine = thread_s();
  for (int64_t i = 0; i < kAdds; ++i) x.add_(one);
  const double given = thread_s() - mine;
  static_cast<void>(x.sum().item());
  const double seconds = now_s() - begin;
  std::cout << fmt::format(R"({{"what":"adds","workers":{},"executed_per_s":{},"client_us":{}}})", workers,
                           kAdds * static_cast<double>(workers) / seconds, 1e6 * given / kAdds)
            << std::endl;
}

void time_fetches(int64_t workers) {
  const gt::Tensor x = gt::full({1}, 2.0);
  std::vector<double> seconds;
  for (int i = 0; i < 300; ++i) {
    const double begin = now_s();
    static_cast<void>(x.item());
    seconds.push_back(now_s() - begin);
  }
  std::cout << fmt::format(R"({{"what":"fetch","workers":{},"median_us":{}}})", workers,
                           1e6 * median(seconds))
            << std::endl;
}

void time_puts(int64_t workers) {
  const std::vector<float> values(16 << 20, 1.0F);
  std::vector<double> rates;
  for (int i = 0; i < 4; ++i) {
    const double begin = now_s();
    const gt::Tensor x = gt::tensor(values, {16, 1 << 20});
    static_cast<void>(x.slice(0, 0, 1).slice(1, 0, 1).sum().item());
    rates.push_back(4e-9 * static_cast<double>(values.size()) / (now_s() - begin));
  }
  std::cout << fmt::format(R"({{"what":"put","workers":{},"gb_per_s":{}}})", workers, median(rates))
            << std::endl;
}

std::string signals_for(int64_t workers) {
  const std::string path = fmt::format("/tmp/controller_speed-{}.yaml", ::getpid());
  std::string list;
  for (int64_t i = 0; i < workers; ++i) list += (i > 0 ? ", " : "") + std::to_string(i);
  std::ofstream(path) << fmt::format("all: {{workers: [{}], replicated: true}}\n", list);
  return path;
}

/// Milliseconds of a training step of a mini-GPT, and of the client's own work for it, as JSON behind `name`.
std::string step_ms(const std::string& name, const mini_gpt::Config& config, int64_t sequences,
                    gt::Capture* capture) {
  constexpr int64_t kRounds = 12, kUncounted = 6;
  gt::manual_seed(5);
  const mini_gpt::MiniGpt model(config);
  std::vector<gt::Tensor> parameters;
  for (const auto& [label, tensor] : model.parameters()) parameters.push_back(tensor);
  gt::AdamW optimizer(parameters, 1e-3);
  std::vector<int64_t> words(static_cast<size_t>(sequences * config.tokens));
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<int64_t>(i * i % 53);
  std::vector<gt::Tensor> losses;
  const auto loss_of = [&](int64_t) { return model.loss(words, words, sequences); };
  const auto step = [&] {
    losses.clear();
    if (config.stages > 1) {
      losses = gt::schedule("1f1b", kMicroBatches, loss_of);
    } else {
      for (int64_t i = 0; i < kMicroBatches; ++i) {
        losses.push_back(loss_of(i));
        (losses.back() * (1.0 / kMicroBatches)).backward();
      }
    }
    static_cast<void>(gt::clip_grad_norm(parameters, 0.5));
    optimizer.step();
    optimizer.zero_grad();
  };
  std::vector<double> wall, client;
  for (int64_t i = 0; i < kRounds + kUncounted; ++i) {
    const double begin = now_s(), mine = thread_s();
    capture != nullptr ? (*capture)(step) : step();
    const double given = thread_s() - mine;
    static_cast<void>(losses.back().item());
    if (i < kUncounted) continue;
    wall.push_back(now_s() - begin);
    client.push_back(given);
  }
  return fmt::format(R"(,"{0}_ms":{1},"{0}_client_ms":{2})", name, 1e3 * median(wall), 1e3 * median(client));
}

/// Steps of the tests' model on tensor parallelism of two in a pipeline.
void time_steps(int64_t workers) {
  const mini_gpt::Config config = with_stages(workers / 2);
  const std::string signals = signals_file(config, 2, workers);
  const gt::Workers behind = gt::gpu_workers(workers, {.signals = signals, .device = "cpu"});
  gt::Capture capture;
  const std::string times =
      step_ms("eager", config, kBatch, nullptr) + step_ms("captured", config, kBatch, &capture);
  std::cout << fmt::format(
                   R"({{"what":"step","workers":{},"instructions":{},"arguments":{},"replays":{}{}}})",
                   workers, capture.instructions(), capture.arguments(), capture.replays(), times)
            << std::endl;
  std::filesystem::remove(signals);
}

/// Steps of the document's model on one worker, on a GPU where there is one, beside a rank that makes the
/// same program for itself.
void time_demo() {
  mini_gpt::Config config;
  config.stages = 1;
  const std::string signals = signals_file(config, 1, 1);
  const bool on_gpu = at::hasCUDA();
  std::string times;
  gt::Capture capture;
  {
    const gt::Workers behind = gt::gpu_workers(1, {.signals = signals});
    times = step_ms("eager", config, kBatch, nullptr) + step_ms("captured", config, kBatch, &capture);
  }
  const auto world =
      comm::World::join_store(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                              on_gpu ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU), 60.0, {});
  {
    const gt::Workers rank(std::make_shared<controller::RankProgram>(world), {.signals = signals});
    times += step_ms("spmd", config, kBatch, nullptr);
  }
  std::cout << fmt::format(R"({{"what":"demo","gpu":{},"instructions":{},"arguments":{},"replays":{}{}}})",
                           on_gpu, capture.instructions(), capture.arguments(), capture.replays(), times)
            << std::endl;
  std::filesystem::remove(signals);
}

void measure(int64_t workers) {
  const std::string signals = signals_for(workers);
  std::vector<double> eager, spmd;
  {
    const gt::Workers behind = gt::gpu_workers(workers, {.signals = signals, .device = "cpu"});
    time_instructions(workers);
    time_fetches(workers);
    if (workers == 2) time_puts(workers);
    if (workers == 2) eager = products_s(kSizes);
    std::cout << fmt::format(R"({{"what":"idle","workers":{},"seconds":2}})", workers) << std::endl;
    std::this_thread::sleep_for(std::chrono::seconds(2));
    std::cout << R"({"what":"idle over"})" << std::endl;
  }
  if (workers == 2) {
    test::run_ranks(workers, [&](std::shared_ptr<comm::World> world) {
      at::set_num_threads(1);
      const auto runner = std::make_shared<controller::RankProgram>(world);
      const gt::Workers ranks(runner, {.signals = signals});
      const std::vector<double> seconds = products_s(kSizes);
      if (world->rank() == 0) spmd = seconds;
    });
  }
  for (size_t i = 0; i < eager.size(); ++i) {
    std::cout << fmt::format(R"({{"what":"product","size":{},"eager_us":{},"spmd_us":{},"more":{}}})",
                             kSizes[i], 1e6 * eager[i], 1e6 * spmd[i], eager[i] / spmd[i] - 1.0)
              << std::endl;
  }
  std::filesystem::remove(signals);
  if (workers % 4 == 0) time_steps(workers);
}

}  // namespace
}  // namespace trireme

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    std::string(argv[i]) == "demo" ? trireme::time_demo() : trireme::measure(std::atoll(argv[i]));
}
