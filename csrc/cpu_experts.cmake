# The CPU expert engine without its Python side: part of the extension and of csrc/tests.
set(CPU_EXPERTS_SOURCES cpu_experts.cc ffn_kernel.cc ffn_kernel_portable.cc thread_pool.cc)
# Sums are fused where the code says so, nowhere else: then equal work gives equal bits.
set(AVX2 -mavx2 -mfma -mf16c -ffp-contract=off)
# GCC 12 warns of uninitialised values inside its own AVX-512 intrinsics.
set(AVX512 ${AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -Wno-uninitialized -Wno-maybe-uninitialized)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND CPU_EXPERTS_SOURCES ffn_kernel_avx2.cc ffn_kernel_avx512.cc ffn_kernel_avx512bf16.cc)
endif()
list(TRANSFORM CPU_EXPERTS_SOURCES PREPEND "${CMAKE_CURRENT_LIST_DIR}/")
# Each level's file has the level's instructions; which one runs is decided at run time.
foreach(level portable avx2 avx512 avx512bf16)
  set(flags_portable -ffp-contract=fast)
  set(flags_avx2 ${AVX2})
  set(flags_avx512 ${AVX512})
  set(flags_avx512bf16 ${AVX512} -mavx512bf16)
  set_source_files_properties("${CMAKE_CURRENT_LIST_DIR}/ffn_kernel_${level}.cc"
    PROPERTIES COMPILE_OPTIONS "${flags_${level}}")
endforeach()
