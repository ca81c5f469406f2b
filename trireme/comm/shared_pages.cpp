#include "trireme/comm/shared_pages.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sstream>

#include "trireme/base/shared_memory.h"
#include "trireme/comm/process_id.h"

namespace trireme::comm {

std::unique_ptr<SharedPages> SharedPages::map(Descriptor memory, size_t bytes) {
  void* const data = memory ? map_shared_memory(memory, bytes) : nullptr;
  if (data == nullptr) return nullptr;
  return std::unique_ptr<SharedPages>(new SharedPages(data, bytes, std::move(memory)));
}

std::unique_ptr<SharedPages> SharedPages::make(size_t bytes) {
  return map(make_shared_memory("trireme", bytes), bytes);
}

std::unique_ptr<SharedPages> SharedPages::open(const std::string& text, size_t bytes) {
  std::string host;
  pid_t pid = 0;
  int descriptor = -1;
  if (!(std::istringstream(text) >> host >> pid >> descriptor) || host != host_identity()) return nullptr;
  return map(Descriptor(::open(fmt::format("/proc/{}/fd/{}", pid, descriptor).c_str(), O_RDWR | O_CLOEXEC)),
             bytes);
}

SharedPages::~SharedPages() {
  ::munmap(data_, bytes_);
}

std::string SharedPages::text() const {
  return fmt::format("{} {} {}", host_identity(), ::getpid(), memory_.get());
}

}  // namespace trireme::comm
