"""Domains: registering, families, groups, and the errors about names."""

import numpy as np
import pytest

from rlvr_jax.tasks.registry import (
    DOMAINS,
    Domain,
    DomainRegistry,
    Draft,
    Family,
    VerifierUse,
    ask,
    domain,
    expand_domains,
)
from rlvr_jax.tasks.splits import draw


@pytest.fixture
def own_domains(monkeypatch):
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(DOMAINS, "_entries", dict(DOMAINS._entries))


def make_domain(name: str = "cooking/units", **changes) -> Domain:
    facts = {
        "name": name,
        "description": "cups to spoons",
        "num_levels": 2,
        "make": lambda level, rng: Draft(prompt=ask("How many?", system=""), answer=str(level)),
        "verifiers": (VerifierUse(name="exact"),),
        "max_response_tokens": 4,
    }
    return Domain(**{**facts, **changes})


def test_a_decorated_function_is_a_domain_like_any_other(own_domains):
    @domain(
        "cooking/units",
        description="cups to spoons",
        num_levels=3,
        verifiers=(VerifierUse(name="numeric", params={"mode": "whole"}),),
        max_response_tokens=4,
        licence="CC0-1.0",
        source="my kitchen",
    )
    def units(level: int, rng: np.random.Generator) -> Draft:
        cups = int(rng.integers(10 * (level + 1)))
        return Draft(
            prompt=ask(f"{cups} cups in spoons?", system="Number only."), answer=str(16 * cups)
        )

    assert expand_domains("cooking") == ("cooking/units",)
    task = draw("cooking/units", 2, "train", seed=0, index=0)
    assert task.metadata == {"level": 2, "licence": "CC0-1.0", "source": "my kitchen"}
    assert DOMAINS.get("cooking/units") is units


def test_a_name_is_registered_once(own_domains):
    with pytest.raises(ValueError, match="'arithmetic/add' is registered twice"):
        DOMAINS.register("arithmetic/add")(make_domain())


def test_a_domain_needs_levels_and_verifiers():
    with pytest.raises(ValueError, match=r"'cooking/units' has num_levels=0; expected at least 1"):
        make_domain(num_levels=0)
    with pytest.raises(ValueError, match="'cooking/units' has no verifiers"):
        make_domain(verifiers=())


def test_an_unknown_domain_names_the_nearest_and_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown domain 'arithmetic/ad'; did you mean 'arithmetic/add'\?"
    ) as info:
        expand_domains(["arithmetic/ad"])
    for known in ("arithmetic/mul", "text/last_word", "rg/*", "math"):
        assert known in str(info.value)
    with pytest.raises(ValueError, match=r"did you mean 'rg/chain_sum'\?"):
        DOMAINS.get("rg/chainsum")


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'arithmetic/add' has no level 99; expected 0 to 5"):
        draw("arithmetic/add", 99, "train", 0, 0)
    with pytest.raises(ValueError, match="'arithmetic/add' has no level -1"):
        draw("arithmetic/add", -1, "train", 0, 0)


def test_prefixes_and_groups_stand_for_their_domains_once_each():
    arithmetic = expand_domains("arithmetic")
    assert len(arithmetic) >= 5
    assert all(name.startswith("arithmetic/") for name in arithmetic)
    assert expand_domains("math") == arithmetic
    assert expand_domains(["arithmetic/mul", "math", "arithmetic"])[0] == "arithmetic/mul"
    assert sorted(expand_domains(["arithmetic/mul", "math", "arithmetic"])) == sorted(arithmetic)
    assert len(expand_domains("rg")) > 90


def test_an_empty_set_of_domains_is_refused():
    with pytest.raises(ValueError, match="the set of domains is empty; expected at least one"):
        expand_domains([])


def test_a_family_builds_its_members_when_first_asked_for():
    built = []
    registry = DomainRegistry()
    registry.register_family(
        "zoo",
        Family(
            names=("zoo/ape", "zoo/bee"),
            resolve=lambda name: built.append(name) or make_domain(name),
            excluded={"zoo/cat": "it scratches"},
        ),
    )
    assert list(registry) == ["zoo/ape", "zoo/bee"]
    assert built == []
    assert registry.get("zoo/ape") is registry.get("zoo/ape")
    assert built == ["zoo/ape"]
    with pytest.raises(ValueError, match="'zoo/cat' is left out: it scratches"):
        registry.get("zoo/cat")
    with pytest.raises(ValueError, match="unknown domain 'zoo/dog'"):
        registry.get("zoo/dog")
    with pytest.raises(ValueError, match="family 'zoo' is registered twice"):
        registry.register_family("zoo", Family(names=(), resolve=make_domain))
