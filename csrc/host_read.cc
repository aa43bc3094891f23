#include "host_read.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

namespace oled_jax {
namespace {

typedef uint64_t Lanes __attribute__((vector_size(16)));
constexpr size_t kStreams = 4;
constexpr size_t kStream = 32 * 1024;
constexpr size_t kBlock = kStreams * kStream;

// Four streams at once: one alone leaves a third of the rate unused.
uint64_t read_all(const std::byte* data, size_t size) {
  Lanes sum0 = {}, sum1 = {}, sum2 = {}, sum3 = {};
  const auto load = [](const std::byte* p) {
    Lanes lanes;
    std::memcpy(&lanes, p, sizeof(lanes));
    return lanes;
  };
  for (; size >= kBlock; data += kBlock, size -= kBlock) {
    for (const std::byte* p = data; p < data + kStream; p += sizeof(Lanes)) {
      sum0 ^= load(p);
      sum1 ^= load(p + kStream);
      sum2 ^= load(p + 2 * kStream);
      sum3 ^= load(p + 3 * kStream);
    }
  }
  const Lanes all = sum0 ^ sum1 ^ sum2 ^ sum3;
  return all[0] ^ all[1];
}

}  // namespace

double host_read_gbs(const std::byte* data, size_t size, int threads, double seconds) {
  if (threads < 1 || size < kBlock * threads) {
    throw std::invalid_argument("reading needs a thread, and 128 kB for each");
  }
  using Clock = std::chrono::steady_clock;
  std::atomic<uint64_t> result{0};  // keeps the reads
  std::atomic<size_t> read{0};
  const size_t part = size / threads / kBlock * kBlock;
  const auto start = Clock::now();
  const auto until = start + std::chrono::duration<double>(seconds);
  std::vector<std::thread> readers;
  for (int i = 0; i < threads; ++i) {
    readers.emplace_back([&, from = data + i * part] {
      do {
        result ^= read_all(from, part);
        read += part;
      } while (Clock::now() < until);
    });
  }
  for (std::thread& reader : readers) reader.join();
  return read / std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

}  // namespace oled_jax
