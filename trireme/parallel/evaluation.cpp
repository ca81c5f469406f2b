#include "trireme/parallel/evaluation.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {
namespace {

constexpr int64_t kEndOfPass = -1;
constexpr int64_t kNoBatch = -2;  // a rank that follows the others

int64_t encode(bool gathers, size_t unit) {
  return 2 * static_cast<int64_t>(unit) + (gathers ? 1 : 0);
}

bool gathers(int64_t code) {
  return code % 2 == 1;
}

size_t unit_of(int64_t code) {
  return static_cast<size_t>(code / 2);
}

}  // namespace

void DataParallel::check_not_evaluating(const char* operation) const {
  if (evaluation_ == nullptr) return;
  throw LogicError(
      "[parallel.{}] rank {} is inside the scope of engine.evaluate(), where neither training nor a second "
      "evaluation is allowed; end the scope first",
      operation, mesh_.world->rank());
}

Evaluation::Evaluation(DataParallel& engine, Keep keep)
    : engine_(engine),
      gathers_(keep == Keep::kByUnit && engine.setting().gathers() && !engine.executor_.holds()) {
  engine_.check_usable();
  engine_.check_not_evaluating("evaluate");
  engine_.notice_update();
  engine_.take_writes();
  for (const auto& unit : engine_.units_) was_whole_.push_back(unit->is_whole());
  engine_.current_.clear();
  engine_.evaluation_ = this;
  try {
    if (gathers_) free_units();  // what a pass finds is the same on all ranks
    for (const auto& unit : engine_.units_) {
      if (!gathers_ || unit == engine_.units_.front()) unit->unshard();
    }
  } catch (...) {
    engine_.evaluation_ = nullptr;
    throw;
  }
  if (gathers_) {
    engine_.executor_.observe([this](bool gathers, size_t unit) { before(encode(gathers, unit)); });
  } else {
    engine_.executor_.hold(+1);
  }
}

Evaluation::~Evaluation() {
  engine_.evaluation_ = nullptr;
  engine_.current_.clear();
  engine_.executor_.observe({});
  if (!gathers_) engine_.executor_.hold(-1);
  if (engine_.executor_.holds()) return;
  try {
    engine_.take_writes();
    for (size_t unit = 0; unit < was_whole_.size(); ++unit) {
      if (!was_whole_[unit] || (gathers_ && unit > 0)) engine_.units_[unit]->reshard();
    }
  } catch (const std::exception& error) {
    log_warning("[parallel.evaluate] rank {}: parameters could not be freed: {}", engine_.mesh_.world->rank(),
                error.what());
  }
}

void Evaluation::free_units() {
  for (size_t unit = 1; unit < engine_.units_.size(); ++unit) engine_.units_[unit]->reshard();
}

std::string Evaluation::in_words(Code code) const {
  if (code == kEndOfPass) return "ends its pass";
  return fmt::format("{} {}", gathers(code) ? "gathers" : "frees", engine_.units_[unit_of(code)]->name());
}

/// What every rank does next, by rank; throws unless all ranks with a batch do the same.
std::vector<Evaluation::Code> Evaluation::exchange(Code mine) const {
  const comm::Subject subject(*engine_.mesh_.dp, "the order of units in evaluate()");
  std::vector<Code> codes;
  for (const auto& rank : comm::gather_scalars(*engine_.mesh_.dp, {static_cast<double>(mine)}))
    codes.push_back(static_cast<Code>(rank[0]));
  const auto first = std::ranges::find_if(codes, [](Code code) { return code != kNoBatch; });
  const auto other =
      std::ranges::find_if(codes, [&](Code code) { return code != kNoBatch && code != *first; });
  if (other == codes.end()) return codes;
  const std::vector<int64_t>& ranks = engine_.mesh_.dp->ranks();
  throw LogicError(
      "[parallel.evaluate] rank {} {} where rank {} {}; with Keep::kByUnit all ranks with a batch must run "
      "the same units in the same order between two calls of next(): run the same code for every batch, or "
      "use Keep::kWhole",
      ranks[static_cast<size_t>(other - codes.begin())], in_words(*other),
      ranks[static_cast<size_t>(first - codes.begin())], in_words(*first));
}

void Evaluation::before(Code code) {
  if (announces_) exchange(code);
  order_.push_back(code);
}

void Evaluation::end_pass() {
  if (!std::exchange(in_pass_, false)) return;
  if (announces_) exchange(kEndOfPass);
  knows_order_ = true;
  engine_.current_.clear();
  free_units();
}

/// Takes part in a pass of the other ranks.
void Evaluation::follow() {
  if (announces_) {
    order_.clear();
    for (;;) {
      const Code next = std::ranges::max(exchange(kNoBatch));
      if (next == kEndOfPass) break;
      order_.push_back(next);
      perform(next);
    }
    knows_order_ = true;
  } else {
    for (const Code code : order_) perform(code);
  }
  free_units();
}

void Evaluation::perform(Code code) {
  engine_.executor_.follow(gathers(code), unit_of(code));
}

bool Evaluation::next(bool mine) {
  if (!gathers_) {
    engine_.current_.clear();
    return mine;
  }
  end_pass();
  for (;;) {
    bool anybody = false;
    announces_ = false;
    for (const auto& rank :
         comm::gather_scalars(*engine_.mesh_.dp, {mine ? 1.0 : 0.0, knows_order_ ? 1.0 : 0.0})) {
      anybody = anybody || rank[0] > 0.0;
      announces_ = announces_ || (rank[0] == 0.0 && rank[1] == 0.0);
    }
    if (!anybody) return false;
    if (mine) break;
    follow();
  }
  order_.clear();
  return in_pass_ = true;
}

double Evaluation::mean(double sum, double weight) const {
  double all = 0.0, weights = 0.0;
  for (const auto& rank : comm::gather_scalars(*engine_.mesh_.dp, {sum, weight})) {
    all += rank[0];
    weights += rank[1];
  }
  TRIREME_CHECK(weights != 0.0, "[parallel.evaluate] no rank had a batch, so there is no mean");
  return all / weights;
}

}  // namespace trireme::parallel
