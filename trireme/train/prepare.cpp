#include "trireme/train/prepare.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/error_of.h"
#include "trireme/base/hash.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/comm/agree.h"
#include "trireme/plan/batch.h"
#include "trireme/train/stop.h"

namespace trireme::train {
namespace {

constexpr double kRound_s = 0.25;  // between two exchanges of the ranks
constexpr double kFirstReport_s = 3.0;
constexpr double kReportEvery_s = 10.0;
constexpr double kFarewell_s = 10.0;  // for the preparing thread to notice that it is not wanted any more

struct GivenUp {};

/// open_run_data() on a thread of its own, so that this rank can hear of the others meanwhile.
class Preparation {
 public:
  explicit Preparation(const TrainOptions& run) : shared_(std::make_shared<Shared>()) {
    thread_ = std::thread([shared = shared_, run] { shared->run(run); });
  }
  Preparation(const Preparation&) = delete;
  Preparation& operator=(const Preparation&) = delete;
  ~Preparation() {
    shared_->given_up = true;
    // A thread that hangs in the kernel cannot be ended; it holds what it uses.
    wait_for(kFarewell_s) ? thread_.join() : thread_.detach();
  }

  /// Whether it is over within `seconds`.
  bool wait_for(double seconds) {
    std::unique_lock lock(shared_->mutex);
    return shared_->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                     [this] { return shared_->over; });
  }

  struct State {
    bool over = false;
    std::exception_ptr error;
    int64_t headway = 0;
    data::Progress progress;
    std::shared_ptr<const RunData> data;  ///< once over without an error
  };
  State state() const {
    const std::lock_guard lock(shared_->mutex);
    return *shared_;
  }

 private:
  struct Shared : State {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> given_up{false};

    void note(const data::Progress& now) {
      if (given_up) throw GivenUp();
      const std::lock_guard lock(mutex);
      if (now.beats != progress.beats || now.done != progress.done) ++headway;
      progress = now;
    }

    void run(const TrainOptions& options) {
      std::shared_ptr<const RunData> opened;
      std::exception_ptr failure;
      try {
        opened = open_run_data(options, [this](const data::Progress& now) { note(now); });
      } catch (...) {
        failure = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      data = std::move(opened);
      error = failure;
      over = true;
      changed.notify_all();
    }
  };

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

/// What a rank tells the others in a round.
struct Word {
  bool over = false;
  int signal = 0;
  double headway = 0.0, done = 0.0, total = 0.0;
  RunData::Sizes sizes = {};
  uint64_t digest = 0, held_out_digest = 0;
};

/// Ends the preparation on all ranks when one has failed or was sent a signal.
std::vector<Word> exchange(const TrainOptions& run, const comm::Mesh& mesh, const Preparation::State& mine) {
  std::vector<Word> words;
  const auto number = [](auto value) { return static_cast<double>(value); };
  const RunData::Sizes sizes = mine.data ? mine.data->sizes() : RunData::Sizes();
  const auto digest = comm::in_halves(mine.data ? mine.data->digest() : 0);
  const auto held_out = comm::in_halves(mine.data ? mine.data->held_out_digest() : 0);
  const std::vector<double> told = {number(mine.over),
                                    number(signal_heard(run)),
                                    number(mine.headway),
                                    number(mine.progress.done),
                                    number(mine.progress.total),
                                    number(sizes.train),
                                    number(sizes.val),
                                    digest[0],
                                    digest[1],
                                    held_out[0],
                                    held_out[1]};
  for (const std::vector<double>& heard : comm::gather_or_throw(*mesh.all, told, mine.error, "train.data")) {
    words.push_back({.over = heard[0] != 0.0,
                     .signal = static_cast<int>(heard[1]),
                     .headway = heard[2],
                     .done = heard[3],
                     .total = heard[4],
                     .sizes = {static_cast<int64_t>(heard[5]), static_cast<int64_t>(heard[6])},
                     .digest = comm::from_halves(heard[7], heard[8]),
                     .held_out_digest = comm::from_halves(heard[9], heard[10])});
  }
  const int signal = std::ranges::max_element(words, {}, &Word::signal)->signal;
  if (signal != 0) throw Stopped(signal);
  return words;
}

/// Throws when no rank makes headway for too long, and logs the headway.
class Watch {
 public:
  Watch(const TrainOptions& run, const comm::Mesh& mesh)
      : path_(run.config.data.mixture.sources.empty() ? run.config.data.path : "data.mixture"),
        draws_(plan::reads_images(run.config.model.family)),
        timeout_s_(mesh.world->timeout_s()),
        speaks_(run.announce && mesh.world->rank() == 0) {}

  void look(const std::vector<Word>& words) {
    const double now = monotonic_seconds();
    double headway = 0.0;
    for (const Word& word : words) headway += word.headway + static_cast<double>(word.over);
    if (headway != headway_) moved_at_ = now;
    headway_ = headway;
    const Word& furthest = *std::ranges::max_element(words, {}, &Word::done);
    if (now - moved_at_ > timeout_s_) {
      throw EnvironmentError(
          "[train.data] preparing {} has made no progress for {:.1f} s (comm.timeout_s), after {}; check its "
          "disk or network file system",
          path_, timeout_s_, how_far(furthest));
    }
    if (!speaks_ || now < report_at_) return;
    report_at_ = now + kReportEvery_s;
    log_info("data    preparing {}: {}", path_, how_far(furthest));
  }

 private:
  /// Headway in words. A rank reads text twice, once to choose what is held out and once to tokenise; images
  /// it draws.
  std::string how_far(const Word& word) const {
    if (word.total == 0.0) return "looking for its files";
    if (draws_) return fmt::format("{:.0f} of {:.0f} images drawn", word.done, word.total);
    return fmt::format("{:.0f}% of {}", 100.0 * word.done / word.total, format_bytes(word.total / 2.0));
  }

  std::string path_;
  bool draws_;
  double timeout_s_;
  bool speaks_;
  double headway_ = -1.0, moved_at_ = 0.0;
  double report_at_ = monotonic_seconds() + kFirstReport_s;
};

/// Throws on all ranks alike.
void check_same_data(const std::vector<Word>& words, const RunData& data) {
  const auto described = [&](const Word& word) {
    return fmt::format("{} + {} {} with digests {} + {}", word.sizes.train, word.sizes.val, data.counted(),
                       hex64(word.digest), hex64(word.held_out_digest));
  };
  for (size_t rank = 1; rank < words.size(); ++rank) {
    const std::string theirs = described(words[rank]), first = described(words[0]);
    if (theirs == first) continue;
    throw DataError(
        "[train.data] rank {} has {} (training + held out), but rank 0 has {}; give every host the same data",
        rank, theirs, first);
  }
}

}  // namespace

std::shared_ptr<const RunData> prepare_data(const TrainOptions& run, const comm::Mesh& mesh) {
  Preparation preparation(run);
  Watch watch(run, mesh);
  for (;;) {
    preparation.wait_for(kRound_s);
    beat();  // a preparation without headway has a deadline of its own
    const Preparation::State mine = preparation.state();
    const std::vector<Word> words = exchange(run, mesh, mine);
    watch.look(words);
    if (!std::ranges::all_of(words, &Word::over)) continue;
    const auto refusal = error_of([&] {
      check_same_data(words, *mine.data);
      mine.data->check_fits(run.config.model);
    });
    comm::throw_together(*mesh.all, refusal, "train.data");
    return mine.data;
  }
}

}  // namespace trireme::train
