# Installs the build into a fresh prefix, then configures, builds and runs examples/cpp against it.

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
