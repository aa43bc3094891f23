// A link on a machine where "device" memory is host memory: every copy is done when it returns.

#include <cstdlib>
#include <cstring>
#include <new>

#include "link.h"

namespace oled_jax {
namespace {

constexpr size_t kAlignment = 64;

class HostLink final : public Link {
 public:
  void enter() override {}

  void* allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void release(void* memory) noexcept override { std::free(memory); }

  void to_host(Stream, void* target, const void* source, size_t bytes) override {
    std::memcpy(target, source, bytes);
  }
  void to_device(Stream, void* target, const void* source, size_t bytes) override {
    std::memcpy(target, source, bytes);
  }
  void clear(Stream, void* target, size_t bytes) override { std::memset(target, 0, bytes); }
  void synchronize(Stream) override {}
  bool runs_beside_the_host() const override { return false; }

  void move(void* target, const void* source, size_t bytes) override {
    std::memcpy(target, source, bytes);
  }
  Ticket mark() override { return ++last_; }
  bool reached(Ticket) override { return true; }
  void await(Stream, Ticket) override {}
  void move_after(Stream) override {}
  void start_timing() override {}
  void stop_timing() override {}
  double timed_us() override { return -1; }
  void drain() override {}

 private:
  Ticket last_ = 0;
};

}  // namespace

std::unique_ptr<Link> make_host_link() { return std::make_unique<HostLink>(); }

}  // namespace oled_jax
