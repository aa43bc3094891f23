#include "ffn_kernel.h"

#include <stdexcept>

namespace oled_jax {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
  const FfnKernel& (*kernel)(WeightFormat);
};

// In order of speed. A level's instructions beyond those asked for here came with the same
// processors: every one with AVX2 and FMA converts float16.
const Level kLevels[] = {
    {"portable", [] { return true; }, portable_kernel},
#if defined(__x86_64__) && !defined(OLED_JAX_ONLY_PORTABLE)
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); },
     avx2_kernel},
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     },
     avx512_kernel},
    {"avx512bf16",
     [] { return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16"); },
     avx512bf16_kernel},
#endif
};

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (const Level& level : kLevels) {
    if (level.supported()) names.push_back(level.name);
  }
  return names;
}

const FfnKernel& find_kernel(const std::string& isa, WeightFormat format) {
  for (const Level& level : kLevels) {
    if (isa == level.name && level.supported()) return level.kernel(format);
  }
  std::string known;
  for (const std::string& name : isa_levels()) known += (known.empty() ? "" : ", ") + name;
  throw std::invalid_argument("instruction set level '" + isa +
                              "' is not one of this machine's: " + known);
}

}  // namespace oled_jax
