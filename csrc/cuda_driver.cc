#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace oled_jax {
namespace {

template <typename Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  }
}

CudaDriver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw std::runtime_error(std::string("no CUDA driver: ") + (why ? why : "libcuda.so.1"));
  }
  CudaDriver driver;
  // "_v2" is the ABI with 64-bit sizes, which the headers' plain names stand for.
  look_up(library, "cuInit", driver.cuInit);
  look_up(library, "cuGetErrorString", driver.cuGetErrorString);
  look_up(library, "cuDeviceGet", driver.cuDeviceGet);
  look_up(library, "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain);
  look_up(library, "cuDevicePrimaryCtxRelease_v2", driver.cuDevicePrimaryCtxRelease);
  look_up(library, "cuCtxSetCurrent", driver.cuCtxSetCurrent);
  look_up(library, "cuMemHostAlloc", driver.cuMemHostAlloc);
  look_up(library, "cuMemFreeHost", driver.cuMemFreeHost);
  look_up(library, "cuMemcpyHtoDAsync_v2", driver.cuMemcpyHtoDAsync);
  look_up(library, "cuMemcpyDtoHAsync_v2", driver.cuMemcpyDtoHAsync);
  look_up(library, "cuMemsetD8Async", driver.cuMemsetD8Async);
  look_up(library, "cuStreamCreate", driver.cuStreamCreate);
  look_up(library, "cuStreamDestroy_v2", driver.cuStreamDestroy);
  look_up(library, "cuStreamSynchronize", driver.cuStreamSynchronize);
  look_up(library, "cuStreamWaitEvent", driver.cuStreamWaitEvent);
  look_up(library, "cuEventCreate", driver.cuEventCreate);
  look_up(library, "cuEventDestroy_v2", driver.cuEventDestroy);
  look_up(library, "cuEventRecord", driver.cuEventRecord);
  look_up(library, "cuEventQuery", driver.cuEventQuery);
  look_up(library, "cuEventElapsedTime", driver.cuEventElapsedTime);
  if (CudaResult result = driver.cuInit(0); result != kCudaSuccess) {
    throw std::runtime_error("cuInit failed with error " + std::to_string(result));
  }
  return driver;
}

}  // namespace

const CudaDriver& cuda_driver() {
  static const CudaDriver driver = load();
  return driver;
}

void cuda_check(CudaResult result, const char* call) {
  if (result == kCudaSuccess) return;
  const char* text = nullptr;
  cuda_driver().cuGetErrorString(result, &text);
  throw std::runtime_error(std::string(call) + " failed: " + (text ? text : "unknown error") + " (" +
                           std::to_string(result) + ")");
}

}  // namespace oled_jax
