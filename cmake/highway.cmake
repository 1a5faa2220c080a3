# Sets highway_include_dir. Highway (libhwy-dev) is used header-only: nothing of its library is linked.

find_path(FLASH_DMATTN_HIGHWAY_INCLUDE_DIR hwy/highway.h)
if(NOT FLASH_DMATTN_HIGHWAY_INCLUDE_DIR)
  message(FATAL_ERROR "Highway's headers (hwy/highway.h) were not found: install libhwy-dev, or set "
                      "FLASH_DMATTN_HIGHWAY_INCLUDE_DIR to the folder that holds hwy/.")
endif()
set(highway_include_dir ${FLASH_DMATTN_HIGHWAY_INCLUDE_DIR})

if(CMAKE_CROSSCOMPILING)
  # The headers are the same for all processors, but their folder may hold this machine's C library too.
  set(highway_include_dir ${CMAKE_CURRENT_BINARY_DIR}/highway)
  file(MAKE_DIRECTORY ${highway_include_dir})
  file(CREATE_LINK ${FLASH_DMATTN_HIGHWAY_INCLUDE_DIR}/hwy ${highway_include_dir}/hwy SYMBOLIC)
endif()
