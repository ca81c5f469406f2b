#pragma once
// Weights and whole training states as one safetensors file, written by data-parallel rank 0 with one tensor
// of one unit gathered at a time, and read by every rank in its own ranges. The names are those of state.h,
// so a file of one policy and number of ranks serves any other. Other names of a tensor are in the file's
// metadata, as Python's safetensors.torch.save_model writes them (alias -> name).
//
// All ranks call these together; what fails on one of them is thrown on all: EnvironmentError when the disk
// fails, DataError that names the tensors when file and module do not fit, and then nothing has been changed.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trireme/parallel/data_parallel.h"

namespace torch::optim {
class Optimizer;
}

namespace trireme::state {

/// What may differ between a file and what loads it; nothing unless said.
struct LoadOptions {
  bool missing = false;     ///< parameters and buffers that the file lacks stay, with the optimizer's state
  bool unexpected = false;  ///< tensors of the file that nobody wants are left out
};

/// What a file with an optimizer's state says beside its tensors, for load_state(): other names of tensors,
/// and that it is one. For whoever writes sharded_state() into a file of its own.
std::map<std::string, std::string> state_metadata(parallel::DataParallel& engine);

/// Words of your own beside a state, such as how many steps were done.
using Notes = std::map<std::string, std::string>;

/// Writes parameters as fp32 masters, and the buffers of rank 0. Folders are made. Collective over the
/// engine's data-parallel ranks: stages of a pipeline write files of their own. Throws LogicError between two
/// averages of local SGD.
void save_weights(parallel::DataParallel& engine, const std::string& path, const Notes& notes = {});
/// Parameters that are frozen for good take the values of `path`, which must have all of them, in any dtype.
/// Collective. Throws as load_weights().
void load_frozen(parallel::DataParallel& engine, const std::string& path, const LoadOptions& options = {});

/// Calls its argument with one weight after the other, on rank 0.
using WeightVisit =
    std::function<void(const std::function<void(const std::string& name, const at::Tensor& weight)>&)>;
/// Shapes and dtypes by name.
using TensorInfos = std::map<std::string, std::pair<std::vector<int64_t>, at::ScalarType>>;
/// Writes fp32 weights, and buffers, that come from more than one engine, as rank 0 is given them. `visit` is
/// called on every rank and gives them all to the first. Collective over `all`.
void save_weights(comm::Group& all, const TensorInfos& infos, const WeightVisit& visit,
                  const std::string& path, const Notes& notes = {});
/// What was noted beside weights or a state. By one process alone. Throws DataError when it is no such file.
Notes read_notes(const std::string& path);
/// Parameters and buffers take the values of `path`, at any time: before the first step, between steps, or
/// while parameters are held. Floating-point tensors are converted, others have the dtype that they had when
/// saved. The optimizer's state stays, and what a communication hook owes. A state file serves as well.
/// Collective.
void load_weights(parallel::DataParallel& engine, const std::string& path, const LoadOptions& options = {});

/// Writes parameters, buffers and the optimizer's state with its counts of steps. Learning rates and other
/// settings of the optimizer are not state. Gradients are not either: save between steps. Collective.
void save_state(parallel::DataParallel& engine, optim::Optimizer& optimizer, const std::string& path,
                const Notes& notes = {});
void save_state(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer, const std::string& path,
                const Notes& notes = {});
/// Training goes on as if it had not ended: with the same bits on as many ranks, whatever the policy. Forgets
/// the gradients of a step under way. Returns the notes. Collective.
Notes load_state(parallel::DataParallel& engine, optim::Optimizer& optimizer, const std::string& path,
                 const LoadOptions& options = {});
Notes load_state(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer, const std::string& path,
                 const LoadOptions& options = {});

/// The same files for a module that no engine has, in this process alone; parameters are written as they are.
/// A module with parts (has_parts.h) reads its parts of whole tensors. Throw LogicError when an engine has
/// the module, and for a file of a module that has parts, which an engine writes.
void save_weights(const torch::nn::Module& module, const std::string& path);
void load_weights(torch::nn::Module& module, const std::string& path, const LoadOptions& options = {});

}  // namespace trireme::state
