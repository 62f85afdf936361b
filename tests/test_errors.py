import pytest

from rlvr_jax.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    WeightsError,
    require,
)


def test_require_returns_the_module():
    assert require("json", "unused").dumps([1]) == "[1]"


def test_require_names_the_module_and_the_extra_that_brings_it():
    with pytest.raises(MissingExtraError, match=r"no_such_module.*pip install 'rlvr_jax\[math\]'"):
        require("no_such_module", "math")


def test_errors_are_caught_by_the_builtin_kind_their_reader_expects():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(WeightsError, ValueError)
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(CheckpointError, RuntimeError)
