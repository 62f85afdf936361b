import pytest

from rlvr_jax.errors import ConfigError
from rlvr_jax.planning.chips import CHIPS, chip_of_device, parse_topology


@pytest.mark.parametrize(
    ("name", "chip", "num_devices", "platform"),
    [
        ("v5p:8x8x8", "v5p", 512, "tpu"),
        ("v5e:16x16", "v5e", 256, "tpu"),
        ("v5e:1x1", "v5e", 1, "tpu"),
        ("h100:64", "h100", 64, "gpu"),
        ("local", None, 0, "local"),
    ],
)
def test_a_topology_is_a_chip_and_how_many(name, chip, num_devices, platform):
    topology = parse_topology(name)
    assert (topology.chip, topology.num_devices, topology.platform) == (chip, num_devices, platform)


@pytest.mark.parametrize("name", ["v9:2x2", "h100", "v5e:0x4", "h100:-1", "", "v5e:4x", "tpu"])
def test_an_unknown_topology_is_refused_with_those_known(name):
    with pytest.raises(ConfigError, match=r"unknown topology.*local, v4:AxBxC, .*h100:N"):
        parse_topology(name)


def test_a_topology_of_the_wrong_dimensions_says_how_many_there_are():
    with pytest.raises(ConfigError, match=r"has 2 sizes; a v5p has 3: write v5p:4x4x4"):
        parse_topology("v5p:8x8")
    with pytest.raises(ConfigError, match=r"has 2 sizes; a h100 has 1: write h100:8"):
        parse_topology("h100:8x8")
    with pytest.raises(ConfigError, match="512 chips; a v5e slice has at most 256"):
        parse_topology("v5e:16x32")


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("cpu", None),
    ],
)
def test_a_device_kind_is_found_in_the_table(kind, chip):
    assert chip_of_device(kind) == chip


def test_every_chip_names_where_its_figures_are_published():
    for chip in CHIPS.values():
        assert chip.source
        assert 100e12 < chip.bf16_flops < 5e15
        assert 300e9 < chip.memory_bytes_per_s < 1e13
        assert bool(chip.node_chips) == bool(chip.network_bytes_per_s) == (chip.platform == "gpu")
