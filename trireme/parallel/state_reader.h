#pragma once
// A state file compared with what somebody wants of it, name by name. Private to parallel/*.cpp.
#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trireme/checkpoint/safetensors.h"
#include "trireme/parallel/state_file.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::parallel {

class StateReader {
 public:
  explicit StateReader(const std::string& path, std::map<std::string, RowsOf> rows = {})
      : file_(path), rows_(std::move(rows)) {}

  /// The file shall have this tensor, under this name or one that stands for it, or one of which it is rows.
  void want(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType dtype);
  void want_buffers(const torch::nn::Module& module);
  /// It may have it; returns whether it does.
  bool allow(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType dtype);
  /// `alias` is another name for `name`, which was wanted.
  void allow_alias(const std::string& alias, const std::string& name);
  /// What else is missing.
  void lacks(const std::vector<std::string>& names);
  /// Throws DataError naming tensors that are missing, have other shapes or dtypes, or that nobody wants; the
  /// optimizer's among the last do not count when they are ignored.
  void check(const LoadOptions& options, bool ignores_optimizer) const;

  bool has(const std::string& name) const { return found_.contains(name); }
  /// Elements of a tensor that it has(), (range.size()) on the CPU.
  at::Tensor read(const std::string& name, const plan::Range& range) const;
  void read_buffers(torch::nn::Module& module) const;
  /// Of the file as it is.
  bool file_has(const std::string& name) const { return file_.tensors().contains(name); }
  const std::vector<int64_t>& file_shape(const std::string& name) const {
    return file_.tensors().at(name).shape;
  }
  const std::map<std::string, std::string>& metadata() const { return file_.metadata(); }

 private:
  bool find(const std::string& wanted, const std::string& name);
  /// Of a tensor of this shape; none: it is whole.
  std::optional<RowsOf> rows_of(const std::string& name, const std::vector<int64_t>& shape) const;

  checkpoint::SafetensorsReader file_;
  std::map<std::string, RowsOf> rows_;  ///< by parameter
  struct Wanted {
    std::vector<int64_t> shape;
    at::ScalarType dtype;
    int64_t first = 0;  ///< element in the file's tensor
  };
  std::map<std::string, Wanted> wanted_;
  std::map<std::string, std::string> found_;  ///< wanted name -> name in the file
  std::set<std::string> used_;                ///< names in the file
  std::vector<std::string> missing_, misfits_;
};

}  // namespace trireme::parallel
