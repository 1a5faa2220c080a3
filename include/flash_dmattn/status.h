// The result of every library call that can fail. No call throws: memory that runs out is a failure, too.
#pragma once

#include <string>
#include <utility>

#include "flash_dmattn/export.h"

namespace FLASH_DMATTN_API flash_dmattn {

// Ok, or which argument broke which rule and the values seen.
class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  static Status invalid(std::string argument, std::string rule, std::string values) {
    Status status;
    status.argument_ = std::move(argument);
    status.rule_ = std::move(rule);
    status.values_ = std::move(values);
    return status;
  }

  // The arguments were right, but something that the call needs failed.
  static Status failed(std::string what, std::string error) {
    Status status = invalid(std::move(what), "failed", std::move(error));
    status.is_failure_ = true;
    return status;
  }

  bool ok() const { return argument_.empty(); }
  bool is_failure() const { return is_failure_; }            // of a device, say, and not of an argument
  const std::string& argument() const { return argument_; }  // "key"
  const std::string& rule() const { return rule_; }          // "must have query's head dim"
  const std::string& values() const { return values_; }      // "key (2, 8, 4, 32), query (2, 8, 4, 64)"

  // "key must have query's head dim; got key (2, 8, 4, 32), query (2, 8, 4, 64)"
  std::string message() const {
    return ok() ? "ok" : argument_ + " " + rule_ + (is_failure_ ? ": " : "; got ") + values_;
  }

 private:
  std::string argument_, rule_, values_;
  bool is_failure_ = false;
};

}  // namespace FLASH_DMATTN_API flash_dmattn
