# Removes the C++ files that `cmake --install BUILD_DIR` has listed; cmake --build BUILD_DIR --target uninstall calls it.

cmake_minimum_required(VERSION 3.25)
# Not the list of the component python, which `make library` puts into the source tree.
file(GLOB manifests ${BUILD_DIR}/install_manifest.txt ${BUILD_DIR}/install_manifest_cpp.txt)
if(NOT manifests)
  message(FATAL_ERROR "Nothing was installed from ${BUILD_DIR}.")
endif()
foreach(manifest IN LISTS manifests)
  file(STRINGS ${manifest} files)
  foreach(file IN LISTS files)
    message(STATUS "Removing ${file}")
    file(REMOVE ${file})
  endforeach()
  file(REMOVE ${manifest})
endforeach()
