# Defines the target torch_stable_abi: torch's headers and the libraries that hold its stable ABI.
#
# find_package(Torch) is not used: it brings compiler flags, CUDA and protobuf along, of which a library
# against the stable ABI needs nothing.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

# Without importing torch, which takes seconds.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
          "import importlib.metadata, importlib.util
spec = importlib.util.find_spec('torch')
print(spec.submodule_search_locations[0] if spec else '', importlib.metadata.version('torch') if spec else '', sep=';')"
  OUTPUT_VARIABLE torch_found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET torch_found 0 torch_dir)
list(GET torch_found 1 torch_version)
if(NOT torch_dir)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: install it, or set Python_EXECUTABLE to one that has it.")
endif()
string(REGEX REPLACE "\\+.*" "" torch_version "${torch_version}")  # 2.11.0+cpu
if(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "torch 2.11 or newer is needed; ${torch_dir} is ${torch_version}.")
endif()
message(STATUS "torch ${torch_version}: ${torch_dir}")

add_library(torch_stable_abi INTERFACE)
target_include_directories(torch_stable_abi SYSTEM INTERFACE ${torch_dir}/include)
# The ABI of torch 2.11, whichever version the headers are of: the library then loads in every later torch.
target_compile_definitions(torch_stable_abi INTERFACE TORCH_TARGET_VERSION=0x020b000000000000ULL)
target_link_options(torch_stable_abi INTERFACE -Wl,--as-needed)
target_link_libraries(torch_stable_abi INTERFACE ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so)
