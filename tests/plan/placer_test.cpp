#include "trireme/plan/placer.h"

#include <gtest/gtest.h>

#include <string>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

/// The last instruction of a program, placed behind the others.
PlacedInstruction placed_last(const std::string& lines, Placer placer = Placer()) {
  const Program program = program_from_text(
      "trireme.program/1\nsignal a workers=0,1\nsignal b workers=2,3\nsignal c workers=1\n" + lines, "p.txt");
  for (size_t i = 0; i < program.signals.size(); ++i)
    placer.add_signal(program.signals[i], program.workers.at(i));
  PlacedInstruction placed;
  for (const Instruction& one : program.instructions) placed = placer.place(one);
  return placed;
}

std::string refusal_of(const std::string& lines, bool is_explicit = false) {
  try {
    placed_last(lines, Placer(is_explicit));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return {};
}

const auto kR = TensorPlacement::replicate(), kP = TensorPlacement::partial(),
           kRows = TensorPlacement::shard(0), kColumns = TensorPlacement::shard(1);

/// A feed-forward part whose rows are split: gathered, column- and row-parallel, scattered.
TEST(Placer, TensorParallelismFollowsFromPlacesOfWeights) {
  const std::string part =
      "t0 = input dtype=fp32 shape=8,16 place=S(0) @a\nt1 = randn shape=16,64 place=S(1) @a\n"
      "t2 = randn shape=64,16 place=S(0) @a\nt3 = matmul t0 t1 @a\n";
  const PlacedInstruction columns = placed_last(part);
  EXPECT_EQ(columns.results.at(0).placement, kColumns);
  ASSERT_EQ(columns.op->moves.size(), 1u);
  EXPECT_EQ(columns.op->moves[0].to, kR);
  EXPECT_EQ(placed_last(part + "t4 = matmul t3 t2 @a\n").results.at(0).placement, kP);
  const PlacedInstruction rows = placed_last(part + "t4 = matmul t3 t2 place=S(0) @a\n");
  EXPECT_EQ(rows.results.at(0).placement, kRows);
  EXPECT_EQ(rows.op->bytes(), 8 * 16 * 4 / 2);
}

TEST(Placer, TensorsCrossAsTheyLieWhereTheyCan) {
  const std::string made = "t0 = input dtype=fp32 shape=8,16 place=S(1) @a\n";
  const PlacedInstruction parts = placed_last(made + "t1 = cross t0 @b\n");
  EXPECT_EQ(parts.cross.sent, kColumns);
  EXPECT_EQ(parts.results.at(0).placement, kColumns);
  EXPECT_EQ(parts.cross.bytes, 8 * 16 * 4);
  // What all have goes in slices, and is gathered where it arrives; terms are added up before they leave.
  const PlacedInstruction whole = placed_last("t0 = input dtype=fp32 shape=8,16 @a\nt1 = cross t0 @b\n");
  EXPECT_EQ(whole.cross.sent, kRows);
  EXPECT_EQ(whole.results.at(0).placement, kR);
  EXPECT_EQ(whole.cross.bytes, 8 * 16 * 4);
  const PlacedInstruction few = placed_last("t0 = input dtype=fp32 shape=1,16 @a\nt1 = cross t0 @b\n");
  EXPECT_EQ(few.cross.sent, kR);
  EXPECT_EQ(few.cross.bytes, 2 * 16 * 4);
  const PlacedInstruction terms = placed_last(made + "t1 = sum t0 dims=1 @a\nt2 = cross t1 @b\n");
  EXPECT_EQ(terms.operands.at(0).placement, kP);
  EXPECT_EQ(terms.results.at(0).placement, kR);
  const PlacedInstruction fewer = placed_last(made + "t1 = cross t0 @c\n");
  EXPECT_EQ(fewer.cross.sent, kR);
  EXPECT_EQ(fewer.cross.bytes, 8 * 16 * 4);
  const PlacedInstruction stays = placed_last(made + "t1 = cross t0 @a\n");
  EXPECT_EQ(stays.cross.bytes, 0);
  EXPECT_EQ(stays.results.at(0).placement, kColumns);
  EXPECT_EQ(placed_last(made + "t1 = cross t0 place=S(0) @b\n").results.at(0).placement, kRows);
}

TEST(Placer, GradientsLieAsTheirTensors) {
  const std::string made = "t0 = input dtype=fp32 shape=8,16 place=S(1) @a\ntrack t0\n";
  EXPECT_EQ(placed_last(made + "t1 = gradient t0\n").results.at(0).placement, kColumns);
  const PlacedInstruction passed = placed_last(made + "t1 = relu t0 @a\n");
  EXPECT_TRUE(passed.results.at(0).needs_grad);
  EXPECT_FALSE(passed.results.at(0).tracked);
  EXPECT_FALSE(placed_last(made + "t1 = relu t0 no_grad @a\n").results.at(0).needs_grad);
  EXPECT_FALSE(placed_last(made + "t1 = eq t0 t0 @a\n").results.at(0).needs_grad);
  EXPECT_FALSE(placed_last(made + "t1 = cross t0 @b\n").results.at(0).needs_grad) << "a graph ends there";
  EXPECT_EQ(gradient_placement(kP), kR);
}

TEST(Placer, TensorsOfOtherWorkersAreNamed) {
  const std::string made = "t0 = input dtype=fp32 shape=8,16 @a #7\n";
  const std::string said = refusal_of(made + "t1 = relu t0 @b\n");
  for (const char* part :
       {"t1 = relu t0 @b", "t0, made at line 7, lies on workers 0 1", "by workers 2 3", "cross"})
    EXPECT_TRUE(said.find(part) != std::string::npos) << said;
  EXPECT_EQ(refusal_of(made + "t1 = relu t0\n"), "") << "without a signal it is done where its operand lies";
  EXPECT_TRUE(refusal_of("t0 = randn shape=4\n").find("nothing says on which workers") != std::string::npos);
}

TEST(Placer, WhatIsRefusedChangesNothing) {
  Placer placer;
  placer.add_signal("a", {0, 1});
  placer.add_signal("b", {2});
  const Program program = program_from_text(
      "trireme.program/1\nt0 = full shape=4,4 @a\nt1 = relu t0 @b\nt1 = matmul t0 t0 @a\n", "p.txt");
  placer.place(program.instructions[0]);
  const uint64_t before = placer.hash();
  EXPECT_THROW(placer.place(program.instructions[1]), ConfigError);
  EXPECT_EQ(placer.hash(), before);
  EXPECT_EQ(placer.tensors(), 1u);
  EXPECT_NO_THROW(placer.place(program.instructions[2]));
  EXPECT_NE(placer.hash(), before);
  EXPECT_THROW(placer.place(program.instructions[2]), ConfigError) << "t1 is made twice";
  EXPECT_THROW(placer.add_signal("a", {3}), ConfigError);
  EXPECT_THROW(placer.add_signal("d", {3, 3}), ConfigError);
}

TEST(Placer, ExplicitModeRefusesMoves) {
  const std::string program =
      "t0 = input dtype=fp32 shape=8,16 place=S(0) @a\nt1 = randn shape=16,64 place=S(1) @a\n"
      "t2 = matmul t0 t1 @a\n";
  EXPECT_EQ(refusal_of(program), "");
  EXPECT_TRUE(refusal_of(program, true).find("without being told") != std::string::npos);
}

/// A plan that was made once is used again, also for other learning rates and steps, and for nothing else.
TEST(Placer, EqualCallsHaveOnePlan) {
  Placer placer;
  placer.add_signal("a", {0, 1});
  const auto place = [&](const std::string& line) {
    return placer.place(program_from_text("trireme.program/1\n" + line, "p.txt").instructions.at(0));
  };
  for (const char* number : {"0", "1", "2", "3"})
    place(std::string("t") + number + " = full shape=4,4 place=S(0) @a\n");
  const auto plan = place("t4 = scale t0 by=2\n").op;
  EXPECT_EQ(place("t5 = scale t1 by=3\n").op, plan);
  EXPECT_NE(place("t6 = scale t1 by=3 place=S(1)\n").op, plan);
  EXPECT_EQ(place("t7 = dropout t0 seed=3 p=0.5\n").op, place("t8 = dropout t0 seed=4 p=0.5\n").op);
  EXPECT_EQ(place("t9 = randn seed=3 shape=4 @a\n").op, place("t10 = randn seed=4 shape=4 @a\n").op);
  EXPECT_NE(place("t11 = dropout t0 seed=3 p=0.25\n").op, place("t12 = dropout t0 seed=3 p=0.5\n").op);
  const auto update = place("adamw_ t0 t1 t2 t3 step=1 lr=0.5\n").op;
  EXPECT_EQ(place("adamw_ t0 t1 t2 t3 step=2 lr=0.25\n").op, update);
  EXPECT_THROW(place("adamw_ t0 t1 t2 t3 step=0 lr=0.25\n"), ConfigError);
}

}  // namespace
}  // namespace trireme::plan
