"""Whether the process computes on the card that the Mosaic kernels are written for."""

import jax


def on_hopper() -> bool:
    """True where jax's devices are NVIDIA GPUs of compute capability 9.0 (H100, H200)."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"
