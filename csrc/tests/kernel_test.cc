// Every instruction set level on odd sizes, with memory that must not be touched on either side of
// every array. Built with the address and undefined behaviour sanitizers.

#include <sys/mman.h>
#include <unistd.h>

#include "expert_case.h"

namespace oled_jax {
namespace {

// A copy of bytes between two pages of memory that nobody may touch, close to one of them.
class Guarded {
 public:
  Guarded(const void* bytes, size_t size, bool at_end) {
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t middle = (size + page - 1) / page * page;
    total_ = middle + 2 * page;
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    require(memory_ != MAP_FAILED, "mmap");
    require(mprotect(memory_ + page, middle, PROT_READ | PROT_WRITE) == 0, "mprotect");
    data_ = memory_ + page + (at_end ? middle - size : 0);
    if (bytes != nullptr) std::memcpy(data_, bytes, size);
  }
  ~Guarded() { munmap(memory_, total_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte *memory_, *data_;
  size_t total_;
};

void run(const ExpertCase& one, bool at_end) {
  const Guarded gate_up(one.gate_up.stored.data(), one.gate_up.stored.size(), at_end);
  const Guarded down(one.down.stored.data(), one.down.stored.size(), at_end);
  const Guarded hidden(one.hidden.stored.data(), one.hidden.stored.size(), at_end);
  const size_t output_bytes = one.tokens * one.D * sizeof(float);
  const Guarded first(nullptr, output_bytes, at_end), second(nullptr, output_bytes, at_end);
  auto* const outputs = reinterpret_cast<float*>(first.data());
  auto* const again = reinterpret_cast<float*>(second.data());
  for (const std::string& isa : isa_levels()) {
    const std::string where = isa + ", format " + std::to_string(static_cast<int>(one.format)) +
                              ", D " + std::to_string(one.D) + ", F " + std::to_string(one.F) +
                              ", tokens " + std::to_string(one.tokens);
    CpuExperts alone(one.pages(gate_up.data(), down.data(), 1), 1, isa, {});
    alone.submit(one.share(0, hidden.data(), outputs));
    require(alone.collect(0).not_finite == -1, where + ": not finite");
    one.check(outputs, where);
    CpuExperts many(one.pages(gate_up.data(), down.data(), 1), 5, isa, {});
    many.submit(one.share(0, hidden.data(), again));
    many.collect(0);
    require(std::memcmp(outputs, again, output_bytes) == 0, where + ": threads change bits");
  }
}

}  // namespace
}  // namespace oled_jax

int main() {
  using namespace oled_jax;
  const int64_t sizes[][2] = {{1, 1}, {2, 3}, {13, 5}, {37, 16}, {64, 33}, {67, 70}, {1030, 50}};
  for (const auto format :
       {WeightFormat::kBfloat16, WeightFormat::kFloat16, WeightFormat::kFloat32}) {
    for (const auto& [D, F] : sizes) {
      for (const int64_t tokens : {1, 2, 3, 4, 5, 9, 22}) {
        if (D > 1000 && tokens != 5) continue;  // several chunks
        const ExpertCase one(format, 3, D, F, tokens);
        for (const bool at_end : {true, false}) run(one, at_end);
      }
    }
  }
  std::puts("passed");
}
