#include "flash_dmattn/kept_keys.h"

#include "api/backends.h"
#include "api/public_call.h"
#include "api/validate.h"

namespace flash_dmattn {

Status append_kept_keys(const NewKeys& new_keys, const KeptKeys& kept, const TensorView& lists,
                        const SelectionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  internal::KeptKeysProblem problem;
  const internal::Backend* backend = nullptr;
  Status status = internal::make_kept_keys_problem(new_keys, kept, lists, &problem);
  if (status.ok()) status = internal::find_backend(context.device, problem.dtype, &backend);
  if (!status.ok()) return status;
  return backend->append_kept_keys(problem, internal::call_of(context));
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

}  // namespace flash_dmattn
