#include "trireme/train/weights.h"

#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme::train {

void save_weights(const parallel::DataParallel& engine, const plan::ModelFacts& facts,
                  const std::string& path, bool writes) {
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  if (writes) {
    make_directories(std::filesystem::path(path).parent_path());
    std::map<std::string, checkpoint::TensorInfo> infos;
    for (const plan::UnitSpec& unit : facts.units) {
      for (const plan::ParamSpec& param : unit.params) infos[param.name] = {at::kFloat, param.shape};
    }
    writer = std::make_unique<checkpoint::SafetensorsWriter>(
        path, infos, std::map<std::string, std::string>{{"format", "pt"}});
  }
  engine.visit_weights([&](const std::string& name, const at::Tensor& weight) {
    if (writer) writer->write(name, weight);
  });
  if (writer) writer->commit();
}

void load_weights(nn::LanguageModel& model, const std::string& path) {
  const at::NoGradGuard no_grad;
  const checkpoint::SafetensorsReader reader(path);
  for (auto& entry : model.named_parameters()) {
    const at::Tensor stored = reader.read(entry.key());
    if (stored.sizes() != entry.value().sizes()) {
      throw DataError(
          "[train.weights] {}: tensor {} has shape {}, the model wants {}; check that config.yaml belongs "
          "to these weights",
          path, entry.key(), fmt::join(stored.sizes(), "x"), fmt::join(entry.value().sizes(), "x"));
    }
    entry.value().copy_(stored);
  }
}

}  // namespace trireme::train
