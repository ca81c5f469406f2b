#pragma once
// A state file compared with what somebody wants of it, name by name. Private to state/*.cpp.
#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trireme/checkpoint/safetensors.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/state/state_file.h"

namespace trireme::state {

class StateReader {
 public:
  explicit StateReader(const std::string& path) : file_(path) {}

  /// The file shall have this tensor, under this name or one that stands for it.
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
  /// A tensor that it has(), on the CPU.
  at::Tensor read(const std::string& name) const { return file_.read(found_.at(name)); }
  /// A region of it, (region.numel()).
  at::Tensor read(const std::string& name, const plan::Region& region) const;
  void read_buffers(torch::nn::Module& module) const;
  /// Of the file as it is.
  bool file_has(const std::string& name) const { return file_.tensors().contains(name); }
  const std::vector<int64_t>& file_shape(const std::string& name) const {
    return file_.tensors().at(name).shape;
  }
  const std::map<std::string, std::string>& metadata() const { return file_.metadata(); }

 private:
  bool find(const std::string& wanted, const std::string& name);

  checkpoint::SafetensorsReader file_;
  struct Wanted {
    std::vector<int64_t> shape;
    at::ScalarType dtype;
  };
  std::map<std::string, Wanted> wanted_;
  std::map<std::string, std::string> found_;  ///< wanted name -> name in the file
  std::set<std::string> used_;                ///< names in the file
  std::vector<std::string> missing_, misfits_;
};

}  // namespace trireme::state
