// The CUDA driver's entry points that the link uses, looked up in libcuda at run time, so that the
// package builds without a CUDA toolkit and one build serves machines with and without a GPU.
//
// Types and numbers are the driver's stable C ABI.

#pragma once

#include <cstddef>
#include <cstdint>

namespace oled_jax {

using CudaResult = int;
using CudaPointer = unsigned long long;  // device memory
using CudaContext = void*;
using CudaEvent = void*;

constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaHostPortable = 1;

struct CudaDriver {
  CudaResult (*cuInit)(unsigned);
  CudaResult (*cuGetErrorString)(CudaResult, const char**);
  CudaResult (*cuDeviceGet)(int*, int);
  CudaResult (*cuDevicePrimaryCtxRetain)(CudaContext*, int);
  CudaResult (*cuDevicePrimaryCtxRelease)(int);
  CudaResult (*cuCtxSetCurrent)(CudaContext);
  CudaResult (*cuMemHostAlloc)(void**, size_t, unsigned);
  CudaResult (*cuMemFreeHost)(void*);
  CudaResult (*cuMemcpyHtoDAsync)(CudaPointer, const void*, size_t, void*);
  CudaResult (*cuMemcpyDtoHAsync)(void*, CudaPointer, size_t, void*);
  CudaResult (*cuMemsetD8Async)(CudaPointer, unsigned char, size_t, void*);
  CudaResult (*cuStreamCreate)(void**, unsigned);
  CudaResult (*cuStreamDestroy)(void*);
  CudaResult (*cuStreamSynchronize)(void*);
  CudaResult (*cuStreamWaitEvent)(void*, CudaEvent, unsigned);
  CudaResult (*cuEventCreate)(CudaEvent*, unsigned);
  CudaResult (*cuEventDestroy)(CudaEvent);
  CudaResult (*cuEventRecord)(CudaEvent, void*);
  CudaResult (*cuEventQuery)(CudaEvent);
  CudaResult (*cuEventElapsedTime)(float*, CudaEvent, CudaEvent);
};

// The driver, loaded and initialised on first use.
// Throws std::runtime_error that says what is missing or which call failed.
const CudaDriver& cuda_driver();

// Throws std::runtime_error that names the call unless `result` is success.
void cuda_check(CudaResult result, const char* call);

}  // namespace oled_jax
