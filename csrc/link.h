// A link between host and device memory: what the pager needs of a platform, and no more.
//
// Small messages (routes, plans, the CPU's share) travel on XLA's own stream. Pages travel on a
// stream of the link's own, first in, first out, which XLA's stream waits for only where it must.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace oled_jax {

// XLA's stream of the running program; null where the platform has none.
using Stream = void*;

// Names a moment in the order of page copies. Tickets grow.
using Ticket = uint64_t;

class Link {
 public:
  virtual ~Link() = default;

  // Makes the calling thread able to use the link. Called before anything else by each thread.
  virtual void enter() = 0;

  // Host memory that the device reads and writes directly.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;

  virtual void to_host(Stream stream, void* target, const void* source, size_t bytes) = 0;
  virtual void to_device(Stream stream, void* target, const void* source, size_t bytes) = 0;
  virtual void clear(Stream stream, void* target, size_t bytes) = 0;
  // Waits on the host until all that was put on the stream is done.
  virtual void synchronize(Stream stream) = 0;
  // Whether what was put on a stream runs while the host does something else.
  virtual bool runs_beside_the_host() const = 0;

  // Copies one array of a page. In order with all other pages.
  virtual void move(void* target, const void* source, size_t bytes) = 0;
  // The moment after all pages moved so far.
  virtual Ticket mark() = 0;
  virtual bool reached(Ticket ticket) = 0;
  // The stream goes on when the ticket is reached; the host does not wait.
  virtual void await(Stream stream, Ticket ticket) = 0;
  // Later pages move when all that was put on the stream so far is done.
  virtual void move_after(Stream stream) = 0;
  // Between these two calls lie the page copies that `timed_us` measures.
  virtual void start_timing() = 0;
  virtual void stop_timing() = 0;
  // Microseconds of the last timed copies, -1 if there were none since the last call.
  virtual double timed_us() = 0;
  // Waits on the host until every page has arrived.
  virtual void drain() = 0;
};

// Copies by the CPU: for machines without a GPU, and for tests.
std::unique_ptr<Link> make_host_link();

// One CUDA device, by the driver's entry points. Throws std::runtime_error without a driver.
std::unique_ptr<Link> make_cuda_link(int device);

}  // namespace oled_jax
