from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from rlvr_jax.errors import MissingExtraError
from rlvr_jax.trajectories.plot import _trailing_mean, plot_curve

DOMAINS = {
    "arithmetic": {"before": 0.31, "after": 0.62, "n": 128},
    "text": {"before": 0.0, "after": 1.0, "n": 64},
}


def pixels(path: Path) -> np.ndarray:
    from matplotlib import image

    return image.imread(path)  # raises if it is not a PNG


def draw(path: Path, num_steps: int = 60, **changes) -> np.ndarray:
    rewards = [0.3 + 0.4 * step / 60 + 0.1 * math.sin(step * 9.1) for step in range(num_steps)]
    if num_steps > 5:
        rewards[4] = math.nan
    plot_curve(
        path, **{"steps": range(num_steps), "rewards": rewards, "domains": DOMAINS, **changes}
    )
    return pixels(path)


def test_the_picture_is_a_png_that_shows_the_curve_and_both_bars(tmp_path):
    picture = draw(tmp_path / "new" / "curve.png", title="SmolLM2-135M-Instruct")
    assert picture.shape[0] > 300 and picture.shape[1] > 900
    for color in ("#9aa0a6", "#1a73e8", "#aecbfa"):
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(picture[..., :3] - rgb).max(-1) < 0.01).sum() > 50, color


def test_higher_rates_are_drawn_as_taller_bars(tmp_path):
    def blue(after: float) -> int:
        domains = {"a": {"before": 0.0, "after": after, "n": 50}}
        picture = draw(tmp_path / "curve.png", num_steps=1, domains=domains)
        return int(
            (np.abs(picture[..., :3] - np.array([0x1A, 0x73, 0xE8]) / 255).max(-1) < 0.01).sum()
        )

    low, high = blue(0.2), blue(0.8)
    assert 3 < high / low < 5


@pytest.mark.parametrize(
    "changes", [{"num_steps": 0}, {"num_steps": 1}, {"domains": {}}, {"window": 1000}]
)
def test_short_runs_and_no_domains_are_drawn(tmp_path, changes):
    assert draw(tmp_path / "curve.png", **changes).std() > 0.01


def test_the_smoothed_curve_is_the_mean_of_the_last_steps_that_were_scored():
    nan = math.nan
    got = _trailing_mean(np.array([nan, 1.0, 3.0, nan, 5.0, 7.0]), 3)
    np.testing.assert_allclose(got, [nan, 1.0, 2.0, 2.0, 4.0, 6.0])


def test_misuse_and_a_missing_extra_are_clear(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="got 3 steps, 2 rewards, window 10; expected"):
        plot_curve(tmp_path / "x.png", steps=[0, 1, 2], rewards=[0.0, 1.0], domains={})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"rlvr_jax\[plot\]"):
        plot_curve(tmp_path / "x.png", steps=[], rewards=[], domains={})
