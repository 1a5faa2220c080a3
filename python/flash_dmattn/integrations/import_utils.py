"""The original's question whether the package can be used."""


def is_flash_dmattn_available() -> bool:
    """True: importing the package has loaded its library, and there are kernels for CPUs in every build."""
    return True
