# Collects what the user passed for llama.cpp into user_args, a list of CMake arguments:
# $ENV{CMAKE_ARGS} as it is, and GGML_* / LLAMA_* settings that came in another way
# (pip's -C cmake.define.GGML_CUDA=ON). flashmoe's own options stay here.
#
# The build folder outlives this run: the collected settings are removed from this
# project's cache, so that one which is not passed next time does not stay.

separate_arguments(user_args UNIX_COMMAND "$ENV{CMAKE_ARGS}")
list(FILTER user_args EXCLUDE REGEX "^-DFLASHMOE_")

get_cmake_property(cache_names CACHE_VARIABLES)
foreach(name IN LISTS cache_names)
  if(name MATCHES "^(GGML|LLAMA)_")
    set(arg "-D${name}=${${name}}")
    if(NOT "$ENV{CMAKE_ARGS}" MATCHES "-D ?${name}[:=]")
      list(APPEND user_args "${arg}")
    endif()
    unset(${name} CACHE)
  endif()
endforeach()
