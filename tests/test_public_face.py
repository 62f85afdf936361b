"""``import rlvr_jax as rl``: quick, and every name it promises is there."""

import ast
import pathlib
import subprocess
import sys

import pytest

import rlvr_jax as rl


def test_importing_it_loads_neither_jax_nor_numpy():
    code = "import sys, rlvr_jax; print([m for m in ('jax', 'numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_every_name_resolves_and_is_listed_once_for_people_types_and_programs():
    for name in rl.__all__:
        assert getattr(rl, name).__class__ is not None, name
    tree = ast.parse(pathlib.Path(rl.__file__).read_text())
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {
        (node.module.removeprefix("rlvr_jax."), alias.name)
        for node in typed.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found = {(module, name) for module, names in rl._HOMES.items() for name in names}
    assert imports == found
    assert sorted(name for _, name in found) == sorted(rl.__all__)
    assert set(rl.__all__) <= set(dir(rl))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'load_polizy'"):
        _ = rl.load_polizy


def test_the_version_is_the_installed_one():
    assert rl.__version__.count(".") == 2
