import pytest

from rlvr_jax.registry import Registry


@pytest.fixture
def colours() -> Registry[int]:
    registry: Registry[int] = Registry("colour")
    registry.register("red")(1)
    registry.register("green")(2)
    return registry


def test_get_returns_what_was_registered(colours):
    assert colours.get("green") == 2


def test_register_returns_the_thing_so_that_it_decorates():
    registry = Registry("shape")

    @registry.register("square")
    def square() -> int:
        return 4

    assert square() == 4
    assert registry.get("square") is square


def test_a_name_registered_twice_raises_and_keeps_the_first(colours):
    with pytest.raises(ValueError, match=r"colour 'red' is registered twice"):
        colours.register("red")(3)
    assert colours.get("red") == 1


def test_an_unknown_name_lists_the_nearest_and_the_known(colours):
    with pytest.raises(
        ValueError, match=r"unknown colour 'gren'.*did you mean 'green'.*green, red"
    ):
        colours.get("gren")


def test_an_unknown_name_with_nothing_near_still_lists_the_known(colours):
    with pytest.raises(ValueError, match="green, red") as caught:
        colours.get("quadratic")
    assert "did you mean" not in str(caught.value)


def test_iteration_is_sorted_and_membership_is_by_name(colours):
    assert list(colours) == ["green", "red"]
    assert "red" in colours
    assert "blue" not in colours
