# Installs the build into a fresh prefix, then configures, builds and runs examples/cpp against it, by find_package and by
# pkg-config; looks at what a shared library would show; uninstalls. FetchContent is configured only.

cmake_minimum_required(VERSION 3.25)
set(work ${BUILD_DIR}/install_test)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(sanitize_flags "")
if(SANITIZE)
  set(sanitize_flags "-fsanitize=${SANITIZE}")
endif()
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/prefix --component cpp)
# Copied out of the tree, so that nothing of it can be found by accident.
file(COPY ${SOURCE_DIR}/examples/cpp DESTINATION ${work})
run(${CMAKE_COMMAND} -S ${work}/cpp -B ${work}/build -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_CXX_FLAGS=${sanitize_flags})
run(${CMAKE_COMMAND} --build ${work}/build)

execute_process(COMMAND ${work}/build/attention OUTPUT_VARIABLE output ECHO_OUTPUT_VARIABLE COMMAND_ERROR_IS_FATAL ANY)
if(NOT output MATCHES "flash_dmattn ${VERSION}")
  message(FATAL_ERROR "The example did not print the version ${VERSION}.")
endif()

foreach(file IN ITEMS LICENSE README.md CHANGELOG.md)
  file(GLOB_RECURSE found ${work}/prefix/*/${file})
  if(NOT found)
    message(FATAL_ERROR "${file} was not installed.")
  endif()
endforeach()

find_program(pkg_config pkg-config)
if(pkg_config)
  file(GLOB_RECURSE pc ${work}/prefix/flash_dmattn.pc)
  cmake_path(GET pc PARENT_PATH pc_dir)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} ${pkg_config} --cflags --libs flash_dmattn
                  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags)
  run(${CXX_COMPILER} -std=c++20 ${sanitize_flags} ${work}/cpp/attention.cpp ${flags} -o ${work}/by_pkg_config)
  run(${work}/by_pkg_config)
endif()

# A shared library of the same objects shows the public namespace and nothing of what is inside.
file(GLOB_RECURSE archive ${work}/prefix/libflash_dmattn.a)
if(NOT SANITIZE)
  run(${CXX_COMPILER} -shared -pthread -Wl,--whole-archive ${archive} -Wl,--no-whole-archive
      -o ${work}/libshared.so)
  execute_process(COMMAND ${NM} --dynamic --defined-only --demangle ${work}/libshared.so OUTPUT_VARIABLE symbols
                  COMMAND_ERROR_IS_FATAL ANY)
  foreach(name IN ITEMS attention_forward attention_backward select_keys append_kept_keys document_intervals plan_report
                        mask_intervals make_attention_plan version)
    if(NOT symbols MATCHES " T flash_dmattn::${name}\\(")
      message(FATAL_ERROR "A shared library does not show flash_dmattn::${name}.")
    endif()
  endforeach()
  string(REGEX MATCHALL "[^\n]* [TBD] flash_dmattn::internal[^\n]*" inside "${symbols}")
  if(inside)
    list(JOIN inside "\n  " inside)
    message(FATAL_ERROR "A shared library shows what is inside:\n  ${inside}")
  endif()
endif()

# As a part of another project, which gets its target and none of its tests.
file(WRITE ${work}/fetch/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
include(FetchContent)
FetchContent_Declare(flash_dmattn SOURCE_DIR ${SOURCE_DIR} EXCLUDE_FROM_ALL)
set(FLASH_DMATTN_CUDA OFF)
FetchContent_MakeAvailable(flash_dmattn)
add_executable(consumer ${SOURCE_DIR}/examples/cpp/attention.cpp)
target_link_libraries(consumer PRIVATE flash_dmattn::flash_dmattn)
if(TARGET attention_test OR TARGET uninstall)
  message(FATAL_ERROR \"flash_dmattn adds targets that are its own.\")
endif()
")
run(${CMAKE_COMMAND} -S ${work}/fetch -B ${work}/fetch/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})

run(${CMAKE_COMMAND} -D BUILD_DIR=${BUILD_DIR} -P ${SOURCE_DIR}/cmake/uninstall.cmake)
file(GLOB_RECURSE left LIST_DIRECTORIES false ${work}/prefix/*)
if(left)
  message(FATAL_ERROR "Left behind by uninstall: ${left}")
endif()
