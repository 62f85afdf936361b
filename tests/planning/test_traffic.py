import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.planning.hlo import Instruction, device_group
from rlvr_jax.planning.traffic import Collective, read_traffic


def struct(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def text(function, *args, **options):
    return jax.jit(function, **options).lower(*args).compile().as_text()


def test_collectives_are_found_with_their_size_and_group():
    mesh = make_mesh(data=1, fsdp=8)
    sharded, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    traffic = read_traffic(
        text(lambda x: x + 1, struct(64, 32, sharding=sharded), out_shardings=whole)
    )
    assert [(c.kind, c.bytes, c.count, c.group_size, c.span) for c in traffic.collectives] == [
        ("all-gather", 64 * 32 * 4, 1, 8, 8)
    ]
    [collective] = traffic.collectives
    assert collective.sent_bytes == 64 * 32 * 4 * 7 / 8

    summed = text(lambda x: x.sum(0), struct(64, 32, sharding=sharded), out_shardings=whole)
    [collective] = read_traffic(summed).collectives
    assert (collective.kind, collective.bytes, collective.group_size) == ("all-reduce", 128, 8)
    assert collective.sent_bytes == 128 * 2 * 7 / 8


def test_a_collective_in_a_loop_counts_as_often_as_the_loop_runs():
    mesh = make_mesh(data=1, fsdp=8)
    sharded, whole = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P())

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    args = (struct(16, 64, sharding=whole), struct(5, 64, 64, sharding=sharded))
    found = read_traffic(text(layers, *args, out_shardings=whole)).collectives
    assert max(c.count for c in found) in (5, 10)  # one or two a layer


def test_bytes_are_operands_and_results_and_slices_of_a_loop_are_slices():
    n = 256
    product = read_traffic(text(jnp.dot, struct(n, n), struct(n, n)))
    assert product.bytes == pytest.approx(3 * n * n * 4, rel=0.01)

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    once = 3 * n * n * 4
    loop = read_traffic(text(layers, struct(n, n), struct(20, n, n)))
    assert 20 * once <= loop.bytes < 2.5 * 20 * once  # and not 20 times the 20 layers


def test_a_loop_without_a_known_end_runs_as_often_as_is_said():
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ x, x)

    program = text(until, struct(256, 256))
    one, ten = (read_traffic(program, while_trips=trips).bytes for trips in (1, 10))
    assert ten > 5 * one


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("replica_groups={{0,1},{2,3}}", (2, 2)),
        ("replica_groups={{0,4},{1,5}}", (2, 5)),
        ("replica_groups=[2,4]<=[8]", (4, 4)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (2, 5)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (4, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (2, 5)),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", (2, 3)),
    ],
)
def test_device_groups_are_read_in_every_spelling(attributes, group):
    line = Instruction("x", "f32[4]", "all-gather", (), attributes, False)
    assert device_group(line) == group


def test_a_collective_of_a_tpu_spread_over_fusions_counts_once():
    piece = """
%piece.{n} (p.{n}: bf16[8,64], q.{n}: f32[4]) -> (f32[4], bf16[64,64]) {{
  %p.{n} = bf16[8,64]{{1,0}} parameter(0)
  %q.{n} = f32[4]{{0}} parameter(1)
  %gather.{n} = bf16[64,64]{{1,0}} all-gather(%p.{n}), channel_id=7, replica_groups=[1,8]<=[8], dimensions={{0}}
  %add.{n} = f32[4]{{0}} add(%q.{n}, %q.{n})
  ROOT %t.{n} = (f32[4]{{0}}, bf16[64,64]{{1,0}}) tuple(%add.{n}, %gather.{n})
}}
"""
    entry = """
ENTRY %main (a: bf16[8,64], b: f32[4]) -> (f32[4], bf16[64,64]) {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %f.1 = (f32[4]{0}, bf16[64,64]{1,0}) fusion(%a, %b), kind=kLoop, calls=%piece.1
  ROOT %f.2 = (f32[4]{0}, bf16[64,64]{1,0}) fusion(%a, %b), kind=kLoop, calls=%piece.2
}
"""
    traffic = read_traffic(piece.format(n=1) + piece.format(n=2) + entry)
    assert traffic.collectives == (
        Collective(kind="all-gather", bytes=64 * 64 * 2, count=1, group_size=8, span=8),
    )
    assert traffic.bytes == 64 * 64 * 2 + 8 * 64 * 2 + 2 * 2 * 16
