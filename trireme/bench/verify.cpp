#include "trireme/bench/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "trireme/base/text.h"
#include "trireme/report/step_times.h"

namespace trireme::bench {
namespace {

const Arm& arm_of(const Evidence& evidence, const Sample& sample) {
  return (*evidence.arms)[static_cast<size_t>(sample.slot.arm)];
}

/// "block 2, overlaps".
std::string name_of(const Evidence& evidence, const Sample& sample) {
  return fmt::format("block {}, {}", sample.slot.block + 1, arm_of(evidence, sample).name);
}

const Sample& reference(const Evidence& evidence) {
  return *std::ranges::find_if(*evidence.samples, [](const Sample& one) { return one.slot.arm == 0; });
}

/// A check over all runs: `wrong` says what is wrong with one, or nothing.
template <typename Wrong>
Check check_each(const Evidence& evidence, std::string what, std::string good, Wrong wrong) {
  for (const Sample& sample : *evidence.samples) {
    const std::string problem = wrong(sample);
    if (!problem.empty())
      return {.what = std::move(what),
              .holds = false,
              .detail = fmt::format("{}: {}", name_of(evidence, sample), problem)};
  }
  return {.what = std::move(what), .holds = true, .detail = std::move(good)};
}

std::string wrong_end(const Sample& sample) {
  if (sample.code != 0) return fmt::format("it ended with code {}", sample.code);
  return sample.error;
}

std::string wrong_steps(const Evidence& evidence, const Sample& sample) {
  const auto due = static_cast<size_t>(evidence.steps);
  if (sample.step_ms.size() == due && sample.losses.size() == due) return "";
  return fmt::format("{} steps and {} losses were recorded, not {}", sample.step_ms.size(),
                     sample.losses.size(), due);
}

/// Batches of its own are declared: all else is the same.
std::map<std::string, std::string> compared_workload(const Arm& arm, std::map<std::string, std::string> of) {
  if (arm.owed == Owed::kFiniteLosses) of.erase(kTokensKey);
  return of;
}

std::string wrong_workload(const Evidence& evidence, const Sample& sample) {
  const Arm& arm = arm_of(evidence, sample);
  if (sample.workload.at(kTokensKey).empty()) return "its steps had different numbers of tokens";
  const auto ours = compared_workload(arm, sample.workload);
  const auto theirs = compared_workload(arm, reference(evidence).workload);
  for (const auto& [key, value] : theirs) {
    const auto found = ours.find(key);
    const std::string here = found == ours.end() ? "nothing" : found->second;
    if (here != value) return fmt::format("{} is {}, and {} of the reference", key, here, value);
  }
  return ours.size() == theirs.size() ? "" : "it has keys that the reference does not have";
}

/// The first step of which a number, `what`, differs by more than `bound`, in words; empty: none does.
std::string wrong_numbers(const char* what, const std::vector<double>& ours,
                          const std::vector<double>& theirs, double bound) {
  const size_t count = std::min(ours.size(), theirs.size());
  for (size_t i = 0; i < count; ++i) {
    const double difference = std::abs(ours[i] - theirs[i]);
    if (difference <= bound * std::abs(theirs[i])) continue;
    return fmt::format(
        "the {} of step {} is {:.6f}, and {:.6f} of the other, a difference of {:.2g} where "
        "{:.2g} is allowed",
        what, i + 1, ours[i], theirs[i], difference / std::abs(theirs[i]), bound);
  }
  return "";
}

std::string wrong_losses(const std::vector<double>& ours, const std::vector<double>& theirs, double bound) {
  return wrong_numbers("loss", ours, theirs, bound);
}

/// Rounding moves the norm of a gradient more than it moves a loss.
double norm_bound(const std::string& compute) {
  return 10.0 * loss_bound(compute);
}

/// Gradients that are wrong in every arm move the losses little and late, and the norm at once. The first
/// steps tell, before small differences have grown.
std::string wrong_gradients(const Sample& ours, const Sample& theirs) {
  constexpr size_t kFirst = 6;
  std::vector<double> first = ours.grad_norms;
  first.resize(std::min(first.size(), kFirst));
  return wrong_numbers("gradient norm", first, theirs.grad_norms, norm_bound(ours.compute));
}

/// Bits of equal runs vary, so those of runs with train.deterministic=true tell; without these, or where
/// their bits vary, too, the losses of the first steps, before small differences have grown.
std::string wrong_where_bits_vary(const Evidence& evidence, const Sample& sample) {
  const Sample& other = reference(evidence);
  if (evidence.proofs == nullptr || evidence.proofs->empty())
    return wrong_losses(sample.losses, other.losses, loss_bound(sample.compute));
  const Sample& theirs = evidence.proofs->front();
  const Sample& proof = (*evidence.proofs)[static_cast<size_t>(sample.slot.arm)];
  for (const Sample* one : {&theirs, &proof}) {
    if (const std::string wrong = wrong_end(*one); !wrong.empty())
      return "run with train.deterministic=true, " + wrong;
  }
  const bool is_exact = proof.why_bits_vary.empty() && theirs.why_bits_vary.empty();
  if (is_exact && proof.weights_digest != theirs.weights_digest) {
    return fmt::format(
        "after {} steps with train.deterministic=true its weights have the digest {}, and {} of the "
        "reference",
        proof.losses.size(), proof.weights_digest, theirs.weights_digest);
  }
  std::vector<double> first = sample.losses;
  first.resize(std::min(first.size(), proof.losses.size()));
  return wrong_losses(first, other.losses, loss_bound(sample.compute));
}

std::string wrong_result(const Evidence& evidence, const Sample& sample) {
  const Arm& arm = arm_of(evidence, sample);
  const Sample& other = reference(evidence);
  switch (arm.owed) {
    case Owed::kFiniteLosses:
      return "";
    case Owed::kNearLosses:
      return wrong_losses(sample.losses, other.losses, arm.bound);
    case Owed::kSameLosses:
      return wrong_losses(sample.losses, other.losses, loss_bound(sample.compute));
    case Owed::kSameWeights:
      break;
  }
  if (sample.weights_digest.empty()) return "it has no digest of its weights";
  if (sample.weights_digest == other.weights_digest) return "";
  if (!sample.why_bits_vary.empty() || !other.why_bits_vary.empty())
    return wrong_where_bits_vary(evidence, sample);
  return fmt::format("its weights have the digest {}, and {} of the reference", sample.weights_digest,
                     other.weights_digest);
}

/// Steps are parts of the time that training took, and waiting for others is part of a step.
std::string wrong_clock(const Sample& sample) {
  for (size_t i = 0; i < sample.step_ms.size(); ++i) {
    if (!(std::isfinite(sample.step_ms[i]) && sample.step_ms[i] > 0.0))
      return fmt::format("step {} took {} ms", i + 1, number_text(sample.step_ms[i]));
  }
  const double sum_s = 1e-3 * std::accumulate(sample.step_ms.begin(), sample.step_ms.end(), 0.0);
  if (sum_s > 1.02 * sample.wall_s + 0.01)
    return fmt::format("its steps took {:.3f} s, but the whole run {:.3f} s", sum_s, sample.wall_s);
  const double longest = *std::ranges::max_element(sample.step_ms);
  if (sample.exposed_ms > longest)
    return fmt::format("{:.3f} ms of a step waited, more than the longest step took", sample.exposed_ms);
  return "";
}

/// Two runs never take the same time to the last bit, step by step.
std::string wrong_origin(const Evidence& evidence, const Sample& sample) {
  for (const Sample& other : *evidence.samples) {
    if (&other == &sample) break;
    if (other.directory == sample.directory)
      return fmt::format("it has the directory of {}", name_of(evidence, other));
    if (other.step_ms == sample.step_ms)
      return fmt::format("its step times are those of {}, bit by bit", name_of(evidence, other));
  }
  return "";
}

std::string wrong_traffic(const Sample& sample) {
  if (sample.predicted_sent_bytes < 0 || sample.sent_bytes == sample.predicted_sent_bytes) return "";
  return fmt::format("a rank sent {} bytes in a step, and its program says {}", sample.sent_bytes,
                     sample.predicted_sent_bytes);
}

/// For how many runs it can be said.
std::string traffic_known(const Evidence& evidence) {
  const auto known = std::ranges::count_if(*evidence.samples,
                                           [](const Sample& one) { return one.predicted_sent_bytes >= 0; });
  return fmt::format("in {} of {} runs; no formula tells of others", known, evidence.samples->size());
}

Check check_twin(const Evidence& evidence) {
  const std::string what = "one rank that shards nothing trains the same";
  if (evidence.twin == nullptr)
    return {.what = what, .holds = true, .detail = "not checked: " + evidence.why_no_twin};
  const Sample& twin = *evidence.twin;
  const Sample& ours = reference(evidence);
  std::string problem = wrong_end(twin);
  if (problem.empty() && twin.losses.empty()) problem = "it recorded no loss";
  if (problem.empty() && twin.workload != ours.workload) problem = "it trained another workload";
  if (problem.empty()) problem = wrong_losses(ours.losses, twin.losses, loss_bound(ours.compute));
  if (problem.empty()) problem = wrong_gradients(ours, twin);
  if (!problem.empty()) return {.what = what, .holds = false, .detail = problem};
  std::string same = fmt::format("its first {} losses are within {:g} of the reference's",
                                 std::min(twin.losses.size(), ours.losses.size()), loss_bound(ours.compute));
  if (!twin.grad_norms.empty() && !ours.grad_norms.empty())
    same += fmt::format(", the first norms of gradients within {:g}", norm_bound(ours.compute));
  return {.what = what, .holds = true, .detail = same};
}

/// Where bits of equal runs vary, other runs or losses show that weights are the same.
std::string what_stood_for_weights(const Evidence& evidence) {
  for (const Sample& sample : *evidence.samples) {
    const bool differs = arm_of(evidence, sample).owed == Owed::kSameWeights &&
                         sample.weights_digest != reference(evidence).weights_digest;
    if (!differs) continue;
    const std::string& why =
        sample.why_bits_vary.empty() ? reference(evidence).why_bits_vary : sample.why_bits_vary;
    const bool is_proven = evidence.proofs != nullptr && !evidence.proofs->empty() &&
                           evidence.proofs->front().why_bits_vary.empty();
    return fmt::format(
        "digests differ, since bits vary here ({}), so {} stood for equal weights", why,
        is_proven
            ? fmt::format("{} steps with train.deterministic=true, whose weights have the digest {},",
                          evidence.proofs->front().losses.size(), evidence.proofs->front().weights_digest)
            : fmt::format("losses within {:g}", loss_bound(sample.compute)));
  }
  return "";
}

std::string owed_by_all(const Evidence& evidence) {
  std::vector<std::string> lines;
  for (const Arm& arm : *evidence.arms) lines.push_back(fmt::format("{}: {}", arm.name, owed_text(arm)));
  if (const std::string why = what_stood_for_weights(evidence); !why.empty()) lines.push_back(why);
  return join(lines, "; ");
}

}  // namespace

std::vector<Check> verify(const Evidence& evidence) {
  std::vector<Check> checks = {check_each(evidence, "every run ended well",
                                          fmt::format("{} runs", evidence.samples->size()), wrong_end)};
  if (!all_hold(checks)) return checks;
  checks.push_back(check_each(evidence, "every step was recorded with a finite loss",
                              fmt::format("{} steps a run", evidence.steps),
                              [&](const Sample& one) { return wrong_steps(evidence, one); }));
  if (!all_hold(checks)) return checks;
  checks.push_back(check_each(evidence, "the arms trained the same workload",
                              workload_hash(reference(evidence).workload),
                              [&](const Sample& one) { return wrong_workload(evidence, one); }));
  checks.push_back(check_each(evidence, "each arm gave what it owes", owed_by_all(evidence),
                              [&](const Sample& one) { return wrong_result(evidence, one); }));
  checks.push_back(check_twin(evidence));
  checks.push_back(
      check_each(evidence, "clocks hold together", "steps are within the time of their run", wrong_clock));
  checks.push_back(check_each(evidence, "every sample is one of its own", "no two runs share their times",
                              [&](const Sample& one) { return wrong_origin(evidence, one); }));
  checks.push_back(check_each(evidence, "bytes sent are those of the step program", traffic_known(evidence),
                              wrong_traffic));
  return checks;
}

bool all_hold(const std::vector<Check>& checks) {
  return std::ranges::all_of(checks, &Check::holds);
}

}  // namespace trireme::bench
