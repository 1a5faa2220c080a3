# Compiles what the documentation shows as users would, with every warning an error: the C++ blocks of README.md and docs/, and
# examples/cpp. A block without main() is the inside of one; its sizes and arrays are declared below. Blocks with main() are
# linked and run, too.

cmake_minimum_required(VERSION 3.25)
set(work ${BUILD_DIR}/readme_test)
file(REMOVE_RECURSE ${work})

set(programs "")
set(sources "")
file(GLOB pages ${SOURCE_DIR}/README.md ${SOURCE_DIR}/docs/*.md)
foreach(page IN LISTS pages)
  cmake_path(GET page STEM name)
  file(READ ${page} rest)
  # A list of CMake's would be cut at semicolons, and brackets would join its elements: blocks are found one by one.
  set(number 0)
  while(TRUE)
    string(FIND "${rest}" "```cpp\n" begin)
    if(begin EQUAL -1)
      break()
    endif()
    math(EXPR begin "${begin} + 7")
    string(SUBSTRING "${rest}" ${begin} -1 rest)
    string(FIND "${rest}" "```" end)
    string(SUBSTRING "${rest}" 0 ${end} block)
    math(EXPR end "${end} + 3")
    string(SUBSTRING "${rest}" ${end} -1 rest)
    math(EXPR number "${number} + 1")
    set(source ${work}/${name}_${number}.cpp)
    if(block MATCHES "int main\\(")
      file(WRITE ${source} "${block}")
      list(APPEND programs ${source})
    else()
      # What stands in front of the first statement stays outside of the function.
      string(REGEX MATCH "^.*using namespace [^\n]*\n" preamble "${block}")
      string(LENGTH "${preamble}" length)
      string(SUBSTRING "${block}" ${length} -1 statements)
      if(preamble STREQUAL "" OR NOT statements MATCHES "attention_forward")
        message(FATAL_ERROR "Block ${number} of ${page} has another form than this test knows.")
      endif()
      file(WRITE ${source} "${preamble}
int main() {
  constexpr int B = 1, S = 4, H = 2, Hkv = 1, D = 8;
  static const float query[B * S * H * D] = {}, key[B * S * Hkv * D] = {}, value[B * S * Hkv * D] = {};
  static const bool mask[B * S] = {true};
  static float out[B * S * H * D], lse[B * H * S];
${statements}  return status.ok() ? 0 : 1;
}
")
    endif()
    list(APPEND sources ${source})
  endwhile()
  set(blocks_of_${name} ${number})
endforeach()
if(NOT blocks_of_README OR NOT blocks_of_cpp OR NOT programs)
  message(FATAL_ERROR "README.md or docs/cpp.md has no C++ block.")
endif()

foreach(compiler IN ITEMS g++ clang++)
  find_program(path NAMES ${compiler} NO_CACHE)
  if(NOT path)
    message(STATUS "There is no ${compiler}.")
    continue()
  endif()
  foreach(source IN ITEMS ${sources} ${SOURCE_DIR}/examples/cpp/attention.cpp)
    foreach(level IN ITEMS -O0 -O2)
      execute_process(
        COMMAND ${path} -std=c++20 -Wall -Wextra -Werror ${level} -I ${SOURCE_DIR}/include -c ${source} -o ${work}/object.o
        COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
    endforeach()
  endforeach()
  set(tried TRUE)
  unset(path)
endforeach()
if(NOT tried)
  message(FATAL_ERROR "Neither g++ nor clang++ was found.")
endif()

# By the compiler and with the sanitizers of the library, which they link.
if(LIBRARY)
  set(flags -std=c++20 -I ${SOURCE_DIR}/include)
  if(SANITIZE)
    list(APPEND flags -fsanitize=${SANITIZE})
  endif()
  foreach(source IN LISTS programs)
    execute_process(COMMAND ${CXX_COMPILER} ${flags} ${source} ${LIBRARY} -pthread -o ${work}/program
                    COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND ${work}/program COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
endif()
