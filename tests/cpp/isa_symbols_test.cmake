# Fails if a file of src/cpu/isa other than the baseline defines a weak function.
#
# Inline functions and templates with external linkage are weak: the linker keeps one copy of those that several
# files define. If it kept the one compiled for AVX-512, processors without it would die in, say, std::vector.

cmake_minimum_required(VERSION 3.25)
foreach(object IN LISTS OBJECTS)
  if(object MATCHES "baseline\\.cpp")
    continue()
  endif()
  execute_process(COMMAND ${NM} --demangle --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [Wi] [^\n]*" weak "${symbols}")
  if(weak)
    list(JOIN weak "\n  " weak)
    message(SEND_ERROR "${object} defines functions that the linker may share:\n  ${weak}")
  endif()
endforeach()
