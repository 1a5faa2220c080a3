"""Conan recipe of the C++ library, without CUDA: `make check-conan` creates and tries the package (docs/cpp.md)."""

import re
from pathlib import Path

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir

_ROOT = Path(__file__).resolve().parent.parent.parent


class FlashDmattn(ConanFile):
    name = "flash_dmattn"
    description = "Attention with dynamic masks, biases and their gradients"
    license = "BSD-3-Clause"
    topics = ("attention", "sparse-attention", "transformers")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    # highway_include_dir: the folder that holds hwy/, where the compiler does not find Highway's headers by itself.
    # They are needed to build the library, by none that uses it, and so are no requirement.
    options = {  # noqa: RUF012  # as Conan reads it
        "shared": [True, False],
        "fPIC": [True, False],
        "highway_include_dir": [None, "ANY"],
    }
    default_options = {"shared": False, "fPIC": True, "highway_include_dir": None}  # noqa: RUF012
    implements = ("auto_shared_fpic",)

    def set_version(self) -> None:
        lists = load(self, str(_ROOT / "CMakeLists.txt"))
        self.version = self.version or re.search(r"^project\(flash_dmattn VERSION ([0-9.]+)", lists, re.MULTILINE)[1]

    def export_sources(self) -> None:
        for pattern in ("CMakeLists.txt", "LICENSE", "README.md", "CHANGELOG.md", "cmake/*", "include/*", "src/*"):
            copy(self, pattern, src=_ROOT, dst=self.export_sources_folder)

    def validate(self) -> None:
        check_min_cppstd(self, 20)

    def layout(self) -> None:
        cmake_layout(self)

    def package_id(self) -> None:
        del self.info.options.highway_include_dir

    def generate(self) -> None:
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["FLASH_DMATTN_CUDA"] = "OFF"
        toolchain.cache_variables["FLASH_DMATTN_SHARED"] = bool(self.options.shared)
        toolchain.cache_variables["FLASH_DMATTN_TESTS"] = False
        if self.options.highway_include_dir:
            toolchain.cache_variables["FLASH_DMATTN_HIGHWAY_INCLUDE_DIR"] = str(self.options.highway_include_dir)
        toolchain.generate()

    def build(self) -> None:
        cmake = CMake(self)
        cmake.configure()
        cmake.build(target="flash_dmattn")

    def package(self) -> None:
        copy(self, "LICENSE", src=self.source_folder, dst=Path(self.package_folder) / "licenses")
        CMake(self).install(component="cpp")
        # Conan writes what CMake and pkg-config read.
        for folder in ("lib/cmake", "lib/pkgconfig", "share"):
            rmdir(self, str(Path(self.package_folder) / folder))

    def package_info(self) -> None:
        self.cpp_info.libs = ["flash_dmattn"]
        self.cpp_info.system_libs = ["pthread", "m"]
        self.cpp_info.set_property("cmake_file_name", "flash_dmattn")
        self.cpp_info.set_property("cmake_target_name", "flash_dmattn::flash_dmattn")
        self.cpp_info.set_property("pkg_config_name", "flash_dmattn")
