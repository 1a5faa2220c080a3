// What a shared library shows: the namespace of the public headers is declared with FLASH_DMATTN_API, everything else
// is compiled as hidden.
#pragma once

#if defined(__GNUC__) && !defined(__CUDACC__)  // no public function is defined in CUDA code
#define FLASH_DMATTN_API [[gnu::visibility("default")]]
#else
#define FLASH_DMATTN_API
#endif
