"""Image, prompt, state and normalisation steps against the published formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_engine.config import Normalisation
from phyai_engine.errors import ConfigError
from phyai_engine.transforms import image, prompt, state
from phyai_engine.transforms.normalise import scaling

# --- image ---


@pytest.mark.parametrize(
    ("height", "width", "top", "left", "rows", "columns"),
    [
        (480, 640, 28, 0, 168, 224),
        (640, 480, 0, 28, 224, 168),
        (100, 100, 0, 0, 224, 224),
        (481, 640, 28, 0, 168, 224),
        (239, 640, 70, 0, 83, 224),  # 141 rows of padding: 70 above, 71 below
        (1, 1000, 111, 0, 1, 224),
    ],
)
def test_resize_keeps_the_aspect_and_centres(
    height: int, width: int, top: int, left: int, rows: int, columns: int
) -> None:
    out = image.resize_pad(np.full((height, width, 3), 200, dtype=np.uint8), 224)
    wanted = np.zeros((224, 224, 3), dtype=np.uint8)
    wanted[top : top + rows, left : left + columns] = 200
    np.testing.assert_array_equal(out, wanted)


def test_shrinking_is_antialiased() -> None:
    # One-pixel stripes average to grey; a resampler without antialiasing would pick stripes.
    stripes = np.zeros((224 * 4, 224 * 4, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    inner = image.resize_pad(stripes, 224)[:, 2:-2]
    assert inner.min() >= 120
    assert inner.max() <= 135


def test_the_right_size_passes_unchanged() -> None:
    square = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert image.resize_pad(square, 32) is square


def test_values_map_to_minus_one_to_one() -> None:
    pixels = np.array([[[0, 51, 255]]], dtype=np.uint8)
    planes = image.to_planes(pixels)
    assert planes.dtype == np.float32
    assert planes.shape == (3, 1, 1)
    assert planes.flags.c_contiguous
    np.testing.assert_allclose(planes.ravel(), [-1.0, -0.6, 1.0], atol=1e-7)
    assert (image.black_planes(4) == -1).all()


# --- state ---


def test_bins_of_the_specification() -> None:
    assert state.bins(np.array([-1.2, -1.0, 0.0, 0.9921875, 1.5])) == (-1, 0, 128, 255, 255)


def test_padding() -> None:
    padded = state.pad(np.array([[1.0, 2.0]]), 4)
    assert padded.dtype == np.float32
    assert padded.tolist() == [[1.0, 2.0, 0.0, 0.0]]


# --- prompt ---


def text_of(ids: list[int]) -> str:
    return bytes(i - 3 for i in ids).decode()


def test_plain_form() -> None:
    ids = prompt.plain(prompt.ByteTokenizer(), "  Pick_up the\nBlock ")
    assert ids[0] == 2
    assert text_of(ids[1:]) == "Pick up the Block\n"


def test_state_form() -> None:
    ids = prompt.with_state(prompt.ByteTokenizer(), "pick_up ", (-1, 0, 255))
    assert ids[0] == 2
    assert text_of(ids[1:]) == "Task: pick up, State: -1 0 255;\nAction: "


def test_fit_pads_and_cuts_on_the_right() -> None:
    tokens, mask = prompt.fit([2, 7, 8], limit=4, size=5, pad=0)
    assert tokens.tolist() == [2, 7, 8, 0, 0]
    assert tokens.dtype == np.int64
    assert mask.tolist() == [True, True, True, False, False]
    with pytest.warns(UserWarning, match="has 3 tokens and is cut to 2"):
        tokens, mask = prompt.fit([2, 7, 8], limit=2, size=5, pad=0)
    assert tokens.tolist() == [2, 7, 0, 0, 0]
    assert mask.sum() == 2


def test_unknown_tokenizers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown tokenizer 'google/.*come with checkpoints"):
        prompt.tokenizer_from("google/paligemma-3b-pt-224")


# --- normalisation ---

NONE = np.full(2, np.nan)
LIMITS = np.array([-2.0, 0.0]), np.array([2.0, 4.0])


@pytest.mark.parametrize(
    ("config", "values", "wanted"),
    [
        (Normalisation(), [[3.0, -4.0]], [[3.0, -4.0]]),
        (Normalisation(kind="limits"), [[-2.0, 0.0], [2.0, 4.0], [0.0, 1.0]], [[-1, -1], [1, 1], [0, -0.5]]),
        (
            Normalisation(kind="limits", state={"lower": (0.0, 0.0), "upper": (1.0, 2.0)}),
            [[0.5, 2.0]],
            [[0.0, 1.0]],
        ),
        (
            Normalisation(kind="mean_std", state={"mean": (1.0, 0.0), "std": (2.0, 0.5)}),
            [[3.0, -0.5]],
            [[2 / (2 + 1e-6), -0.5 / (0.5 + 1e-6)]],
        ),
        (
            Normalisation(kind="quantile", eps=0.0, state={"q01": (0.0, -1.0), "q99": (2.0, 3.0)}),
            [[0.0, 3.0]],
            [[-1.0, 1.0]],
        ),
        (
            Normalisation(kind="quantile", state={"q01": (0.0, -1.0), "q99": (2.0, 3.0)}),
            [[2.0, -1.0]],
            [[2 / (2 + 1e-6) * 2 - 1, -1.0]],
        ),
    ],
)
def test_formulas(config: Normalisation, values: list[list[float]], wanted: list[list[float]]) -> None:
    scale = scaling(config, "state", LIMITS, ("j1", "j2"))
    np.testing.assert_allclose(scale.normalise(np.array(values)), wanted, rtol=1e-15)
    np.testing.assert_allclose(scale.unnormalise(np.array(wanted)), values, rtol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize(
    ("kind", "statistics", "rest"),
    [
        ("mean_std", {"mean": (5.0, 0.0), "std": (0.0, 1.0)}, 0.0),
        ("quantile", {"q01": (5.0, 0.0), "q99": (5.0, 1.0)}, -1.0),
    ],
)
def test_a_constant_dimension_carries_nothing(
    kind: str, statistics: dict[str, tuple[float, ...]], rest: float, eps: float
) -> None:
    config = Normalisation(kind=kind, eps=eps, actions=statistics)  # type: ignore[arg-type]
    scale = scaling(config, "actions", (NONE, NONE), ("j1", "j2"))
    assert scale.constant.tolist() == [True, False]
    assert scale.normalise(np.array([5.3, 0.0]))[0] == rest
    assert scale.unnormalise(np.array([0.7, 0.0], dtype=np.float32))[0] == 5.0


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(["limits", "mean_std", "quantile"]),
    first=st.lists(st.floats(-100, 100), min_size=2, max_size=2),
    width=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 100)), min_size=2, max_size=2),
    share=st.lists(st.floats(-1.5, 1.5), min_size=2, max_size=2),
)
def test_round_trip(kind: str, first: list[float], width: list[float], share: list[float]) -> None:
    a, w = np.array(first), np.array(width)
    second = w if kind == "mean_std" else a + w
    names = {"limits": ("lower", "upper"), "mean_std": ("mean", "std"), "quantile": ("q01", "q99")}[kind]
    config = Normalisation(kind=kind, actions=dict(zip(names, (tuple(a), tuple(second)), strict=True)))  # type: ignore[arg-type]
    scale = scaling(config, "actions", (NONE, NONE), ("j1", "j2"))
    values = a + w * np.array(share)
    normalised = scale.normalise(values)
    assert np.isfinite(normalised).all()
    np.testing.assert_allclose(scale.unnormalise(normalised), values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Normalisation(kind="mean_std"), r"normalisation.state.mean is missing, wanted 2 values"),
        (
            Normalisation(kind="mean_std", state={"mean": (0.0,), "std": (1.0, 1.0)}),
            r"got 1 values, wanted 2",
        ),
        (
            Normalisation(kind="mean_std", state={"mean": (0.0, 0.0), "std": (1.0, -1.0)}),
            r"not ordered, got 0.0, -1.0, wanted std >= 0, at normalisation.state\[1\]",
        ),
        (
            Normalisation(kind="quantile", state={"q01": (0.0, 2.0), "q99": (1.0, 1.0)}),
            r"not ordered, got 2.0, 1.0, wanted q01 <= q99",
        ),
        (
            Normalisation(kind="quantile", state={"q01": (0.0, float("nan")), "q99": (1.0, 1.0)}),
            r"q01 is not finite",
        ),
        (Normalisation(kind="limits", state={"mean": (0.0, 0.0)}), r"not use: mean, wanted lower and upper"),
        (Normalisation(state={"mean": (0.0, 0.0)}), r"not use: mean, wanted none"),
    ],
)
def test_refused_statistics(config: Normalisation, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scaling(config, "state", LIMITS, ("j1", "j2"))


@pytest.mark.parametrize(("lower", "upper"), [(-np.inf, np.inf), (0.0, np.inf), (np.inf, np.inf), (-1e308, 1e308)])
def test_limits_without_a_finite_range_are_refused_by_name(lower: float, upper: float) -> None:
    limits = np.array([0.0, lower]), np.array([1.0, upper])
    with pytest.raises(ConfigError, match=r"range of j2 is not finite.*'limits', at normalisation.actions\[1\]"):
        scaling(Normalisation(kind="limits"), "actions", limits, ("j1", "j2"))
    assert scaling(Normalisation(), "actions", limits, ("j1", "j2")).normalise(np.ones(2)).tolist() == [1.0, 1.0]


def test_an_eps_that_is_no_number_is_refused() -> None:
    config = Normalisation(kind="mean_std", eps=float("nan"), state={"mean": (0.0, 0.0), "std": (1.0, 1.0)})
    with pytest.raises(ConfigError, match="range of j1 is not finite"):
        scaling(config, "state", LIMITS, ("j1", "j2"))
