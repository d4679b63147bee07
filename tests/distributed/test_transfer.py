"""Arrays move between groups of any sizes, and every piece crosses once.

In one process here; between processes in test_placed_processes.py.
"""

from typing import Any

import jax
import numpy as np
import pytest
from further import further
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed import transfer
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.transfer import in_pieces, spread, takes_part, without_data

ARRAYS = {
    "floats": np.arange(12 * 7, dtype=np.float32).reshape(12, 7),
    "flags": np.arange(24) % 3 == 0,
    "ids": np.arange(24, dtype=np.uint32).reshape(12, 2),
    "number": np.float32(3),
}


def group(first: int, size: int, **sizes: Any):
    return make_mesh(**(sizes or {"fsdp": size}), devices=jax.devices()[first : first + size])


@pytest.mark.parametrize(
    ("senders", "receivers"), further([(4, 3), (1, 4), (2, 6), (1, 1), (2, 3), (4, 1)], 3)
)
def test_an_array_arrives_whole(senders, receivers):
    source, target = group(0, senders), group(8 - receivers, receivers)
    for name, array in ARRAYS.items():
        spec = PartitionSpec("fsdp") if array.ndim else PartitionSpec()
        x = make_global(array, NamedSharding(source, spec))
        sharding = NamedSharding(target, PartitionSpec())
        found = in_pieces(x, sharding)
        np.testing.assert_array_equal(fetch(found), array, err_msg=name)
        assert found.sharding == sharding and found.dtype == array.dtype


@pytest.mark.parametrize("receiver", [range(4), range(2, 6), range(8), [0], [5, 3, 1, 0]])
def test_groups_may_share_devices(receiver):
    source = group(0, 4)
    target = make_mesh(fsdp=len(receiver), devices=[jax.devices()[i] for i in receiver])
    for name, array in ARRAYS.items():
        spec = PartitionSpec("fsdp") if array.ndim else PartitionSpec()
        x = make_global(array, NamedSharding(source, spec))
        found = in_pieces(x, NamedSharding(target, PartitionSpec()))
        np.testing.assert_array_equal(fetch(found), array, err_msg=name)


def test_an_array_arrives_in_the_layout_that_is_asked_for():
    source, target = group(0, 4, fsdp=2, tensor=2), group(4, 4, data=2, tensor=2)
    array = ARRAYS["floats"][:, :4]
    x = make_global(array, NamedSharding(source, PartitionSpec("fsdp", "tensor")))
    found = in_pieces(x, NamedSharding(target, PartitionSpec("tensor", "data")))
    np.testing.assert_array_equal(fetch(found), array)
    assert {shard.data.shape for shard in found.addressable_shards} == {(6, 2)}


def test_each_byte_crosses_once(monkeypatch):
    sent = []
    whole = transfer._permutation

    def counted(union, pairs):
        sent.extend(pairs)
        return whole(union, pairs)

    monkeypatch.setattr(transfer, "_permutation", counted)
    x = make_global(ARRAYS["floats"], NamedSharding(group(0, 2), PartitionSpec("fsdp")))
    in_pieces(x, NamedSharding(group(2, 6), PartitionSpec()))  # six copies of it
    assert len(sent) == len(set(sent)) == 6  # of a sixth each
    assert {sender for sender, _ in sent} == {0, 1}
    assert {receiver for _, receiver in sent} == set(range(2, 8))


def test_one_process_takes_part_in_everything():
    one, other = group(0, 4), group(4, 4)
    assert takes_part(one) and not spread({one, other})


def test_only_an_array_of_other_processes_has_no_data():
    sharding = NamedSharding(group(0, 2), PartitionSpec())
    with pytest.raises(ValueError, match="addressable"):
        without_data(jax.ShapeDtypeStruct((4, 2), "bfloat16", sharding=sharding))
