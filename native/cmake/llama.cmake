# The target llama_libraries: both sets of llama.cpp's libraries, made by
# build/llama_libraries.py. It runs in every build and returns at once when nothing
# changed. Sets llama_work, llama_include_dirs and llama_patched_libraries.

find_package(Python REQUIRED COMPONENTS Interpreter)
set(llama_work "${CMAKE_BINARY_DIR}/llama")

file(WRITE "${CMAKE_BINARY_DIR}/llama-args.txt" "${user_args_text}")

set(llama_include_dirs
  "${llama_work}/source/include"
  "${llama_work}/source/ggml/include"
  "${llama_work}/source/ggml/src"
  "${llama_work}/source/vendor/hash/xxhash")
set(llama_patched_libraries)
foreach(name llama ggml ggml-cpu ggml-base)
  list(APPEND llama_patched_libraries
    "${llama_work}/patched/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
endforeach()

add_custom_target(llama_libraries
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/build/llama_libraries.py"
    --work "${llama_work}"
    --pin "${CMAKE_CURRENT_SOURCE_DIR}/pin.txt"
    --patches "${CMAKE_CURRENT_SOURCE_DIR}/../patches"
    --cmake "${CMAKE_COMMAND}"
    --generator "${CMAKE_GENERATOR}"
    --make-program "${CMAKE_MAKE_PROGRAM}"
    --compilers "${CMAKE_C_COMPILER}" "${CMAKE_CXX_COMPILER}"
    --compiler-ids
      "${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}"
      "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
    --build-type "${CMAKE_BUILD_TYPE}"
    --args-file "${CMAKE_BINARY_DIR}/llama-args.txt"
  # what the tests hold the list of supported architectures against
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/build/moe_archs.py"
    "${llama_work}/source" "${llama_work}/moe_architectures.json"
  BYPRODUCTS ${llama_patched_libraries}
  USES_TERMINAL
  VERBATIM)
