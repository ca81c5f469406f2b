#pragma once
// Forward passes without gradients, with any number of batches a rank:
//
//   auto evaluation = engine->evaluate();
//   while (evaluation.next(loader.has_next())) {
//     const Batch batch = loader.next();
//     sum += loss_of(*model, batch).item<double>() * batch.rows;
//     rows += batch.rows;
//   }
//   const double loss = evaluation.mean(sum, rows);
#include <c10/core/GradMode.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace trireme::parallel {

class DataParallel;

/// Where the parameters are between the batches of an evaluation.
enum class Keep {
  kWhole,  ///< whole on every rank: gathered once
  kByUnit  ///< sharded: a unit is gathered for its use in each pass, as in training
};

/// Made by DataParallel::evaluate(); lives on one thread, one at a time an engine. While it lives autograd
/// records nothing, and what trains throws LogicError. It may come between any two calls of a step, with
/// gradients accumulated or not yet applied, and changes nothing of it. Dropout and running statistics are
/// the module's own: call its eval() before, and train() afterwards.
///
/// With kByUnit ranks run one batch each at a time, and a rank without one takes part in the others' gathers.
/// For that, ranks with a batch run the same units in the same order for it. An exception that all ranks
/// leave the scope by harms nothing; one of a single rank leaves the others waiting for it.
class Evaluation {
 public:
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;
  ~Evaluation();

  /// Whether this rank runs a forward pass now, for the batch that it has (`mine`). A rank without a batch
  /// gets the answer false: at once under kWhole, and under kByUnit when no rank has a batch any more.
  /// Collective under kByUnit, where every rank calls it until it is false. Throws LogicError on all ranks,
  /// naming what they ran, when they did not run the same units.
  bool next(bool mine);

  /// The sum of all ranks' `sum` divided by the sum of their `weight`; the host waits. Collective. Throws
  /// LogicError when the weights are all 0.
  double mean(double sum, double weight) const;

 private:
  friend class DataParallel;
  /// What the engine does with a unit, as a number that ranks exchange.
  using Code = int64_t;

  Evaluation(DataParallel& engine, Keep keep);
  /// Called by the engine before it gathers or frees a unit.
  void before(Code code);
  std::vector<Code> exchange(Code mine) const;
  void end_pass();
  void follow();
  void perform(Code code);
  void free_units();
  std::string in_words(Code code) const;

  DataParallel& engine_;
  bool gathers_;                 ///< parameters come and go in each pass
  std::vector<bool> was_whole_;  ///< by unit, before this
  std::vector<Code> order_;      ///< of the last pass
  bool knows_order_ = false, announces_ = false, in_pass_ = false;
  c10::NoGradGuard no_grad_;
};

}  // namespace trireme::parallel
