# Sets have_cuda. If it is on, defines cuda_sources, the objects of all kernels (cuda_kernel_objects) and the function
# flash_dmattn_use_cuda(target); otherwise cuda_sources is what stands in for the backend.
#
#   FLASH_DMATTN_CUDA                ON, OFF or AUTO
#   CMAKE_CUDA_ARCHITECTURES         as in any CMake project; default: machine code for the GPUs found here, or for
#                                    compute capability 9.0 if there is none, and PTX of 8.0 for all others
#   CMAKE_CUDA_COMPILER_LAUNCHER     ccache, for example
#   FLASH_DMATTN_HEAD_DIMS           the head dims that attention is compiled for, in increasing order; a head in between is
#                                    computed by the next larger one. One alone builds in a minute
#   FLASH_DMATTN_FORBID_SPILLS       ON: a kernel that keeps registers in memory does not compile

set(least_cuda 12.0)  # whose compiler knows C++20
set(least_cmake_for_cuda 3.25.2)  # which knows that it does

set(have_cuda OFF)
if(FLASH_DMATTN_CUDA STREQUAL AUTO)
  if(NOT CMAKE_CROSSCOMPILING)
    include(CheckLanguage)
    check_language(CUDA)
    set(have_cuda ${CMAKE_CUDA_COMPILER})
  endif()
elseif(FLASH_DMATTN_CUDA)
  set(have_cuda ON)
endif()

# Machine code for the GPUs of this machine that have kernels; PTX, which every later driver compiles, for the rest.
function(flash_dmattn_default_architectures result)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE status)
  set(architectures "")
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" found "${output}")
    list(REMOVE_DUPLICATES found)
    foreach(capability IN LISTS found)
      if(capability VERSION_GREATER_EQUAL 8.0)
        string(REPLACE "." "" capability ${capability})
        list(APPEND architectures ${capability}-real)
      endif()
    endforeach()
  endif()
  if(NOT architectures)
    set(architectures 90-real)
  endif()
  set(${result} ${architectures} 80-virtual PARENT_SCOPE)
endfunction()

if(have_cuda)
  if(CMAKE_VERSION VERSION_LESS least_cmake_for_cuda)
    message(FATAL_ERROR "CMake ${least_cmake_for_cuda} or newer is needed for CUDA; this is ${CMAKE_VERSION}. "
                        "`pip install cmake` has one; FLASH_DMATTN_CUDA=OFF builds without CUDA.")
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    flash_dmattn_default_architectures(architectures)
    set(CMAKE_CUDA_ARCHITECTURES ${architectures} CACHE STRING "GPUs to compile for")
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS least_cuda)
    message(FATAL_ERROR "CUDA ${least_cuda} or newer is needed; ${CMAKE_CUDA_COMPILER} is "
                        "${CMAKE_CUDA_COMPILER_VERSION}. Set CMAKE_CUDA_COMPILER, or FLASH_DMATTN_CUDA=OFF for none.")
  endif()
  find_package(CUDAToolkit REQUIRED)
  message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}; the kernels take ten minutes and "
                 "more on two cores (FLASH_DMATTN_CUDA=OFF: none)")
else()
  if(FLASH_DMATTN_CUDA STREQUAL AUTO AND NOT CMAKE_CROSSCOMPILING)
    set(reason "no CUDA compiler was found (CUDACXX names one)")
  else()
    set(reason "FLASH_DMATTN_CUDA is ${FLASH_DMATTN_CUDA}")
  endif()
  message(STATUS "CUDA: not built, ${reason}")
  set(cuda_sources src/cuda/absent.cpp)
  set(cuda_kernel_objects "")
  return()
endif()

set(all_head_dims 32 64 96 128 192 256)  # as src/cuda/attention/head_dims.h says
set(FLASH_DMATTN_HEAD_DIMS ${all_head_dims} CACHE STRING "Head dims to compile CUDA kernels for")
# Others than these are in a header of the build folder. Without it what is compiled does not depend on the folder, and
# ccache knows the kernels that a build in another one has compiled.
if(NOT FLASH_DMATTN_HEAD_DIMS STREQUAL all_head_dims)
  list(JOIN FLASH_DMATTN_HEAD_DIMS ", " head_dims)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/head_dim_buckets.h @ONLY CONTENT
       "// FLASH_DMATTN_HEAD_DIMS, for src/cuda/attention/head_dims.h.\n#define FLASH_DMATTN_HEAD_DIMS @head_dims@\n")
  include_directories(${PROJECT_BINARY_DIR}/generated)
  add_compile_definitions(FLASH_DMATTN_HAS_HEAD_DIMS)
endif()

option(FLASH_DMATTN_FORBID_SPILLS "Refuse kernels that keep registers in memory" OFF)

function(flash_dmattn_use_cuda target)
  # The runtime is linked statically and finds the driver when it is first used: the library loads without a GPU.
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
                                             CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  if(FLASH_DMATTN_FORBID_SPILLS)
    target_compile_options(${target} PRIVATE
        $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error>)
  endif()
  # A third of the size, at no cost but a moment when a kernel is first loaded. Drivers older than CUDA 12.4's could not
  # read it; code of CUDA 13's compiler needs later ones anyway.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  # Warnings that mean nothing here: annotations of defaulted functions, which the compiler adds by itself (20012), and
  # loops over pieces that small tiles have none of (128).
  target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --expt-extended-lambda --diag-suppress=20012,128>)
endfunction()

function(add_cuda_kernels name source)
  add_library(${name} OBJECT ${source})
  flash_dmattn_use_cuda(${name})
  target_include_directories(${name} PRIVATE src include)
  target_compile_definitions(${name} PRIVATE ${ARGN})
  list(APPEND cuda_kernel_objects $<TARGET_OBJECTS:${name}>)
  set(cuda_kernel_objects ${cuda_kernel_objects} PARENT_SCOPE)
endfunction()

# The buckets of values that a bucket of head dims has kernels for: as wide, and the narrower one that
# narrow_value_bucket names (src/cuda/attention/head_dims.h).
function(value_dims_of head_dim result)
  set(value_dims ${head_dim})
  if(head_dim EQUAL 192)
    list(APPEND value_dims 128)
  endif()
  set(${result} ${value_dims} PARENT_SCOPE)
endfunction()
# The two in the name of a target.
function(bucket_name head_dim value_dim result)
  if(value_dim EQUAL head_dim)
    set(${result} ${head_dim} PARENT_SCOPE)
  else()
    set(${result} ${head_dim}_${value_dim} PARENT_SCOPE)
  endif()
endfunction()

# Attention: one file, compiled once for every launcher, element type and pair of buckets, of keys and of values. Large
# buckets take longest: they come first, so that the build does not end on one of them.
set(largest_first ${FLASH_DMATTN_HEAD_DIMS})
list(REVERSE largest_first)
foreach(head_dim IN LISTS largest_first)
  foreach(element IN ITEMS bfloat16:__nv_bfloat16 float16:__half)
    value_dims_of(${head_dim} value_dims)
    foreach(direction IN ITEMS backward:BackwardParams query_backward:BackwardParams forward:ForwardParams)
      string(REGEX MATCH "(.+):(.+)" _ ${direction})
      set(launcher ${CMAKE_MATCH_1})
      set(params ${CMAKE_MATCH_2})
      string(REGEX MATCH "(.+):(.+)" _ ${element})
      foreach(value_dim IN LISTS value_dims)
        bucket_name(${head_dim} ${value_dim} buckets)
        add_cuda_kernels(cuda_${launcher}_${CMAKE_MATCH_1}_${buckets} src/cuda/sm80/instance.cu
                         FLASH_DMATTN_LAUNCHER=launch_${launcher} FLASH_DMATTN_PARAMS=${params}
                         FLASH_DMATTN_ELEMENT=${CMAKE_MATCH_2} FLASH_DMATTN_HEAD_DIM=${head_dim}
                         FLASH_DMATTN_VALUE_DIM=${value_dim})
      endforeach()
    endforeach()
  endforeach()
endforeach()
foreach(source IN ITEMS attention/gradient_passes attention/key_works attention/row_facts clear decode/decode_bfloat16 decode/decode_float16
                        launch_blocks plan/device_mask_intervals plan/make_plan plan/pack_indices plan/pack_mask
                        selection/append_kept_keys selection/device_selection sm80/query_gradients)
  get_filename_component(name ${source} NAME)
  add_cuda_kernels(cuda_${name} src/cuda/${source}.cu)
endforeach()
set(cuda_sources
    src/cuda/attention/backward_call.cpp
    src/cuda/attention/backward_scratch.cpp
    src/cuda/attention/call.cpp
    src/cuda/attention/key_tile_order.cpp
    src/cuda/backend.cpp
    src/cuda/backend_table.cpp
    src/cuda/decode/decode.cpp
    src/cuda/decode/family.cpp
    src/cuda/device_kernels.cpp
    src/cuda/kernel_family.cpp
    src/cuda/plan/prepared_visibility.cpp
    src/cuda/reports.cpp
    src/cuda/sm80/family.cpp)
# The kernels of Hopper alone: its own instructions need an architecture of their own.
if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)(90|all)")
  set_property(SOURCE src/cuda/device_kernels.cpp src/cuda/kernel_family.cpp
               APPEND PROPERTY COMPILE_DEFINITIONS FLASH_DMATTN_SM90)
  foreach(head_dim IN LISTS largest_first)
    if(head_dim LESS 64)
      continue() # as takes_forward and takes_backward decline (src/cuda/sm90/family.cpp)
    endif()
    value_dims_of(${head_dim} value_dims)
    foreach(element IN ITEMS bfloat16:__nv_bfloat16 float16:__half)
      string(REGEX MATCH "(.+):(.+)" _ ${element})
      set(element_name ${CMAKE_MATCH_1})
      set(element_type ${CMAKE_MATCH_2})
      foreach(value_dim IN LISTS value_dims)
        bucket_name(${head_dim} ${value_dim} buckets)
        foreach(direction IN ITEMS forward backward)
          set(name cuda_sm90_${direction}_${element_name}_${buckets})
          add_cuda_kernels(${name} src/cuda/sm90/${direction}_instance.cu FLASH_DMATTN_ELEMENT=${element_type}
                           FLASH_DMATTN_HEAD_DIM=${head_dim} FLASH_DMATTN_VALUE_DIM=${value_dim})
          set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES 90a-real)
        endforeach()
      endforeach()
    endforeach()
  endforeach()
  add_cuda_kernels(cuda_sm90_query_gradients src/cuda/sm90/query_gradients.cu)
  list(APPEND cuda_sources src/cuda/sm90/family.cpp src/cuda/sm90/tensor_map.cpp)
endif()
string(REPLACE ";" " " architectures "${CMAKE_CUDA_ARCHITECTURES}")
set_property(SOURCE src/cuda/device_kernels.cpp APPEND PROPERTY COMPILE_DEFINITIONS
             "FLASH_DMATTN_CUDA_ARCHITECTURES=\"${architectures}\"")
