"""Figures of compiled programs: equal to what the trainer's own functions compile to, and sharded as they should be."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rlvr_jax.distributed.sharding import batch_sharding
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.planning.measure import (
    SHALLOW,
    Memory,
    Phase,
    extrapolate,
    needed_bytes,
    with_depth,
)
from rlvr_jax.planning.programs import make_programs
from rlvr_jax.planning.traffic import Collective
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.training.state import init_state
from rlvr_jax.training.step import Minibatch
from tests.training.toys import get_config


def test_memory_is_that_of_the_real_step_on_real_arrays():
    """The arrays of a run, not shapes: the state of ``init_state`` and a batch on the mesh."""
    config, model = get_config(), load_pretrained(TINY).config
    programs = make_programs(config, model, jax.devices(), prompt_tokens=60, on_cpu=True)
    learner, work = programs.learner, programs.work
    params = load_pretrained(TINY).params
    state = init_state(model, params, learner.optimizer, learner.mesh, seed=0)
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), work.batch)
    batch = jax.device_put(batch, batch_sharding(learner.mesh))
    minibatch = Minibatch(batch, work.bounds, work.num_samples)
    real = learner.trace_update(state, minibatch, None).lower().compile()
    planned = programs.trace("update").lower().compile()
    for name in ("argument", "output", "alias", "temp"):
        field = f"{name}_size_in_bytes"
        assert getattr(planned.memory_analysis(), field) == getattr(real.memory_analysis(), field)


def test_weights_are_gathered_a_layer_at_a_time(measured, small_model):
    """fsdp=8: no collective of the update moves all layers of any parameter at once."""
    layers = abstract_params(small_model)["layers"]
    one = max(leaf.size * 4 // small_model.num_layers for leaf in jax.tree.leaves(layers))
    embedding = small_model.vocab_size * small_model.embed_dim * 4
    gathers = [c for c in measured["update"].collectives if c.kind == "all-gather"]
    assert any(c.count >= small_model.num_layers for c in gathers), "the weights are sharded"
    for gather in gathers:
        assert gather.bytes <= one or gather.bytes == embedding, gather


def test_the_state_is_donated_and_divided_over_the_devices(measured, small_model):
    update = measured["update"]
    state = 3 * small_model.num_params * 4
    assert update.memory.aliased == pytest.approx(state / 8, rel=0.02)
    assert update.memory.arguments >= update.memory.aliased
    assert update.resident_bytes == pytest.approx(state / 3 / 8, rel=0.02)  # the reference


def test_needed_bytes_reads_what_xla_says():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 23.50G of 15.75G hbm. Exceeded hbm capacity by 7.75G."
    )
    assert needed_bytes(message) == int(23.5 * 2**30)
    assert needed_bytes("INTERNAL: something else") == 0


def test_a_shallow_model_has_its_first_layers(small_model):
    model = dataclasses.replace(small_model, sliding_window=8, local_layers=(0, 3))
    assert with_depth(model, 2).num_layers == 2
    assert with_depth(model, 2).local_layers == (0,)


def test_two_depths_give_any_depth_of_what_is_linear():
    def phase(depth):
        memory = Memory(arguments=10 + depth, outputs=5, aliased=0, temporaries=7 * depth, code=3)
        gathers = Collective(kind="all-gather", bytes=8, count=2 * depth, group_size=8, span=8)
        final = Collective(kind="all-reduce", bytes=4, count=1, group_size=8, span=8)
        return Phase(
            memory=memory,
            resident_bytes=0,
            flops=100.0 * depth + 50,
            bytes=10.0 * depth,
            collectives=(gathers, final),
            runs=1,
            how="compiled",
            compile_s=0.0,
        )

    found = extrapolate(phase(SHALLOW[0]), phase(SHALLOW[1]), 36)
    assert found.how == "compiled at depths 2 and 4, extrapolated"
    assert dataclasses.replace(found, how="compiled") == phase(36)
