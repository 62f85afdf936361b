"""Meshes: sizes that fit the devices, and clear refusals of those that do not."""

import dataclasses
from typing import Any

import jax
import pytest

from rlvr_jax.distributed.mesh import (
    make_mesh,
    num_column_shards,
    num_row_shards,
    num_token_shards,
)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((), (8, 1, 1, 1, 1)),
        ((2, 2, 2), (2, 2, 1, 1, 2)),
        ((2, -1, 2), (2, 2, 1, 1, 2)),
        ((1, 1, -1), (1, 1, 1, 1, 8)),
        ((-1, 8, 1), (1, 8, 1, 1, 1)),
        ((1, 2, 2, -1), (1, 2, 2, 1, 2)),
        ((1, 1, 2, 1, -1), (1, 1, 1, 4, 2)),
        ((-1, 1, 1, 2, 2), (2, 1, 2, 2, 1)),
    ],
)
def test_minus_one_takes_what_is_left(sizes, shape):
    mesh = make_mesh(*sizes)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == ("data", "fsdp", "expert", "context", "tensor")
    assert num_row_shards(mesh) == shape[0] * shape[1] * shape[2]
    assert num_column_shards(mesh) == shape[3]
    assert num_token_shards(mesh) * shape[4] == 8
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a TPU device as an arrangement looks at."""

    id: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


@pytest.mark.parametrize("sizes", [(1, 8, 4, 16), (1, 64, 8, 1)])
def test_an_axis_may_be_a_part_of_one_of_a_tpus(sizes):
    """tensor=4 of a torus of 8x8x8 chips."""
    chips: Any = [Chip(i, (i % 8, i // 8 % 8, i // 64)) for i in range(512)]
    mesh = make_mesh(*sizes, devices=chips)
    data, fsdp, tensor, expert = sizes
    assert tuple(mesh.shape.values()) == (data, fsdp, expert, 1, tensor)
    assert sorted(chip.id for chip in mesh.devices.flat) == list(range(512))


def test_a_part_of_the_devices_can_be_taken():
    mesh = make_mesh(devices=jax.devices()[2:4])
    assert [device.id for device in mesh.devices.flat] == [2, 3]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1, 1), "needs 3 devices; there are 8: change config.mesh"),
        ((-1, 3, 1), "needs a multiple of 3 devices; there are 8"),
        ((2, 2, 1), "needs 4 devices; there are 8"),
        ((16, 1, 1), "needs 16 devices; there are 8"),
        ((-1, -1, 1), "at most one of them -1"),
        ((1, 1, 1, 1, 3), "'context': 3, 'tensor': 1} needs 3 devices; there are 8"),
        ((-1, 1, 1, 1, -1), "at most one of them -1"),
        ((0, 1, 1), "must be >= 1"),
        ((-2, 1, 1), "must be >= 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(*sizes)
