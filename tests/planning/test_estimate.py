"""The formulas against compiled programs, on all 8 devices."""

import jax
import pytest

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.planning.estimate import estimate
from rlvr_jax.planning.measure import measure

FSDP = {"data": 1, "fsdp": 8, "tensor": 1}


def test_arguments_and_flops_are_those_of_the_compiled_programs(
    measured, small_config, small_model
):
    found = estimate(small_config, small_model, FSDP, prompt_tokens=60, on_cpu=True)
    for name, phase in measured.items():
        assert found[name].memory.arguments == pytest.approx(phase.memory.arguments, rel=0.05)
        assert found[name].memory.aliased == pytest.approx(phase.memory.aliased, rel=0.01)
        assert found[name].resident_bytes == pytest.approx(phase.resident_bytes, rel=0.01)
        if name != "rollout":  # that of a CPU fills up its rows
            assert found[name].flops == pytest.approx(phase.flops, rel=0.06)


@pytest.mark.parametrize("name", ["reference", "update"])
def test_memory_is_within_a_fifth_of_the_compiled_programs(
    measured, small_config, small_model, name
):
    found = estimate(small_config, small_model, FSDP, prompt_tokens=60, on_cpu=True)[name]
    assert found.memory.total == pytest.approx(measured[name].memory.total, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        (FSDP, {"row_length": 496, "micro_rows": 8}),
        (FSDP, {"row_length": 496, "micro_rows": 16, "remat": "dots"}),
        (FSDP, {"row_length": 496, "micro_rows": 16, "remat": "none"}),
        ({"data": 1, "fsdp": 4, "tensor": 2}, {"row_length": 240, "micro_rows": 0}),
        ({"data": 8, "fsdp": 1, "tensor": 1}, {"row_length": 240, "micro_rows": 0}),
        ({"data": 1, "fsdp": 2, "tensor": 1, "context": 4}, {"row_length": 496, "micro_rows": 8}),
    ],
)
@pytest.mark.parametrize("untied", [False, True])
def test_memory_is_within_a_fifth_for_other_sizes_and_meshes(
    small_config, small_model, mesh, settings, untied
):
    model = small_model
    if untied:
        model = ModelConfig(
            vocab_size=32000,
            num_layers=4,
            embed_dim=512,
            mlp_dim=1536,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            tie_embeddings=False,
        )
    config = small_config.copy_and_resolve_references().unlock()
    config.mesh.update(mesh)
    config.train.update(settings)
    found = estimate(config, model, mesh, prompt_tokens=60, on_cpu=True)
    phases = measure(
        config,
        model,
        jax.devices(),
        prompt_tokens=60,
        on_cpu=False,
        shallow_decode=False,
        say=lambda _: None,
        only=("update",),
    ).phases
    for name, phase in phases.items():
        assert found[name].memory.total == pytest.approx(phase.memory.total, rel=0.2), name


def test_what_does_not_divide_is_refused_with_the_numbers(small_config, small_model):
    with pytest.raises(ValueError, match=r"micro_rows \(16\) must be divisible by .* \(32\)"):
        estimate(small_config, small_model, FSDP | {"fsdp": 32}, prompt_tokens=60)
    with pytest.raises(ValueError, match=r"num_kv_heads \(4\) must be divisible"):
        estimate(small_config, small_model, {"data": 1, "fsdp": 1, "tensor": 8}, prompt_tokens=60)
