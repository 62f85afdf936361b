import jax
import jax.numpy as jnp
import pytest

from rlvr_jax.planning.flops import matmul_flops, step_flops
from rlvr_jax.planning.programs import make_programs


def flops(function, *shapes, **options):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return matmul_flops(jax.jit(function).trace(*args).jaxpr.jaxpr, **options)


def test_a_matrix_product_takes_two_flops_a_multiply_add():
    assert flops(jnp.dot, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7)) == 420


def test_a_loop_counts_as_often_as_it_runs():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=10)[0]

    def until(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ w, x)

    assert flops(scanned, (4, 4), (4, 4)) == 10 * 2 * 4**3
    assert flops(until, (4, 4), (4, 4), while_trips=6) == 6 * 2 * 4**3


def test_a_gradient_takes_what_rematerialisation_adds():
    def loss(x, w):
        return (jnp.sin(x @ w) @ w).sum()

    plain = flops(jax.grad(loss, argnums=(0, 1)), (4, 4), (4, 4))
    again = flops(jax.grad(jax.checkpoint(loss), argnums=(0, 1)), (4, 4), (4, 4))
    assert again > plain > flops(loss, (4, 4), (4, 4))


def test_ragged_products_count_every_token_once_whatever_the_number_of_experts():
    def routed(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes.astype(jnp.int32))

    assert flops(routed, (64, 8), (4, 8, 16), (4,)) == 2 * 64 * 8 * 16


def test_xla_itself_counts_the_body_of_a_loop_once():
    """Why flops are counted here: if this fails, ``cost_analysis`` has learnt it."""

    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=10)[0]

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    analysis = jax.jit(scanned).lower(*args).compile().cost_analysis()
    assert analysis["flops"] < 2 * 2 * 64**3


@pytest.mark.parametrize(("remat", "tensor"), [("full", 1), ("dots", 1), ("none", 1), ("full", 2)])
def test_the_formula_agrees_with_the_traced_step_functions(
    small_config, small_model, remat, tensor
):
    config = small_config.copy_and_resolve_references().unlock()
    config.train.remat = remat
    config.mesh.update(fsdp=8 // tensor, tensor=tensor)
    programs = make_programs(config, small_model, jax.devices(), prompt_tokens=60, on_cpu=False)
    expected = step_flops(small_model, programs.work, remat)
    for phase in programs.phases:
        trips = programs.work.max_tokens - 1 if phase == "rollout" else 1
        traced = matmul_flops(programs.trace(phase).jaxpr.jaxpr, while_trips=trips)
        assert traced == pytest.approx(expected[phase], rel=0.06), phase
