#include "flash_dmattn/tensor.h"

namespace flash_dmattn {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kBool:
      return "bool";
    case DType::kInt32:
      return "int32";
  }
  return "unknown";  // a value that is no enumerator: error messages must still be able to name it
}

}  // namespace flash_dmattn
