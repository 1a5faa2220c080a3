# Cross-compiles for 64-bit Arm Linux on Debian or Ubuntu (g++-aarch64-linux-gnu); `make check-neon` uses it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

# With qemu-user-static installed the tests run too.
find_program(FLASH_DMATTN_QEMU NAMES qemu-aarch64-static qemu-aarch64)
if(FLASH_DMATTN_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${FLASH_DMATTN_QEMU} -L /usr/aarch64-linux-gnu)
endif()
