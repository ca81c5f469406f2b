// A library for NVTX_INJECTION64_PATH, which NVTX loads as it loads a profiler's: writes a line for each
// range that begins ("+name") or ends ("-") to the file of the process, TRIREME_NVTX_LISTENS.PID.
#include <fcntl.h>
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace {

/// Threads of a process share its file; short lines that are appended stay whole.
void write_line(const std::string& line) {
  static const int file = [] {
    const char* const path = std::getenv("TRIREME_NVTX_LISTENS");
    const std::string name = std::string(path != nullptr ? path : "nvtx") + "." + std::to_string(::getpid());
    return ::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  }();
  const std::string text = std::to_string(::gettid()) + " " + line + "\n";
  if (::write(file, text.data(), text.size()) < 0) std::abort();
}

int push(const char* name) {
  write_line(std::string("+") + name);
  return 0;
}

int pop() {
  write_line("-");
  return 0;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &count) == 0)
    return 0;
  *functions[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
