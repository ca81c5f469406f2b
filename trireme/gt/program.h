#pragma once
// The program that a client makes while it runs: numbers tensors, places them, keeps what gradients need, and
// gives instructions to a session or to whoever records them. Private to gt/*.cpp.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "trireme/controller/program_runner.h"
#include "trireme/gt/instruction_log.h"
#include "trireme/plan/placer.h"
#include "trireme/plan/signals.h"

namespace gt {

class Program;
struct Node;
using NodePtr = std::shared_ptr<Node>;

/// A number as long as the program needs it: workers free the tensor with it.
struct Number {
  std::weak_ptr<Program> program;
  uint32_t number = 0;
  int64_t stage = -1;
  Number(std::weak_ptr<Program> of, uint32_t value, int64_t at)
      : program(std::move(of)), number(value), stage(at) {}
  Number(const Number&) = delete;
  Number& operator=(const Number&) = delete;
  ~Number();
};

class CapturedStep;
struct Piece;
struct Recomputed;

/// A tensor at which the graph of its gradients begins anew: it has crossed to other workers, or will be
/// computed again for its gradient.
struct Crossing {
  NodePtr source;               ///< of a recomputed one: its type and place
  std::shared_ptr<Piece> from;  ///< the source's, or one of its own for a leaf
  std::shared_ptr<Number> result;
  int32_t signal = 0;
  std::shared_ptr<Recomputed> again = {};  ///< makes it; null: it has crossed
};

/// Tensors whose gradients one backward pass computes: all that depend on each other between crossings.
struct Piece {
  std::vector<Crossing> entries = {};
  std::vector<NodePtr> leaves = {};    ///< that collect a gradient of it
  std::shared_ptr<Piece> joined = {};  ///< the piece that this one is part of by now
  bool done = false;                   ///< gradients went back, and workers keep nothing for them
};

/// A tensor of the program.
struct Node {
  std::weak_ptr<Program> program;
  trireme::plan::TensorType type;
  uint32_t number = 0;
  std::shared_ptr<Number> life = {};                       ///< none: it is not on workers yet
  int32_t signal = trireme::plan::Instruction::kNoSignal;  ///< with which it was made
  int64_t stage = -1;                                      ///< of the signal; -1: none
  /// Instructions that make it, one from the other, where its first use says on which workers it lies.
  std::vector<trireme::plan::Instruction> pending = {};
  std::string value = {};  ///< of an input
  /// One for all tensors that may share its memory: what was reshaped, sliced or transposed.
  std::shared_ptr<const char> memory = std::make_shared<const char>();
  std::shared_ptr<Piece> piece = {};
  bool requires_grad = false;
  NodePtr grad = {};           ///< what was taken until now
  bool has_collected = false;  ///< a backward pass has reached it since its gradient was taken
  int64_t writes = 0;          ///< how often its values were replaced
  bool is_inside = false;      ///< gradients pass it inside of a recompute alone, which has not returned it

  bool made() const { return life != nullptr; }
  void begin() { life = std::make_shared<Number>(program, number, stage); }
};

/// Operations that are done again for the gradient of their result.
struct Recomputed {
  struct Done {
    trireme::plan::Instruction instruction;  ///< as backward has it
    std::vector<trireme::plan::TensorType> types;
    int64_t stage = -1;
    std::source_location where;
  };
  std::vector<Done> operations = {};
  /// A tensor that came from outside, which is kept, and must not be written, until then.
  struct Given {
    NodePtr tensor;
    int64_t writes = 0;
  };
  std::vector<Given> given = {};
  std::set<uint32_t> made = {};      ///< numbers of results
  std::set<uint32_t> passing = {};   ///< those of them that gradients pass
  std::vector<NodePtr> joined = {};  ///< given ones in whose graph the result is
  uint32_t result = 0;
};

/// A signal with its workers, as the program uses it.
struct UsedSignal {
  trireme::plan::Signal signal;
  int64_t stage = -1, to_stage = -1;  ///< of a boundary: from and to; of others: its stage
  bool is_product = false;            ///< column- or row-parallel
};

class Program : public std::enable_shared_from_this<Program> {
 public:
  Program(std::shared_ptr<trireme::controller::ProgramRunner> runner,
          const std::optional<trireme::plan::Signals>& signals, bool is_explicit, bool auto_shard);

  /// The program that this thread makes. Throws ConfigError where there is none.
  static std::shared_ptr<Program> current();
  /// Whether there is one.
  static bool exists();
  /// Throws ConfigError where there is another one; nullptr: none any more.
  static void make_current(Program* program);

  trireme::controller::ProgramRunner& runner() { return *runner_; }
  const UsedSignal& signal(int32_t number) const { return signals_.at(static_cast<size_t>(number)); }
  /// The signal of that name, or the boundary A_to_B. Throws ConfigError with the nearest name.
  int32_t signal_named(const std::string& name);
  void enter(int32_t signal) { scopes_.push_back(signal); }
  void leave() { scopes_.pop_back(); }

  /// While it lives, what the program does for itself is in no scope of the user, with gradients or without.
  class Aside {
   public:
    Aside(Program& program, bool with_grad)
        : program_(program),
          scopes_(std::exchange(program.scopes_, {})),
          grad_enabled_(std::exchange(program.grad_enabled, with_grad)),
          autocast_(std::exchange(program.autocast, {})),
          recomputed_(std::exchange(program.recomputed_, nullptr)) {}
    ~Aside() {
      program_.scopes_ = std::move(scopes_);
      program_.autocast = autocast_;
      program_.recomputed_ = recomputed_;
      program_.grad_enabled = grad_enabled_;
    }
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;

   private:
    Program& program_;
    std::vector<int32_t> scopes_;
    bool grad_enabled_;
    std::optional<trireme::plan::TensorDtype> autocast_;
    Recomputed* recomputed_;
  };
  /// The signal of the innermost scope; none: kNoSignal.
  int32_t scope() const;
  const std::vector<int64_t>& workers_of(const Node& node) const;

  /// The results of an operation. An operand that is not on workers yet is made where this is done; where
  /// nothing says so, the result is made later, too.
  std::vector<NodePtr> op(trireme::plan::Op op, const std::vector<NodePtr>& inputs,
                          const trireme::plan::OpAttributes& attributes, const std::source_location& where);
  NodePtr input(const trireme::plan::TensorType& type, std::string bytes, const std::source_location& where);
  /// The number of a dataset, which workers are told of the first time.
  int64_t dataset(const trireme::plan::DatasetSpec& spec, const std::source_location& where);
  /// Inputs or targets of a batch of a dataset, which its workers read where it is first used.
  NodePtr batch(int64_t dataset, int64_t step, bool targets, const std::source_location& where);
  NodePtr cross(const NodePtr& tensor, int32_t signal, const std::source_location& where,
                std::optional<trireme::plan::TensorPlacement> place = {});
  /// The result of `body`, whose operations are done again for its gradient.
  NodePtr recompute(const std::function<NodePtr()>& body, const std::source_location& where);
  /// A tensor of the same shape and placement, filled with a number.
  NodePtr alike(const NodePtr& tensor, double value, const std::source_location& where);
  void require_grad(const NodePtr& tensor);
  void backward(const NodePtr& loss, const std::source_location& where);
  NodePtr gradient(const NodePtr& tensor, const std::source_location& where);
  void forget_gradient(const NodePtr& tensor, const std::source_location& where);
  std::future<std::string> fetch(const NodePtr& tensor, const std::source_location& where);
  /// Makes a tensor now, on the workers of the scope, or on all.
  void make(const NodePtr& tensor, const std::source_location& where);
  /// Makes a tensor that is not on workers yet where `as` lies, placed as alike() does.
  void make_beside(const NodePtr& tensor, const NodePtr& as, const std::source_location& where);
  /// A value as fetch() has it, of a tensor that is not on workers yet without placing it.
  std::future<std::string> peek(const NodePtr& tensor, const std::source_location& where);
  /// Gives a tensor other values: on workers where it lies; otherwise it will be made of them. Throws as
  /// check_assignable() does.
  void assign(const NodePtr& tensor, std::string bytes, const std::source_location& where);
  /// Throws ConfigError where others would see that a tensor is written.
  void check_assignable(const NodePtr& tensor, const std::source_location& where);
  /// Throws ConfigError for a tensor of other workers.
  void check_own(const NodePtr& tensor) const;
  void flush();

  /// From here on, a line an instruction. Throws as InstructionLog does.
  void log_to(const std::string& path) { log_ = std::make_unique<InstructionLog>(path); }

  /// From here on, the program as text that 'trireme replay' runs. Throws as ProgramFile does.
  void write_to(const std::string& path);

  bool grad_enabled = true;
  std::optional<trireme::plan::TensorDtype> autocast = {};  ///< of products, where a scope says so
  int64_t next_seed = 42;

  /// An instruction, a digest of how its tensors lie, and the stage to which it belongs; -1: to none.
  struct Recorded {
    trireme::plan::Instruction instruction;
    uint64_t placed = 0;
    int64_t stage = -1;
  };
  /// Instructions go here instead of to the session; nullptr: to the session again.
  void record(std::vector<Recorded>* into);
  void submit(const std::vector<Recorded>& instructions);
  int64_t stages() const { return stages_; }
  const std::optional<trireme::plan::Signals>& signals_file() const { return file_; }
  bool is_recording() const { return recording_ != nullptr; }
  /// Instructions that would go to the session go here; nullptr: they do. Throws ConfigError where they go to
  /// another capture, or into a schedule that has not ended.
  void capture(CapturedStep* into);
  /// They go to the session again, whatever happens with those of this moment.
  void stop_capture() noexcept { capture_ = nullptr; }
  /// Which schedule or capture holds instructions back now; 0: none, they go to workers at once.
  uint64_t kept_for() const { return is_recording() || capture_ != nullptr ? kept_for_ : 0; }
  /// The number of a recorded step, until it is given back; none: workers keep no more.
  std::optional<uint32_t> next_step();
  void give_back_step(uint32_t number) { free_steps_.push_back(number); }
  const std::vector<std::string>& signal_names() const { return placer_.signals(); }
  void freed(uint32_t number, int64_t stage);

 private:
  std::vector<NodePtr> cast_operands(trireme::plan::Op op, std::vector<NodePtr> inputs,
                                     const std::source_location& where);
  NodePtr cast(const NodePtr& tensor, trireme::plan::TensorDtype dtype, const std::source_location& where);
  void check_written(trireme::plan::Op op, const std::vector<NodePtr>& inputs,
                     const std::source_location& where) const;
  int32_t add_signal(UsedSignal used);
  int32_t default_signal();
  trireme::plan::PlacedInstruction emit(trireme::plan::Instruction one, int64_t stage,
                                        const std::source_location& where);
  void send(const trireme::plan::Instruction& one, const trireme::plan::PlacedInstruction& placed,
            int64_t stage);
  void give(const trireme::plan::Instruction& one, uint64_t placed);
  void send_frees();
  NodePtr new_node(const trireme::plan::TensorType& type, int32_t signal);
  NodePtr deferred(const NodePtr& input, trireme::plan::Instruction step, const std::source_location& where);
  void make_at(const NodePtr& tensor, int32_t signal, std::optional<trireme::plan::TensorPlacement> place,
               const std::source_location& where);
  std::optional<trireme::plan::TensorPlacement> place_of_operand(const Node& node, trireme::plan::Op op,
                                                                 size_t index, int32_t signal) const;
  std::optional<trireme::plan::TensorPlacement> place_of_result(const trireme::plan::TensorType& type,
                                                                int32_t signal) const;
  void join_pieces(const std::vector<NodePtr>& inputs, const std::vector<NodePtr>& results);
  int32_t signal_back(const Crossing& crossing);
  struct Roots;  ///< of a piece, with their gradients
  bool passes_now() const { return grad_enabled && recomputed_ == nullptr; }
  void note_for_backward(const trireme::plan::Instruction& one, const std::vector<NodePtr>& inputs,
                         const std::vector<NodePtr>& results, const std::source_location& where);
  void refuse_in_recompute(std::string_view what, const std::source_location& where) const;
  static void check_unwritten(const Recomputed& recomputed, const std::source_location& where);
  void check_outside(const NodePtr& tensor, const std::source_location& where) const;
  NodePtr done_again(const Recomputed& recomputed);
  void run_backward(const Roots& roots, const std::source_location& where);
  void go_back(Roots roots, const std::source_location& where);
  NodePtr take_gradient(uint32_t number, const NodePtr& as, int64_t stage, int32_t signal,
                        const std::source_location& where);

  std::shared_ptr<trireme::controller::ProgramRunner> runner_;
  std::optional<trireme::plan::Signals> file_;
  bool auto_shard_;
  trireme::plan::Placer placer_;
  std::vector<UsedSignal> signals_;
  std::vector<int32_t> scopes_;
  std::vector<std::pair<uint32_t, int64_t>> freed_;
  std::vector<Recorded>* recording_ = nullptr;
  Recomputed* recomputed_ = nullptr;  ///< takes what is done
  CapturedStep* capture_ = nullptr;
  uint64_t kept_for_ = 0;
  std::unique_ptr<InstructionLog> log_;
  std::unique_ptr<ProgramFile> file_of_program_;
  uint32_t next_ = 0, next_step_ = 0;
  std::vector<uint32_t> free_steps_;
  int64_t next_outside_ = 1, stages_ = 0;
};

/// A line of a program: "train.cpp:17".
std::string place_of(const std::source_location& where);

/// Whether a tensor collects gradients or hands them on.
bool passes_gradients(const Node& node);

/// The piece that this one is part of by now.
std::shared_ptr<Piece> whole_of(std::shared_ptr<Piece> piece);

}  // namespace gt
