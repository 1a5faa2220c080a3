// In place of the header that cmake/cuda.cmake writes: all head dims.
#define FLASH_DMATTN_HEAD_DIMS 32, 64, 96, 128, 192, 256
