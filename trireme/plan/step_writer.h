#pragma once
// Writes the passes of a step program in the order in which an engine issues their actions: when units are
// gathered, computed, freed and reduced.
#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "trireme/plan/step_builder.h"
#include "trireme/plan/step_program.h"
#include "trireme/plan/unit_buffers.h"

namespace trireme::plan {

class StepWriter {
 public:
  /// `setting` must outlive this.
  StepWriter(const std::vector<ProgramUnit>& units, const EngineSetting& setting, const UseOrder& order);

  /// With kOnceAStep a pass alone, without gradients: units are freed as soon as they were used. Else the
  /// last one stays for the backward pass, which begins with it.
  void forward_pass(int64_t micro_batch);
  /// `last`: gradients are complete with it, and are reduced meanwhile.
  void backward_pass(int64_t micro_batch, bool last);
  void update_pass();

  // Of engines whose micro-batches are under way at the same time.
  /// What its weights need stays.
  void backward_input_pass(int64_t micro_batch);
  /// Products of activations and gradients of outputs: no parameters.
  void backward_weight_pass(int64_t micro_batch);
  /// Of gradients that earlier passes have left.
  void reduce_pass();
  /// Units are gathered now and stay whole, or are freed again.
  void hold(bool on);
  /// The program, with the buffers that are kept.
  StepProgram take();

 private:
  bool is_root(int64_t unit) const { return unit == 0 && setting_.use_from != UseFrom::kBuckets; }
  const UnitBuffers& memory(int64_t unit) const { return memory_[static_cast<size_t>(unit)]; }
  bool reduces(bool last) const { return last || !setting_.reduces_once; }

  void unshard(int64_t unit);
  void unshard_ahead(const std::vector<int64_t>& uses, size_t place);
  void reshard(int64_t unit);
  void reshard_after_forward(int64_t unit);
  void compute_forward(int64_t unit);
  void begin_backward(int64_t unit, ActionKind kind = ActionKind::kBackward);
  template <typename Complete>
  void walk_backward(ActionKind kind, const Complete& complete);
  void hold_gradients(int64_t unit);
  void hold_whole_gradients(int64_t unit);
  void complete(int64_t unit, bool last);
  void reduce_ready(bool last);
  void reduce(int64_t unit, bool last);
  void finish_reductions(size_t left);
  std::vector<int64_t> completions() const;
  std::vector<int64_t> backward_uses() const;
  std::vector<int64_t> update_order() const;

  const EngineSetting& setting_;
  UseOrder order_;
  StepBuilder builder_;
  std::vector<UnitBuffers> memory_;
  std::set<int64_t> exchanged_;          ///< units gathered since the last update
  std::set<int64_t> begun_, completed_;  ///< units, in this backward pass
  size_t launched_ = 0;                  ///< of order_.reductions, in this backward pass
  std::deque<int64_t> in_flight_;        ///< places of reductions that nothing has waited for
  bool adds_up_ = false;                 ///< other micro-batches of the step follow the one under way
  bool held_ = false;
};

}  // namespace trireme::plan
