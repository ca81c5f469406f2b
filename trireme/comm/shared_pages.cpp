#include "trireme/comm/shared_pages.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sstream>

#include "trireme/comm/process_id.h"

namespace trireme::comm {

/// Takes over the descriptor.
std::unique_ptr<SharedPages> SharedPages::map(int descriptor, size_t bytes) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data != MAP_FAILED) return std::unique_ptr<SharedPages>(new SharedPages(data, bytes, descriptor));
  ::close(descriptor);
  return nullptr;
}

std::unique_ptr<SharedPages> SharedPages::make(size_t bytes) {
  const int descriptor = ::memfd_create("trireme", MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  // Reserves the pages now: without enough memory this fails here, and not with SIGBUS at the first write.
  if (::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes)) == 0) return map(descriptor, bytes);
  ::close(descriptor);
  return nullptr;
}

std::unique_ptr<SharedPages> SharedPages::open(const std::string& text, size_t bytes) {
  std::string host;
  pid_t pid = 0;
  int descriptor = -1;
  if (!(std::istringstream(text) >> host >> pid >> descriptor) || host != host_identity()) return nullptr;
  const int own = ::open(fmt::format("/proc/{}/fd/{}", pid, descriptor).c_str(), O_RDWR | O_CLOEXEC);
  return own < 0 ? nullptr : map(own, bytes);
}

SharedPages::~SharedPages() {
  ::munmap(data_, bytes_);
  ::close(descriptor_);
}

std::string SharedPages::text() const {
  return fmt::format("{} {} {}", host_identity(), ::getpid(), descriptor_);
}

}  // namespace trireme::comm
