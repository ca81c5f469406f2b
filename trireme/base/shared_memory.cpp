#include "trireme/base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

namespace trireme {

Descriptor make_shared_memory(const char* name, size_t bytes) {
  Descriptor memory(::memfd_create(name, MFD_CLOEXEC));
  if (!memory) return {};
  // Reserves the pages now: without enough memory this fails here, and not with SIGBUS at the first write. It
  // returns its error, and leaves errno alone.
  const int error = ::posix_fallocate(memory.get(), 0, static_cast<off_t>(bytes));
  if (error == 0) return memory;
  memory.close();
  errno = error;
  return {};
}

void* map_shared_memory(const Descriptor& memory, size_t bytes) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  return data == MAP_FAILED ? nullptr : data;
}

}  // namespace trireme
