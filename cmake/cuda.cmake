# Sets cuda_sources: the CUDA backend, or what stands in for it. Defines flash_dmattn_use_cuda(target).
#
#   FLASH_DMATTN_CUDA                ON, OFF or AUTO
#   CMAKE_CUDA_ARCHITECTURES         as in any CMake project; default: machine code for the GPUs found here, or for data
#                                    centre GPUs if there is none, and PTX of compute_80 for all others
#   CMAKE_CUDA_COMPILER_LAUNCHER     ccache, for example

set(have_cuda OFF)
if(FLASH_DMATTN_CUDA STREQUAL AUTO)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER AND NOT CMAKE_CROSSCOMPILING)
    set(have_cuda ON)
  endif()
elseif(FLASH_DMATTN_CUDA)
  set(have_cuda ON)
endif()

if(have_cuda)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # Machine code for the GPUs of this machine, if any; PTX, which every later driver compiles, for the rest.
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE found_gpus ERROR_QUIET RESULT_VARIABLE gpu_query)
    if(gpu_query EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]+" found_gpus "${found_gpus}")
      list(REMOVE_DUPLICATES found_gpus)
      list(TRANSFORM found_gpus REPLACE "\\." "")
      list(TRANSFORM found_gpus APPEND -real)
    else()
      set(found_gpus 90-real)
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${found_gpus} 80-virtual CACHE STRING "GPUs to compile for")
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  message(STATUS "CUDA ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
  set(cuda_sources
      src/cuda/backend.cpp
      src/cuda/plan/make_plan.cu
      src/cuda/plan/pack_mask.cu
      src/cuda/portable/gradient_passes.cu
      src/cuda/selection/select_keys.cu)
  foreach(element IN ITEMS __nv_bfloat16 __half)
    foreach(head_dim IN ITEMS 32 64 96 128 192 256)
      foreach(direction IN ITEMS forward backward)
        set(params ForwardParams)
        if(direction STREQUAL backward)
          set(params BackwardParams)
        endif()
        set(instance ${CMAKE_CURRENT_BINARY_DIR}/cuda/${direction}_${element}_${head_dim}.cu)
        configure_file(src/cuda/portable/instances.cu.in ${instance} @ONLY)
        list(APPEND cuda_sources ${instance})
      endforeach()
    endforeach()
  endforeach()
  # The slowest first, so that the build does not end on one of them.
  list(REVERSE cuda_sources)
else()
  message(STATUS "CUDA: not built")
  set(cuda_sources src/cuda/absent.cpp)
endif()

function(flash_dmattn_use_cuda target)
  if(NOT have_cuda)
    return()
  endif()
  # The runtime is linked statically and finds the driver when it is first used: the library loads without a GPU.
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
                                             CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --expt-extended-lambda -Xcudafe=--diag_suppress=20012>)
endfunction()
