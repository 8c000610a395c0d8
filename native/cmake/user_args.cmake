# Collects what the user passed for llama.cpp into user_args_text, a CMake argument a line:
# $ENV{CMAKE_ARGS} as it is, and GGML_* / LLAMA_* settings that came in another way
# (pip's -C cmake.define.GGML_CUDA=ON). flashmoe's own options stay here.
# Text, because CMake's list functions take an argument apart that is a list itself:
# -DCMAKE_CUDA_ARCHITECTURES=86;90
#
# The build folder outlives this run: the collected settings are removed from this
# project's cache, so that one which is not passed next time does not stay.

set(user_args_text "")
separate_arguments(given UNIX_COMMAND "$ENV{CMAKE_ARGS}")
foreach(arg IN LISTS given)
  if(NOT arg MATCHES "^-DFLASHMOE_")
    string(APPEND user_args_text "${arg}\n")
  endif()
endforeach()

get_cmake_property(cache_names CACHE_VARIABLES)
foreach(name IN LISTS cache_names)
  if(name MATCHES "^(GGML|LLAMA)_")
    if(NOT "$ENV{CMAKE_ARGS}" MATCHES "-D ?${name}[:=]")
      string(APPEND user_args_text "-D${name}=${${name}}\n")
    endif()
    unset(${name} CACHE)
  endif()
endforeach()
