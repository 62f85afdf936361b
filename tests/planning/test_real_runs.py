"""What a plan says of the devices at hand is what a run's own programs take, byte for byte."""

import jax
import numpy as np
import pytest

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import init_params
from rlvr_jax.models.weights import save_weights
from rlvr_jax.planning.planner import make_plan
from rlvr_jax.text.byte_level import byte_level_tokenizer
from rlvr_jax.training import rl
from tests.training.toys import get_config, override

PROGRAMS = {"_generate": "rollout", "_with_reference": "reference", "_update": "update"}
PROGRAMS |= {"_program": "fused"}
ADAPTED = {"adapter__rank": 4, "algorithm__kl_loss_coef": 0.05}
ROUTED = {"rollout__router_replay": True, "algorithm__router_aux_loss_coef": 0.01}


class Recorded:
    """A jitted function that, before it runs, notes what a program compiled for the same arguments needs."""

    def __init__(self, function, name, found):
        self._function, self._name, self._found = function, name, found

    def __call__(self, *args, **kwargs):
        memory = self._function.lower(*args, **kwargs).compile().memory_analysis()
        self._found.setdefault(self._name, []).append(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        return self._function(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._function, name)


def train_and_record(monkeypatch, config, workdir):
    """Phase to the bytes of its programs, in the order a real run called them."""
    found = {}

    def recording(make):
        def made(*args, **kwargs):
            thing = make(*args, **kwargs)
            for attribute in PROGRAMS.keys() & vars(thing).keys():
                recorded = Recorded(getattr(thing, attribute), PROGRAMS[attribute], found)
                object.__setattr__(thing, attribute, recorded)
            return thing

        return made

    for maker in ("Engine", "make_learner", "make_fused_step"):
        monkeypatch.setattr(rl, maker, recording(getattr(rl, maker)))
    rl.train(config, workdir)
    monkeypatch.undo()
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A small mixture of experts on disk."""
    tokenizer = byte_level_tokenizer()
    model = ModelConfig(
        family="qwen3_moe",
        qk_norm="head",
        tie_embeddings=False,
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        num_layers=2,
        embed_dim=32,
        mlp_dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_experts=8,
        experts_per_token=2,
    )
    params = jax.tree.map(np.asarray, init_params(model, jax.random.key(0)))
    directory = tmp_path_factory.mktemp("models") / "mixture"
    save_weights(directory, model, params, tokenizer_files=tokenizer.files())
    return str(directory)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(ADAPTED, id="adapters"),
        pytest.param(
            ROUTED | {"mesh__fsdp": 2, "mesh__expert": 4, "algorithm__kl_loss_coef": 0.0},
            id="mixture",
        ),
        *(
            pytest.param(values, id=name, marks=pytest.mark.slow)
            for name, values in {
                "plain": {},
                "dora": ADAPTED | {"adapter__dora": True, "dtype": "bfloat16"},
                "quantised": ADAPTED | {"adapter__quantize": "int8"},
                "part": ADAPTED | {"adapter__targets": "layers/attn/[qv]"},
                "micro": {"train__micro_rows": 8, "train__remat": "dots", "dtype": "bfloat16"},
                "minibatches": {"train__num_minibatches": 2, "train__num_epochs": 2},
                "reward": {"algorithm__use_kl_in_reward": True, "algorithm__kl_coef": 0.1},
                "tensor": {"mesh__fsdp": 4, "mesh__tensor": 2},
                "fused": {"schedule": "fused"},
                "fused-adapters": {"schedule": "fused"} | ADAPTED,
            }.items()
        ),
    ],
)
def test_a_plan_has_the_memory_of_a_real_runs_programs(
    monkeypatch, tmp_path, request, mixture, settings
):
    config = override(get_config(), **settings, num_steps=1)
    if request.node.callspec.id == "mixture":
        config = override(config, model=mixture)
    real = train_and_record(monkeypatch, config, tmp_path / "run")
    plan = make_plan(config, "local", say=lambda _: None).to_json()
    assert plan["compiled"]
    if "fused" in plan["phases"]:
        del real["rollout"]  # of held-out tasks
    assert real.keys() == plan["phases"].keys()
    for name, phase in plan["phases"].items():
        assert phase["memory_bytes"] in real[name], (name, phase["memory_bytes"], real[name])
