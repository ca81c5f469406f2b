#include "trireme/gt/dataset.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::ConfigError;

namespace {

/// The path as workers in other folders find it. A word that is no path stays as it is.
std::string absolute_path(const std::string& path, std::string_view word) {
  if (path.empty() || path == word) return path;
  std::error_code failed;
  const std::filesystem::path absolute = std::filesystem::absolute(path, failed);
  return failed ? path : absolute.string();
}

}  // namespace

Dataset dataset(const DatasetOptions& options, source_location where) {
  const std::shared_ptr<Program> program = Program::current();
  const std::string fault = dataset_fault(options);
  if (!fault.empty()) throw ConfigError("[gt.dataset] {}: {}", place_of(where), fault);
  DatasetOptions spec = options;
  spec.path = absolute_path(options.path, "builtin");
  spec.tokenizer = absolute_path(options.tokenizer, DatasetOptions().tokenizer);
  spec.place = place_of(where);
  const int64_t number = program->dataset(spec, where);
  return {program, number, std::move(spec)};
}

TokenBatch Dataset::batch(int64_t step, source_location where) const {
  if (number_ == 0)
    throw ConfigError("[gt.dataset] {}: this dataset is empty; make it by gt::dataset()", place_of(where));
  const std::shared_ptr<Program> program = Program::current();
  if (program_.lock() != program)
    throw ConfigError(
        "[gt.dataset] {}: this dataset belongs to workers that this thread had before; make it again with "
        "these",
        place_of(where));
  return {Tensor(program->batch(number_, step, false, where)),
          Tensor(program->batch(number_, step, true, where))};
}

}  // namespace gt
