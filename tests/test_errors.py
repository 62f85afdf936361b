import pytest

from rlvr_jax.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    OutsideError,
    WeightsError,
    boundary,
    require,
)


def test_boundary_without_a_failure_has_no_error():
    with boundary() as outcome:
        value = 1
    assert value == 1
    assert outcome.error is None


@pytest.mark.parametrize("failure", [OutsideError("tool died"), TimeoutError("tool died")])
def test_boundary_turns_failures_of_the_outside_into_values(failure):
    with boundary() as outcome:
        raise failure
    assert outcome.error == f"{type(failure).__name__}: tool died"


def test_boundary_catches_the_kinds_it_is_given_and_their_subclasses():
    with boundary(OSError) as outcome:
        raise FileNotFoundError("no such file")
    assert outcome.error == "FileNotFoundError: no such file"


def test_boundary_lets_bugs_and_interrupts_through():
    with pytest.raises(KeyError), boundary(OSError):
        raise KeyError("a bug of ours")
    with pytest.raises(KeyboardInterrupt), boundary():
        raise KeyboardInterrupt


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
