"""The count of compilations, and the guard against hidden copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.program.counting import count_compilations
from jaxrl_llm.program.guards import transfer_guard


def test_compilations_are_counted_by_name():
    @jax.jit
    def double(x):
        return 2 * x

    x, y = jnp.zeros(3), jnp.zeros(4)
    with count_compilations() as counter:
        double(x)
        double(x)
        assert counter.programs("double") == 1
        double(y)
    assert counter.programs("double") == counter.count == 2
    assert counter.seconds > 0
    double(jnp.zeros(5))
    assert counter.programs("double") == 2  # no longer listening


def test_transfer_guard_refuses_only_hidden_copies():
    double = jax.jit(lambda x: 2 * x)
    host = np.ones(3, np.float32)
    double(host)
    with transfer_guard():
        result = double(jax.device_put(host))
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            double(host)
    assert jax.device_get(result).tolist() == [2, 2, 2]
