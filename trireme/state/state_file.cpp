#include "trireme/state/state_file.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/error_of.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/comm/agree.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/has_parts.h"
#include "trireme/parallel/module_parameters.h"
#include "trireme/state/hook_state.h"
#include "trireme/state/local_state.h"
#include "trireme/state/state_reader.h"
#include "trireme/state/whole_state.h"

namespace trireme::state {
namespace {

constexpr const char* kNotePrefix = "note.";
constexpr const char* kStateMark = "trireme.state";  // in the metadata of files with an optimizer's state

std::unique_ptr<checkpoint::SafetensorsWriter> open_file(const std::map<std::string, StateTensor>& tensors,
                                                         const std::map<std::string, std::string>& aliases,
                                                         const std::string& path, bool has_optimizer,
                                                         const Notes& notes) {
  std::map<std::string, checkpoint::TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) infos[name] = {tensor.dtype, tensor.shape};
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  for (const auto& [alias, name] : aliases) metadata.emplace(alias, name);
  if (has_optimizer) metadata.emplace(kStateMark, "1");
  for (const auto& [key, value] : notes) metadata.emplace(kNotePrefix + key, value);
  if (const auto folder = std::filesystem::path(path).parent_path(); !folder.empty())
    make_directories(folder);
  return std::make_unique<checkpoint::SafetensorsWriter>(path, infos, metadata);
}

/// A disk that fails ends nobody's collectives: rank 0 goes on without writing, and all hear of it at the
/// end.
void save(parallel::DataParallel& engine, const OptimizerState* optimizer, const std::string& path,
          const Notes& notes) {
  const WholeState state(engine, optimizer);
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  std::exception_ptr error;
  if (engine.is_writer()) {
    error = error_of(
        [&] { writer = open_file(state.tensors(), state.aliases(), path, optimizer != nullptr, notes); });
  }
  state.visit([&](const std::string& name, const at::Tensor& tensor) {
    if (writer && !error) error = error_of([&] { writer->write(name, tensor); });
  });
  if (writer && !error) error = error_of([&] { writer->commit(); });
  comm::throw_together(*engine.mesh().stage, error, "state.file");
}

parallel::Initializer values_of(const StateReader& reader) {
  return [&reader](const std::string& name, const plan::Region& region, at::Tensor& out) {
    out.copy_(reader.read(name, region));
  };
}

void want_weights(StateReader& reader, parallel::DataParallel& engine) {
  for (const auto& unit : engine.units()) {
    for (const plan::FlatEntry& entry : unit->layout().entries())
      reader.want(entry.name, entry.whole_shape(), at::kFloat);
  }
  reader.want_buffers(engine.module());
  for (const auto& [alias, name] : engine.aliases()) reader.allow_alias(alias, name);
}

void read_weights(const StateReader& reader, parallel::DataParallel& engine) {
  engine.load_values([&](const std::string& name) { return reader.has(name); }, values_of(reader));
  reader.read_buffers(engine.module());
}

void want_optimizer(StateReader& reader, parallel::DataParallel& engine, const OptimizerState& optimizer) {
  for (size_t unit = 0; unit < engine.units().size(); ++unit) {
    for (size_t param = 0; param < engine.units()[unit]->params().size(); ++param) {
      const plan::FlatEntry& entry = engine.units()[unit]->layout().entries()[param];
      std::vector<std::string> lacking;
      bool any = optimizer.has_always(unit, param);
      for (size_t kind = 0; kind < optimizer.kinds().size(); ++kind) {
        const std::string name = optimizer_name(optimizer.kinds()[kind], entry.name);
        const bool there = reader.allow(name, entry.whole_shape(), at::kFloat) ||
                           allow_local_state(reader, optimizer.kinds()[kind], entry);
        any |= there;
        if (!there && optimizer.needs(kind)) lacking.push_back(name);
      }
      any |= reader.allow(optimizer_name("step", entry.name), {}, at::kLong);
      if (any) reader.lacks(lacking);
    }
  }
  allow_hook_state(reader, engine);
}

void read_optimizer(const StateReader& reader, parallel::DataParallel& engine, OptimizerState& optimizer) {
  for (size_t unit = 0; unit < engine.units().size(); ++unit) {
    const parallel::FlatUnit& flat = *engine.units()[unit];
    for (size_t param = 0; param < flat.params().size(); ++param) {
      const plan::FlatEntry& entry = flat.layout().entries()[param];
      const plan::Range part = flat.owned_part(param);
      ParamState state;
      for (const std::string& kind : optimizer.kinds()) {
        const std::string name = optimizer_name(kind, entry.name);
        at::Tensor& piece = state.pieces.emplace_back();
        const plan::Region region = entry.region(part);
        piece = reader.has(name) ? reader.read(name, region)
                                 : read_local_state(reader, *engine.mesh().dp, kind, entry, region);
        if (piece.defined()) piece = piece.to(flat.master().device(), at::kFloat);
      }
      if (const std::string name = optimizer_name("step", entry.name); reader.has(name))
        state.step = reader.read(name).item<int64_t>();
      const bool in_file = reader.has(entry.name) || state.step != ParamState::kNoStep ||
                           std::ranges::any_of(state.pieces, &at::Tensor::defined);
      if (in_file) optimizer.set(unit, param, std::move(state));  // else it stays, as the parameter does
    }
  }
  optimizer.end_of_set();
  read_hook_state(reader, engine);
}

Notes notes_in(const std::map<std::string, std::string>& metadata) {
  Notes notes;
  for (const auto& [key, value] : metadata) {
    if (key.starts_with(kNotePrefix)) notes.emplace(key.substr(std::string_view(kNotePrefix).size()), value);
  }
  return notes;
}

/// Looks at everything before it changes anything.
Notes load(parallel::DataParallel& engine, OptimizerState* optimizer, const std::string& path,
           const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  engine.notice_update();
  std::unique_ptr<StateReader> reader;
  const std::exception_ptr error = error_of([&] {
    engine.take_writes();
    reader = std::make_unique<StateReader>(path);
    want_weights(*reader, engine);
    if (optimizer != nullptr && !reader->metadata().contains(kStateMark))
      throw DataError(
          "[state.file] {} has weights but no optimizer state; load it with load_weights, or save "
          "with save_state",
          path);
    if (optimizer != nullptr) want_optimizer(*reader, engine, *optimizer);
    reader->check(options, /*ignores_optimizer=*/optimizer == nullptr);
  });
  comm::throw_together(*engine.mesh().stage, error, "state.file");
  if (optimizer != nullptr) engine.skip_step();
  read_weights(*reader, engine);
  if (optimizer != nullptr) read_optimizer(*reader, engine, *optimizer);
  return notes_in(reader->metadata());
}

void check_free(const torch::nn::Module& module) {
  for (const parallel::ModuleParameter& param : parallel::module_parameters(module)) {
    if (nn::has_lender(param.tensor))
      throw LogicError(
          "[state.file] parameter {} of {} belongs to an engine; pass the engine instead of the "
          "module",
          param.name, module.name());
  }
}

}  // namespace

std::map<std::string, std::string> state_metadata(parallel::DataParallel& engine) {
  std::map<std::string, std::string> metadata = module_buffers(engine.module()).aliases;
  metadata.insert(engine.aliases().begin(), engine.aliases().end());
  metadata.emplace(kStateMark, "1");
  return metadata;
}

void save_weights(parallel::DataParallel& engine, const std::string& path, const Notes& notes) {
  save(engine, nullptr, path, notes);
}

void load_weights(parallel::DataParallel& engine, const std::string& path, const LoadOptions& options) {
  load(engine, nullptr, path, options);
}

void load_frozen(parallel::DataParallel& engine, const std::string& path, const LoadOptions& options) {
  std::unique_ptr<StateReader> reader;
  const std::exception_ptr error = error_of([&] {
    reader = std::make_unique<StateReader>(path);
    for (const auto& unit : engine.units()) {
      if (unit->frozen() == nullptr) continue;
      for (const plan::FlatEntry& entry : unit->frozen()->layout().entries())
        reader->want(entry.name, entry.whole_shape(), at::kFloat);
    }
    for (const auto& [alias, name] : engine.aliases()) reader->allow_alias(alias, name);
    reader->check(options, /*ignores_optimizer=*/true);
  });
  comm::throw_together(*engine.mesh().stage, error, "state.file");
  engine.load_frozen(values_of(*reader));
}

void save_weights(comm::Group& all, const TensorInfos& infos, const WeightVisit& visit,
                  const std::string& path, const Notes& notes) {
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  std::exception_ptr error;
  if (all.rank() == 0) {
    error = error_of([&] {
      std::map<std::string, StateTensor> tensors;
      for (const auto& [name, info] : infos) tensors[name] = {info.first, info.second};
      writer = open_file(tensors, {}, path, /*has_optimizer=*/false, notes);
    });
  }
  visit([&](const std::string& name, const at::Tensor& weight) {
    if (writer && !error) error = error_of([&] { writer->write(name, weight); });
  });
  if (writer && !error) error = error_of([&] { writer->commit(); });
  comm::throw_together(all, error, "state.file");
}

Notes read_notes(const std::string& path) {
  return notes_in(checkpoint::SafetensorsReader(path).metadata());
}

void save_state(parallel::DataParallel& engine, optim::Optimizer& optimizer, const std::string& path,
                const Notes& notes) {
  save(engine, state_of(engine, optimizer).get(), path, notes);
}

Notes load_state(parallel::DataParallel& engine, optim::Optimizer& optimizer, const std::string& path,
                 const LoadOptions& options) {
  return load(engine, state_of(engine, optimizer).get(), path, options);
}

void save_state(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer, const std::string& path,
                const Notes& notes) {
  save(engine, state_of(engine, optimizer).get(), path, notes);
}

Notes load_state(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer, const std::string& path,
                 const LoadOptions& options) {
  return load(engine, state_of(engine, optimizer).get(), path, options);
}

void save_weights(const torch::nn::Module& module, const std::string& path) {
  check_free(module);
  if (const parallel::Parts parts = parallel::declared_parts(module); !parts.empty()) {
    throw LogicError(
        "[state.file] {} has a part of {} and not all of it, so no whole file can be made of it "
        "here; wrap it and save the engine's weights",
        module.name(), parts.begin()->first);
  }
  ModuleBuffers all = module_buffers(module);
  for (const parallel::ModuleParameter& param : parallel::module_parameters(module)) {
    all.tensors.emplace_back(param.name, param.tensor.detach());
    for (const std::string& alias : param.aliases) all.aliases.emplace(alias, param.name);
  }
  std::map<std::string, StateTensor> infos;
  for (const auto& [name, tensor] : all.tensors) infos[name] = {tensor.sizes().vec(), tensor.scalar_type()};
  const auto writer = open_file(infos, all.aliases, path, false, {});
  for (const auto& [name, tensor] : all.tensors) writer->write(name, tensor);
  writer->commit();
}

void load_weights(torch::nn::Module& module, const std::string& path, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  check_free(module);
  StateReader reader(path);
  const auto params = parallel::module_parameters(module);
  const parallel::Parts parts = parallel::declared_parts(module);
  const auto part_of = [&](const parallel::ModuleParameter& param) {
    const auto found = parts.find(param.name);
    return found == parts.end() ? plan::Part() : found->second;
  };
  for (const parallel::ModuleParameter& param : params) {
    parallel::check_writable(param.name, param.tensor, "state.file");
    reader.want(param.name, part_of(param).whole_of(param.tensor.sizes().vec()), param.tensor.scalar_type());
    for (const std::string& alias : param.aliases) reader.allow_alias(alias, param.name);
  }
  reader.want_buffers(module);
  reader.check(options, /*ignores_optimizer=*/true);
  for (const parallel::ModuleParameter& param : params) {
    if (!reader.has(param.name)) continue;
    at::Tensor tensor = param.tensor;
    const plan::Region region = part_of(param).region(tensor.sizes().vec(), {0, tensor.numel()});
    tensor.copy_(reader.read(param.name, region).view(tensor.sizes()));
  }
  reader.read_buffers(module);
}

}  // namespace trireme::state
