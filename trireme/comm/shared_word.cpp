#include "trireme/comm/shared_word.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/gpu_call.h"
#include "trireme/comm/shared_pages.h"

namespace trireme::comm {
namespace {

constexpr size_t kPageBytes = 4096;

using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

/// A function of the driver, with which this library is not linked; none in one that is too old.
StreamValue driver_call(const char* name) {
  constexpr unsigned int kSince = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const bool known =
      succeeds(cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result));
  return known && result == cudaDriverEntryPointSuccess ? reinterpret_cast<StreamValue>(found) : nullptr;
}

StreamValue wait_call() {
  static const StreamValue call = driver_call("cuStreamWaitValue32");
  return call;
}

StreamValue write_call() {
  static const StreamValue call = driver_call("cuStreamWriteValue32");
  return call;
}

void check(CUresult result, const char* call) {
  TRIREME_CHECK(result == CUDA_SUCCESS, "[comm.link] {} failed with code {}", call, static_cast<int>(result));
}

}  // namespace

SharedWord::SharedWord(std::unique_ptr<SharedPages> pages) : pages_(std::move(pages)) {
  registered_ = succeeds(
      cudaHostRegister(pages_->data(), pages_->bytes(), cudaHostRegisterPortable | cudaHostRegisterMapped));
  void* address = nullptr;
  if (!registered_ || !succeeds(cudaHostGetDevicePointer(&address, pages_->data(), 0))) return;
  on_gpu_ = reinterpret_cast<uintptr_t>(address);
}

SharedWord::~SharedWord() {
  if (registered_) succeeds(cudaHostUnregister(pages_->data()));
}

std::unique_ptr<SharedWord> SharedWord::over(std::unique_ptr<SharedPages> pages) {
  if (!pages || wait_call() == nullptr || write_call() == nullptr) return nullptr;
  std::unique_ptr<SharedWord> word(new SharedWord(std::move(pages)));
  return word->on_gpu_ != 0 ? std::move(word) : nullptr;
}

std::unique_ptr<SharedWord> SharedWord::make() {
  return over(SharedPages::make(kPageBytes));
}

std::unique_ptr<SharedWord> SharedWord::open(const std::string& text) {
  return over(SharedPages::open(text, kPageBytes));
}

std::string SharedWord::text() const {
  return pages_->text();
}

void SharedWord::wait_for(uint32_t value, void* stream) const {
  check(wait_call()(static_cast<CUstream>(stream), on_gpu_, value, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

void SharedWord::write(uint32_t value, void* stream) const {
  check(write_call()(static_cast<CUstream>(stream), on_gpu_, value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue32");
}

uint32_t SharedWord::value() const {
  return std::atomic_ref(*static_cast<uint32_t*>(pages_->data())).load(std::memory_order_acquire);
}

void SharedWord::write_from_host(uint32_t value) {
  std::atomic_ref(*static_cast<uint32_t*>(pages_->data())) = value;
}

}  // namespace trireme::comm
