# CMake ignores a changed CC or CXX once a build folder is configured; here that is an error
# instead of a surprise. To be included before project(), which sets both itself.
foreach(variable CC CXX)
  if(DEFINED FLASHMOE_SEEN_${variable} AND NOT "${FLASHMOE_SEEN_${variable}}" STREQUAL "$ENV{${variable}}")
    message(FATAL_ERROR
      "${variable} was '${FLASHMOE_SEEN_${variable}}' when this build folder was configured and is "
      "'$ENV{${variable}}' now: remove ${CMAKE_BINARY_DIR}/CMakeCache.txt and build again")
  endif()
  set(FLASHMOE_SEEN_${variable} "$ENV{${variable}}" CACHE INTERNAL "")
endforeach()
