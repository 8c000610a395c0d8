# Included by llama.cpp's own CMake run: libggml-cuda looks for CUDA's libraries where the toolkit
# that it is built with has them. CMAKE_INSTALL_RPATH_USE_LINK_PATH leaves that folder out, as nvcc
# searches it without being told; the loader does not, unless the system's settings name it.
function(flashmoe_add_toolkit_rpath)
  if(NOT TARGET ggml-cuda)
    return()
  endif()
  set(folders "")
  foreach(library IN ITEMS "${CUDA_CUDART}" "${CUDA_cublas_LIBRARY}") # FindCUDAToolkit's
    get_filename_component(folder "${library}" DIRECTORY)
    if(library AND NOT folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
      list(APPEND folders "${folder}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES folders)
  set_property(TARGET ggml-cuda APPEND PROPERTY INSTALL_RPATH ${folders})
endfunction()

if(CMAKE_CURRENT_SOURCE_DIR STREQUAL CMAKE_SOURCE_DIR)
  cmake_language(DEFER CALL flashmoe_add_toolkit_rpath) # when there are targets
endif()
