// In place of the header that cmake/cuda.cmake writes: the buckets that emulated attention is compiled for.
#pragma once
#define FLASH_DMATTN_HEAD_DIMS 64, 128, 192
