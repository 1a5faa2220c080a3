#include "core/log.h"

#include <cstdlib>
#include <cstring>

namespace flash_dmattn::internal {

bool logging() {
  static const bool enabled = [] {
    const char* value = std::getenv("FLASH_DMATTN_LOG");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

std::string describe_call(const char* direction, const AttentionProblem& problem) {
  std::string line = std::string(name_of(problem.dtype)) + " " + direction;
  const auto add = [&](const char* name, std::int64_t size) { line += name + std::to_string(size); };
  add(" B", problem.batch);
  add(" H", problem.heads);
  add(" Hkv", problem.key_heads);
  add(" Sq", problem.rows);
  add(" Sk", problem.keys);
  add(" D", problem.head_dim);
  if (problem.value_dim != problem.head_dim) add(" Dv", problem.value_dim);
  if (problem.visibility.is_causal) line += " causal";
  if (problem.visibility.mask.defined()) line += " mask";
  if (problem.visibility.intervals.defined()) line += " intervals";
  if (problem.bias.defined()) line += " bias";
  if (problem.sink.defined()) line += " sink";
  return line;
}

}  // namespace flash_dmattn::internal
