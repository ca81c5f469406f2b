#include "trireme/train/scorer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/plan/model_facts.h"
#include "trireme/state/state_file.h"
#include "trireme/train/connect.h"

namespace trireme::train {
namespace {

constexpr int64_t kMostRows = 64;                  // of a batch
constexpr int64_t kMostLogits = int64_t{1} << 25;  // of a batch of several rows: 128 MiB
constexpr int64_t kIgnored = -100;                 // as nn::cross_entropy() has it

int64_t inputs_of(const ScoredTokens& row) {
  return std::ssize(row.tokens) - 1;
}

/// Deals what next() gives into batches, and knows how many rows each had.
class Batches {
 public:
  Batches(const Scorer::Next& next, int64_t vocab_size) : next_(next), vocab_size_(vocab_size) {}

  /// The next batch; empty: there are no more.
  std::vector<ScoredTokens> next() {
    std::vector<ScoredTokens> rows;
    int64_t longest = 0;
    for (take(); waiting_; take()) {
      longest = std::max(longest, inputs_of(*waiting_));
      const int64_t count = std::ssize(rows) + 1;
      const bool full = count > kMostRows || count * longest * vocab_size_ > kMostLogits;
      if (full && !rows.empty()) break;
      rows.push_back(std::move(*waiting_));
      waiting_.reset();
    }
    if (!rows.empty()) sizes_.push_back(rows.size());
    return rows;
  }

  const std::vector<size_t>& sizes() const { return sizes_; }

 private:
  void take() {
    if (waiting_ || over_) return;
    waiting_ = next_();
    over_ = !waiting_;
    if (over_) return;
    TRIREME_CHECK(waiting_->from >= 1 && waiting_->from < waiting_->tokens.size(),
                  "[train.scorer] tokens from {} of {} cannot be scored", waiting_->from,
                  waiting_->tokens.size());
  }

  const Scorer::Next& next_;
  int64_t vocab_size_;
  std::optional<ScoredTokens> waiting_;  ///< did not fit into the batch before
  bool over_ = false;
  std::vector<size_t> sizes_;
};

/// Every rank reads all batches, since only then does it know which are its own; most time goes into passes.
std::vector<ScoredTokens> next_of_rank(Batches& batches, const comm::Group& ranks) {
  std::vector<ScoredTokens> mine;
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<ScoredTokens> rows = batches.next();
    if (rank == ranks.rank()) mine = std::move(rows);
  }
  return mine;
}

/// The scores of all ranks in the order of the batches, of which a rank has every n-th.
std::vector<double> in_order(const std::vector<double>& mine, const std::vector<size_t>& sizes,
                             comm::Group& ranks) {
  const auto count = static_cast<size_t>(ranks.size());
  std::vector<size_t> by_rank(count, 0);
  for (size_t batch = 0; batch < sizes.size(); ++batch) by_rank[batch % count] += sizes[batch];
  std::vector<double> padded = mine;
  padded.resize(std::max<size_t>(1, std::ranges::max(by_rank)));
  const std::vector<std::vector<double>> all = comm::gather_scalars(ranks, padded);
  std::vector<size_t> taken(count, 0);
  std::vector<double> scores;
  for (size_t batch = 0; batch < sizes.size(); ++batch) {
    const size_t rank = batch % count;
    const auto begin = all[rank].begin() + static_cast<std::ptrdiff_t>(taken[rank]);
    scores.insert(scores.end(), begin, begin + static_cast<std::ptrdiff_t>(sizes[batch]));
    taken[rank] += sizes[batch];
  }
  return scores;
}

/// Rows of zeros and of targets that do not count up to the longest row: what comes later changes nothing of
/// what was before.
struct Padded {
  at::Tensor inputs, targets;  ///< (B, T) int64
};

Padded padded(const std::vector<ScoredTokens>& rows) {
  const int64_t longest = inputs_of(*std::ranges::max_element(rows, {}, inputs_of));
  const auto count = static_cast<int64_t>(rows.size());
  Padded batch{at::zeros({count, longest}, at::kLong), at::full({count, longest}, kIgnored, at::kLong)};
  for (int64_t row = 0; row < count; ++row) {
    const auto& [tokens, from] = rows[static_cast<size_t>(row)];
    int64_t* const inputs = batch.inputs.mutable_data_ptr<int64_t>() + row * longest;
    int64_t* const targets = batch.targets.mutable_data_ptr<int64_t>() + row * longest;
    std::copy(tokens.begin(), tokens.end() - 1, inputs);
    std::copy(tokens.begin() + static_cast<std::ptrdiff_t>(from), tokens.end(), targets + from - 1);
  }
  return batch;
}

/// Weights are read right after.
void leave_zeros(const std::string&, const plan::Region&, at::Tensor& out) {
  out.zero_();
}

}  // namespace

Scorer::Scorer(const plan::ModelConfig& model, const std::string& weights, std::shared_ptr<comm::World> world)
    : model_(nn::build(model)),
      vocab_size_(model.vocab_size),
      mesh_(comm::make_mesh(world, plan::MeshShape::fit(plan::ParallelConfig(), world->size()))) {
  engine_ =
      std::make_unique<parallel::DataParallel>(*model_, plan::describe(model, model.max_seq_len).units, mesh_,
                                               parallel::Options{.device = world->device()}, leave_zeros);
  connect(*model_, *engine_);
  state::load_weights(*engine_, weights);
  model_->eval();
}

/// Engines refer to the model.
Scorer::~Scorer() {
  engine_.reset();
}

std::vector<double> Scorer::score(const Next& next) {
  Batches batches(next, vocab_size_);
  std::vector<double> mine;
  {
    auto evaluation = engine_->evaluate(parallel::Keep::kByUnit);
    std::vector<ScoredTokens> rows = next_of_rank(batches, *mesh_.all);
    while (evaluation.next(!rows.empty())) {
      const std::vector<double> scores = score_batch(rows);
      mine.insert(mine.end(), scores.begin(), scores.end());
      rows = next_of_rank(batches, *mesh_.all);
    }
  }
  return in_order(mine, batches.sizes(), *mesh_.all);
}

std::vector<double> Scorer::score_batch(const std::vector<ScoredTokens>& rows) {
  const at::Device device = engine_->mesh().world->device();
  const auto [inputs, targets] = padded(rows);
  const at::Tensor logits = model_->forward(inputs.to(device)).to(at::kFloat).flatten(0, 1);
  const at::Tensor losses =
      at::cross_entropy_loss(logits, targets.to(device).flatten(), {}, at::Reduction::None, kIgnored);
  const at::Tensor sums = losses.view(targets.sizes()).sum(1, false, at::kDouble).cpu();
  const auto* const first = sums.const_data_ptr<double>();
  return {first, first + sums.numel()};
}

}  // namespace trireme::train
