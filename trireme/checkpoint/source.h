#pragma once
// Named tensors in files, whichever way they are stored: a safetensors file, or a checkpoint of many.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "trireme/plan/region.h"

namespace trireme::checkpoint {

/// Elements that are read at once where a tensor is gone through.
inline constexpr int64_t kPartNumel = int64_t{1} << 20;

struct SourceTensor {
  std::string dtype;  ///< as safetensors has it
  plan::Shape shape;  ///< of elements as safetensors_itemsize() counts them
  int64_t numel() const;
  int64_t bytes() const;
  bool operator==(const SourceTensor&) const = default;
};

class Source {
 public:
  virtual ~Source() = default;
  const std::string& path() const { return path_; }
  const std::map<std::string, SourceTensor>& tensors() const { return tensors_; }
  virtual const std::map<std::string, std::string>& metadata() const = 0;
  /// The elements of a region of one of tensors(), one after the other, to `out`. Thread-safe. Throws
  /// DataError naming the tensor when the file is damaged.
  virtual void read(const std::string& name, const plan::Region& region, void* out) const = 0;

 protected:
  explicit Source(std::string path) : path_(std::move(path)) {}
  std::map<std::string, SourceTensor> tensors_;

 private:
  std::string path_;
};

/// Opens a folder with safetensors files of other programs as model_folder.h says, any other folder as a
/// checkpoint, and anything else as a safetensors file. Throws EnvironmentError when there is nothing,
/// DataError when it is damaged or a pickle.
std::unique_ptr<Source> open_source(const std::string& path);

/// Reads two tensors of one dtype and shape part by part. `body` gets the bytes of the same elements of both,
/// and says whether to go on.
void read_both(const Source& a, const std::string& tensor_of_a, const Source& b,
               const std::string& tensor_of_b,
               const std::function<bool(std::span<const char> left, std::span<const char> right)>& body);

/// How the contents of two sources differ.
struct Difference {
  std::string tensor;
  std::string what;      ///< "only in the first", "F32 [2] against F32 [3]", "5 of 8 elements"
  int64_t elements = 0;  ///< that differ; 0 where they cannot be compared
  double largest = 0.0;  ///< absolute difference of two numbers; of floating-point tensors alone
};
/// Tensors in name order; those that are equal bit for bit are left out.
std::vector<Difference> compare(const Source& a, const Source& b);

struct Conversion {
  std::function<bool(const std::string&)> select = {};  ///< tensors; none: all
  std::set<std::string> without = {};                   ///< keys of metadata
  int64_t files = 1;
  int64_t step = 0;
  std::string state = "{}";  ///< JSON
  bool replaces = false;     ///< convert_to_file() replaces a file that is there
};
/// Writes a checkpoint in the folder of checkpoints `parent`, every tensor in equal parts over its files.
/// Returns its name.
std::string convert_to_checkpoint(const Source& source, const std::string& parent, const Conversion& how);
/// Writes one safetensors file that is there complete or not at all. Throws EnvironmentError where there is a
/// file already.
void convert_to_file(const Source& source, const std::string& path, const Conversion& how);

}  // namespace trireme::checkpoint
