// The version of these headers, for the preprocessor; version() of info.h says that of the library that is linked.
#pragma once

#define FLASH_DMATTN_VERSION_MAJOR 2
#define FLASH_DMATTN_VERSION_MINOR 0
#define FLASH_DMATTN_VERSION_PATCH 0

// One number that grows with the version: 20000 is 2.0.0.
#define FLASH_DMATTN_VERSION_NUMBER \
  (FLASH_DMATTN_VERSION_MAJOR * 10000 + FLASH_DMATTN_VERSION_MINOR * 100 + FLASH_DMATTN_VERSION_PATCH)
