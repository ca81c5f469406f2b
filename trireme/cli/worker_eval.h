#pragma once
// The parts that evaluations of texts and of questions have in common.
#include <nlohmann/json.hpp>
#include <vector>

#include "trireme/cli/request.h"
#include "trireme/comm/world.h"
#include "trireme/data/tokenizer.h"
#include "trireme/train/scorer.h"

namespace trireme::cli {

/// One command on one rank.
struct Evaluation {
  const Request& request;
  const data::Tokenizer& tokenizer;
  train::Scorer& scorer;
  const comm::World& world;

  const EvalOptions& options() const { return request.eval; }
  bool speaks() const { return world.rank() == 0; }
};

/// train::Scorer::score(); rank 0 says now and then how far it is. Throws NumericsError where a likelihood is
/// not finite. Collective.
std::vector<double> score(const Evaluation& evaluation, const train::Scorer::Next& next);

/// The fields that a JSON document about an evaluation begins with.
nlohmann::ordered_json header_of(const Evaluation& evaluation);

// Each evaluates options().data, and prints what it found on rank 0. Collective.
void evaluate_text(const Evaluation& evaluation);
void evaluate_questions(const Evaluation& evaluation);

}  // namespace trireme::cli
