#include "trireme/train/guesses.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/data/images/codec.h"

namespace trireme::train {
namespace {

using Mistake = Classification::Mistake;

/// Of equal losses the earlier sample comes first, so that the order of ranks does not matter.
bool is_worse(const Mistake& a, const Mistake& b) {
  return std::tuple(-a.loss, a.sample) < std::tuple(-b.loss, b.sample);
}

void keep_if_worse(std::vector<Mistake>& worst, const Mistake& mistake) {
  worst.insert(std::ranges::upper_bound(worst, mistake, is_worse), mistake);
  if (std::ssize(worst) > Guesses::kMostMistakes) worst.pop_back();
}

/// A mistake as numbers, and back.
constexpr size_t kNumbers = 6;

void append_numbers(const Mistake& mistake, std::vector<double>& numbers) {
  for (const int64_t place : {mistake.sample, mistake.truth, mistake.guess})
    numbers.push_back(static_cast<double>(place));
  for (const double value : {mistake.loss, mistake.guess_probability, mistake.truth_probability})
    numbers.push_back(value);
}

Mistake mistake_of(const double* numbers) {
  return {.sample = std::llround(numbers[0]),
          .truth = std::llround(numbers[1]),
          .guess = std::llround(numbers[2]),
          .loss = numbers[3],
          .guess_probability = numbers[4],
          .truth_probability = numbers[5]};
}

/// The worst mistakes of all ranks. A rank with fewer than kMostMistakes fills up its list with samples below
/// 0.
std::vector<Mistake> worst_of(comm::Group& group, const std::vector<Mistake>& mine) {
  std::vector<double> numbers;
  for (const Mistake& mistake : mine) append_numbers(mistake, numbers);
  numbers.resize(kNumbers * static_cast<size_t>(Guesses::kMostMistakes), -1.0);
  std::vector<Mistake> worst;
  for (const std::vector<double>& rank : comm::gather_scalars(group, numbers)) {
    for (size_t at = 0; at < rank.size() && rank[at] >= 0.0; at += kNumbers)
      keep_if_worse(worst, mistake_of(&rank[at]));
  }
  return worst;
}

}  // namespace

Guesses::Guesses(int64_t classes) : classes_(classes) {
  TRIREME_CHECK(classes >= 1, "[train.guesses] {} classes; at least 1 is needed", classes);
  if (classes <= kMostClasses) counts_.resize(static_cast<size_t>(classes * classes), 0.0);
}

void Guesses::add(const at::Tensor& logits, const at::Tensor& targets, const std::vector<int64_t>& samples) {
  TRIREME_CHECK(logits.dim() == 2 && logits.size(1) == classes_ && logits.size(0) == std::ssize(samples),
                "[train.guesses] logits of {} rows and {} classes do not match {} samples of {} classes",
                logits.size(0), logits.size(1), samples.size(), classes_);
  const at::Tensor target = targets.unsqueeze(1);                    // (B, 1)
  const at::Tensor guess = logits.argmax(1, /*keepdim=*/true);       // (B, 1), of equal ones the first
  const at::Tensor log_p = at::log_softmax(logits, 1, at::kDouble);  // (B, classes); a NaN makes its row NaN
  const at::Tensor rows =
      at::cat(
          {target.to(at::kDouble), guess.to(at::kDouble), log_p.gather(1, target), log_p.gather(1, guess)}, 1)
          .cpu();
  const auto* row = rows.const_data_ptr<double>();
  for (const int64_t sample : samples) {
    add_row({.sample = sample,
             .truth = std::llround(row[0]),
             .guess = std::llround(row[1]),
             .loss = -row[2],
             .guess_probability = std::exp(row[3]),
             .truth_probability = std::exp(row[2])});
    row += 4;
  }
}

void Guesses::add_row(const Mistake& row) {
  images_ += 1.0;
  if (std::isnan(row.guess_probability)) {
    not_finite_ += 1.0;
    return;
  }
  if (!counts_.empty()) counts_[static_cast<size_t>(row.truth * classes_ + row.guess)] += 1.0;
  if (row.truth == row.guess) {
    right_ += 1.0;
  } else {
    keep_if_worse(worst_, row);
  }
}

Classification Guesses::of_all_ranks(comm::Group& group) const {
  std::vector<double> mine = counts_;
  for (const double count : {images_, right_, not_finite_}) mine.push_back(count);
  at::Tensor sums = at::tensor(mine, at::kDouble).to(group.device());
  group.all_reduce(sums, comm::ReduceOp::kSum);
  const at::Tensor counts = sums.to(at::kLong).cpu();
  group.check();
  const auto* count = counts.const_data_ptr<int64_t>();
  Classification all;
  all.confusion.assign(count, count + counts_.size());
  count += counts_.size();
  all.images = count[0];
  all.right = count[1];
  all.not_finite = count[2];
  all.worst = worst_of(group, worst_);
  return all;
}

void describe(Classification& classification, const RunData& data) {
  classification.classes = data.classes();
  for (Mistake& mistake : classification.worst) {
    mistake.name = data.held_out_name(mistake.sample);
    try {
      mistake.picture = data.held_out_picture(mistake.sample);
    } catch (const data::BrokenImage& error) {
      log_warning("{} cannot be read again: {}", mistake.name, error.what());
    }
  }
}

}  // namespace trireme::train
