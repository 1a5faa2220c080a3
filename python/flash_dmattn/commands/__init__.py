"""Commands of `python -m flash_dmattn`: each module adds its parser with `add_parser`."""
