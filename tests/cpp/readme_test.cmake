# Compiles what the documentation shows as users would, with every warning an error: the C++ snippet of README.md, put
# into a function, and examples/cpp.

cmake_minimum_required(VERSION 3.25)
set(work ${BUILD_DIR}/readme_test)
file(REMOVE_RECURSE ${work})

file(READ ${SOURCE_DIR}/README.md readme)
if(NOT readme MATCHES "```cpp\n([^`]*)```")
  message(FATAL_ERROR "README.md has no C++ snippet.")
endif()
set(snippet "${CMAKE_MATCH_1}")
# What stands in front of the first statement stays outside of the function.
string(REGEX MATCH "^.*using namespace [^\n]*\n" preamble "${snippet}")
string(LENGTH "${preamble}" length)
string(SUBSTRING "${snippet}" ${length} -1 statements)
if(preamble STREQUAL "" OR NOT statements MATCHES "attention_forward")
  message(FATAL_ERROR "README.md's C++ snippet has another form than this test knows.")
endif()
file(WRITE ${work}/snippet.cpp "${preamble}
int main() {
  constexpr int B = 1, S = 4, H = 2, Hkv = 1, D = 8;
  static const float query[B * S * H * D] = {}, key[B * S * Hkv * D] = {}, value[B * S * Hkv * D] = {};
  static const bool mask[B * S] = {true};
  static float out[B * S * H * D], lse[B * H * S];
${statements}  return status.ok() ? 0 : 1;
}
")

foreach(compiler IN ITEMS g++ clang++)
  find_program(path NAMES ${compiler} NO_CACHE)
  if(NOT path)
    message(STATUS "There is no ${compiler}.")
    continue()
  endif()
  foreach(source IN ITEMS ${work}/snippet.cpp ${SOURCE_DIR}/examples/cpp/attention.cpp)
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
