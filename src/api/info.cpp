#include "flash_dmattn/info.h"

namespace flash_dmattn {

const char* version() { return FLASH_DMATTN_VERSION; }

}  // namespace flash_dmattn
