// In place of the CUDA toolkit's header of the same name.
#pragma once

#include "cuda.h"
#include "cuda_runtime_api.h"

using PFN_cuTensorMapEncodeTiled_v12000 = int (*)(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                                  void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                                                  const cuuint32_t* box, const cuuint32_t* steps,
                                                  CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                  CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);
