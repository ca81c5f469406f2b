#pragma once
// Datasets of a controller's program as data: which tokens its workers read, and in which batches. Workers
// open them by trireme/data; the program has their numbers alone.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "trireme/plan/ops.h"

namespace trireme::plan {

/// Datasets of a program, at most.
inline constexpr size_t kMostDatasets = 1024;

/// A text as batches of tokens. What `trireme train` has under the same names in data.*, seed and
/// train.global_batch gives the same batches, row for row: row r of batch s is sample s * batch + r of the
/// training split, in an order that is new in each epoch and follows from the seed.
struct DatasetSpec {
  std::string path = {};  ///< a text file or folder, as data.path; "builtin": the headers of libtorch
  std::string tokenizer = "byte";  ///< or the path of a file or folder, as data.tokenizer
  int64_t seq_len = 128;           ///< tokens of a row
  int64_t batch = 16;              ///< rows
  int64_t seed = 42;               ///< of the order of rows
  double val_fraction = 0.02;      ///< of the text, which is held out and never read
  int64_t vocab_size = 0;          ///< token ids that the model has: a text with others is refused; 0: any
  std::string place = {};          ///< in the source that declares it: "main.cpp:12"; empty: not known

  /// The type of a batch's inputs, and of its targets, which are the inputs' successors.
  TensorType type() const { return {{batch, seq_len}, TensorDtype::kInt64}; }
  bool operator==(const DatasetSpec&) const = default;
};

/// The reason why there is no such dataset, with the value and the fix; empty: there may be one.
std::string dataset_fault(const DatasetSpec& spec);
/// The reason why a dataset has no batch of this number; empty: it has one.
std::string batch_fault(const DatasetSpec& spec, int64_t step);

/// "dataset path=/texts tokenizer=byte seq_len=64 batch=32 seed=0 val_fraction=0.02 vocab_size=256
/// #main.cpp:12".
/// Bytes of paths that would end a word or begin a comment are written %20, as in addresses of the web.
std::string to_text(const DatasetSpec& spec);
/// Reads to_text(); what it does not name is as in DatasetSpec. Throws ConfigError that begins with `at`, for
/// unknown keys with the nearest one, values that are no numbers, and faults.
DatasetSpec dataset_from_text(std::string_view text, const std::string& at);

}  // namespace trireme::plan
