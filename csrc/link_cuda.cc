// A link to one CUDA device: pages on a copy stream, ordered against XLA's stream by events.

#include <array>
#include <stdexcept>

#include "cuda_driver.h"
#include "link.h"

namespace oled_jax {
namespace {

// Events that remember the last tickets. An older ticket waits for the oldest remembered one, which
// comes after it in the same queue.
constexpr size_t kRemembered = 64;

CudaPointer device_pointer(const void* memory) { return reinterpret_cast<CudaPointer>(memory); }

class CudaLink final : public Link {
 public:
  explicit CudaLink(int ordinal) : driver_(cuda_driver()) {
    cuda_check(driver_.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
    // XLA works in the device's primary context, too: its streams and events mix with ours.
    cuda_check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    enter();
    cuda_check(driver_.cuStreamCreate(&copies_, kCudaStreamNonBlocking), "cuStreamCreate");
    for (CudaEvent& event : events_) event = make_event(kCudaEventDisableTiming);
    barrier_ = make_event(kCudaEventDisableTiming);
    started_ = make_event(0);
    stopped_ = make_event(0);
  }

  ~CudaLink() override {
    // Errors cannot be reported from here; what fails is left to the end of the process.
    driver_.cuCtxSetCurrent(context_);
    driver_.cuStreamSynchronize(copies_);
    for (CudaEvent event : events_) driver_.cuEventDestroy(event);
    for (CudaEvent event : {barrier_, started_, stopped_}) driver_.cuEventDestroy(event);
    driver_.cuStreamDestroy(copies_);
    driver_.cuDevicePrimaryCtxRelease(device_);
  }

  void enter() override { cuda_check(driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent"); }

  void* allocate(size_t bytes) override {
    enter();
    void* memory = nullptr;
    cuda_check(driver_.cuMemHostAlloc(&memory, bytes, kCudaHostPortable), "cuMemHostAlloc");
    return memory;
  }
  void release(void* memory) noexcept override {
    driver_.cuCtxSetCurrent(context_);
    driver_.cuMemFreeHost(memory);
  }

  void to_host(Stream stream, void* target, const void* source, size_t bytes) override {
    cuda_check(driver_.cuMemcpyDtoHAsync(target, device_pointer(source), bytes, stream),
               "cuMemcpyDtoHAsync");
  }
  void to_device(Stream stream, void* target, const void* source, size_t bytes) override {
    cuda_check(driver_.cuMemcpyHtoDAsync(device_pointer(target), source, bytes, stream),
               "cuMemcpyHtoDAsync");
  }
  void clear(Stream stream, void* target, size_t bytes) override {
    cuda_check(driver_.cuMemsetD8Async(device_pointer(target), 0, bytes, stream),
               "cuMemsetD8Async");
  }
  void synchronize(Stream stream) override {
    cuda_check(driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
  }
  bool runs_beside_the_host() const override { return true; }

  void move(void* target, const void* source, size_t bytes) override {
    cuda_check(driver_.cuMemcpyHtoDAsync(device_pointer(target), source, bytes, copies_),
               "cuMemcpyHtoDAsync (page)");
  }
  Ticket mark() override {
    ++last_;
    cuda_check(driver_.cuEventRecord(events_[last_ % kRemembered], copies_), "cuEventRecord");
    return last_;
  }
  bool reached(Ticket ticket) override {
    if (ticket <= reached_) return true;
    CudaResult result = driver_.cuEventQuery(event_of(ticket));
    if (result == kCudaNotReady) return false;
    cuda_check(result, "cuEventQuery");
    reached_ = ticket;
    return true;
  }
  void await(Stream stream, Ticket ticket) override {
    if (ticket <= reached_) return;
    cuda_check(driver_.cuStreamWaitEvent(stream, event_of(ticket), 0), "cuStreamWaitEvent");
  }
  void move_after(Stream stream) override {
    cuda_check(driver_.cuEventRecord(barrier_, stream), "cuEventRecord");
    cuda_check(driver_.cuStreamWaitEvent(copies_, barrier_, 0), "cuStreamWaitEvent");
  }
  void start_timing() override {
    cuda_check(driver_.cuEventRecord(started_, copies_), "cuEventRecord");
  }
  void stop_timing() override {
    cuda_check(driver_.cuEventRecord(stopped_, copies_), "cuEventRecord");
    timed_ = true;
  }
  double timed_us() override {
    if (!timed_) return -1;
    timed_ = false;
    float milliseconds = 0;
    // The caller asks after the stream that waited for these copies was synchronised.
    if (driver_.cuEventElapsedTime(&milliseconds, started_, stopped_) != kCudaSuccess) return -1;
    return milliseconds * 1e3;
  }
  void drain() override {
    enter();
    cuda_check(driver_.cuStreamSynchronize(copies_), "cuStreamSynchronize (pages)");
    reached_ = last_;
  }

 private:
  CudaEvent make_event(unsigned flags) {
    CudaEvent event = nullptr;
    cuda_check(driver_.cuEventCreate(&event, flags), "cuEventCreate");
    return event;
  }
  CudaEvent event_of(Ticket ticket) const {
    bool remembered = ticket + kRemembered > last_;
    return events_[(remembered ? ticket : last_ + 1) % kRemembered];
  }

  const CudaDriver& driver_;
  int device_ = 0;
  CudaContext context_ = nullptr;
  void* copies_ = nullptr;
  std::array<CudaEvent, kRemembered> events_{};
  CudaEvent barrier_ = nullptr;
  CudaEvent started_ = nullptr;
  CudaEvent stopped_ = nullptr;
  bool timed_ = false;
  Ticket last_ = 0;
  Ticket reached_ = 0;
};

}  // namespace

std::unique_ptr<Link> make_cuda_link(int device) { return std::make_unique<CudaLink>(device); }

}  // namespace oled_jax
