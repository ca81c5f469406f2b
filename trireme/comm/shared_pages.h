#pragma once
// Memory of one host that two processes map. It has no name in a file system: the kernel frees it when the
// last process that maps it ends. Internal to this room.
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "trireme/base/descriptor.h"

namespace trireme::comm {

class SharedPages {
 public:
  /// `bytes` of zeros; none where there is not so much memory.
  static std::unique_ptr<SharedPages> make(size_t bytes);
  /// Maps the memory whose text() this is; none when it cannot be mapped here, as on another host, or when
  /// its maker has gone.
  static std::unique_ptr<SharedPages> open(const std::string& text, size_t bytes);
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  ~SharedPages();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// What another process needs to open it; made by make() alone.
  std::string text() const;

 private:
  SharedPages(void* data, size_t bytes, Descriptor memory)
      : data_(data), bytes_(bytes), memory_(std::move(memory)) {}
  static std::unique_ptr<SharedPages> map(Descriptor memory, size_t bytes);

  void* data_;
  size_t bytes_;
  Descriptor memory_;
};

}  // namespace trireme::comm
