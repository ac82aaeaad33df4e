"""Image, prompt, state and normalisation steps against the published formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_engine.config import Normalisation, PromptConfig
from phyai_engine.errors import ConfigError
from phyai_engine.transforms import image, state
from phyai_engine.transforms.normalise import Scaling, scaling
from phyai_engine.transforms.prompt import Prompt

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
    planes = image.planes(pixels, 1)
    assert planes.dtype == np.float32
    assert planes.shape == (3, 1, 1)
    assert planes.flags.c_contiguous
    np.testing.assert_allclose(planes.ravel(), [-1.0, -0.6, 1.0], atol=1e-7)


@pytest.mark.parametrize("resize", ["pillow", "float"])
def test_planes_are_written_where_they_are_wanted(resize: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    together = np.full((2, 3, 16, 16), np.nan, dtype=np.float32)
    image.planes(pixels, 16, resize=resize, out=together[1])
    np.testing.assert_array_equal(together[1], image.planes(pixels, 16, resize=resize))
    assert np.isnan(together[0]).all()


# --- state ---


def test_bins_of_the_specification() -> None:
    assert state.bins(np.array([-1.2, -1.0, 0.0, 0.9921875, 1.5])) == (-1, 0, 128, 255, 255)


def test_padding() -> None:
    padded = state.pad(np.array([[1.0, 2.0]]), 4)
    assert padded.dtype == np.float32
    assert padded.tolist() == [[1.0, 2.0, 0.0, 0.0]]


# --- prompt ---


def prompt_of(form: Any, instruction: str, values: list[float], *, padded: bool = False, width: int = 8) -> str:
    made = Prompt(PromptConfig(form=form, max_tokens=200, padded_state=padded), 200, width)
    ids = made.ids(instruction, np.array(values))
    assert ids[0] == 2
    return bytes(i - 3 for i in ids[1:]).decode()


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("  Pick_up the\nBlock ", "Pick up the Block\n"),
        ("\n_go_\n", " go \n"),  # stripped before underscores become blanks
        ("", "\n"),
    ],
)
def test_plain_form_cleans(instruction: str, wanted: str) -> None:
    assert prompt_of("plain", instruction, []) == wanted


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [(" Pick_up\nit ", " Pick_up\nit \n"), ("go\n", "go\n"), ("go\n\n", "go\n\n"), ("", "\n")],
)
def test_verbatim_form_adds_a_line_end_where_there_is_none(instruction: str, wanted: str) -> None:
    assert prompt_of("verbatim", instruction, []) == wanted


def test_state_form() -> None:
    assert prompt_of("state_bins", "pick_up ", [-1.2, -1.0, 1.5]) == "Task: pick up, State: -1 0 255;\nAction: "


def test_state_form_of_the_padded_state() -> None:
    wanted = "Task: go, State: 0 128 128 128;\nAction: "
    assert prompt_of("state_bins", "go", [-1.0], padded=True, width=4) == wanted


def test_tokens_are_padded_on_the_right() -> None:
    tokens, valid = Prompt(PromptConfig(max_tokens=4), 5, 8)("ab", np.zeros(2))
    assert tokens.tolist() == [2, 100, 101, 13, 0]
    assert tokens.dtype == np.int64
    assert valid.tolist() == [True, True, True, True, False]


def test_a_long_prompt_is_cut_at_its_end_and_told_once_per_length() -> None:
    made = Prompt(PromptConfig(max_tokens=3), 5, 8)
    with pytest.warns(UserWarning, match="has 5 tokens and is cut to 3: its end is lost") as told:
        tokens, valid = made("abc", np.zeros(2))
    assert len(told) == 1
    assert tokens.tolist() == [2, 100, 101, 0, 0]
    assert valid.sum() == 3
    for instruction in ("abc", "ab"):  # warnings are errors here: neither says anything
        assert made(instruction, np.zeros(2))[0].tolist() == [2, 100, 101, 0, 0]
    with pytest.warns(UserWarning, match="has 6 tokens"):
        made("abcd", np.zeros(2))


# --- normalisation ---

LIMITS = np.array([-2.0, 0.0]), np.array([2.0, 4.0])
NAMES = {
    "limits": ("lower", "upper"),
    "mean_std": ("mean", "std"),
    "quantile": ("q01", "q99"),
    "min_max": ("min", "max"),
}


def made(config: Normalisation, part: Any = "state", padded: int = 32) -> Scaling:
    return scaling(config, part, LIMITS, ("j1", "j2"), padded)


def statistics(kind: str, first: Any, second: Any, **changes: Any) -> Normalisation:
    """The same statistics for both parts."""
    values = dict(zip(NAMES[kind], (tuple(first), tuple(second)), strict=True))
    return Normalisation(kind=kind, state=values, actions=values, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "values", "wanted"),
    [
        (Normalisation(), [[3.0, -4.0]], [[3.0, -4.0]]),
        (Normalisation(kind="limits"), [[-2.0, 0.0], [2.0, 4.0], [0.0, 1.0]], [[-1, -1], [1, 1], [0, -0.5]]),
        (statistics("limits", (0.0, 0.0), (1.0, 2.0)), [[0.5, 2.0]], [[0.0, 1.0]]),
        (statistics("mean_std", (1.0, 0.0), (2.0, 0.5)), [[3.0, -0.5]], [[2 / (2 + 1e-6), -0.5 / (0.5 + 1e-6)]]),
        (statistics("quantile", (0.0, -1.0), (2.0, 3.0), eps=0.0), [[0.0, 3.0]], [[-1.0, 1.0]]),
        (statistics("quantile", (0.0, -1.0), (2.0, 3.0)), [[2.0, -1.0]], [[2 / (2 + 1e-6) * 2 - 1, -1.0]]),
        (statistics("quantile", (0.0, -1.0), (2.0, 3.0), eps=0.5), [[2.0, -1.0]], [[2 / 2.5 * 2 - 1, -1.0]]),
    ],
)
def test_formulas_of_openpi(config: Normalisation, values: list[list[float]], wanted: list[list[float]]) -> None:
    for part in ("state", "actions"):
        scale = made(config, part)
        np.testing.assert_allclose(scale.normalise(np.array(values)), wanted, rtol=1e-15)
        np.testing.assert_allclose(scale.unnormalise(np.array(wanted)), values, rtol=1e-12)


def test_openpi_takes_off_on_the_way_out_what_it_adds_on_the_way_in() -> None:
    out = made(statistics("mean_std", (1.0, 0.0), (1e-3, 0.5)), "actions").unnormalise(np.array([2.0, -1.0]))
    np.testing.assert_allclose(out, [1.0 + 2.0 * (1e-3 + 1e-6), -(0.5 + 1e-6)], rtol=1e-15)
    out = made(statistics("quantile", (1.0, 0.0), (1.001, 4.0)), "actions").unnormalise(np.array([0.5, -1.0]))
    np.testing.assert_allclose(out, [1.0 + 0.75 * (1e-3 + 1e-6), 0.0], rtol=1e-13)


@pytest.mark.parametrize("width", [1e-6, 1e-3, 2.0])  # tiny ranges explode there, and so they do here
@pytest.mark.parametrize("kind", ["mean_std", "quantile", "min_max"])
def test_formulas_of_lerobot(kind: str, width: float) -> None:
    low, spread = np.array([0.3, -2.0]), np.array([width, 4.0])
    config = statistics(kind, low, spread if kind == "mean_std" else low + spread, rule="lerobot")
    y = np.array([0.7, -0.4])
    wanted = y * spread + low if kind == "mean_std" else (y + 1) * spread / 2 + low
    out = made(config, "actions").unnormalise(y)
    np.testing.assert_allclose(out, wanted, rtol=1e-12)
    np.testing.assert_allclose(made(config, "actions").normalise(out), y, rtol=1e-6)  # the inverse of the way out


@pytest.mark.parametrize("kind", ["mean_std", "quantile", "min_max"])
def test_the_state_of_lerobot_is_computed_in_float32_as_there(kind: str) -> None:
    draw = np.random.default_rng(3)
    low, values = draw.normal(size=2), draw.normal(size=(50, 2))
    second = draw.uniform(0.1, 2.0, 2) if kind == "mean_std" else low + draw.uniform(0.1, 2.0, 2)
    out = made(statistics(kind, low, second, rule="lerobot")).normalise(values)
    x, first, last = (v.astype(np.float32) for v in (values, low, second))
    wanted = (x - first) / (last + np.float32(1e-8)) if kind == "mean_std" else 2 * (x - first) / (last - first) - 1
    assert out.dtype == wanted.dtype == np.float32
    np.testing.assert_array_equal(out, wanted)
    assert made(Normalisation(rule="lerobot")).normalise(values).dtype == np.float32
    assert made(Normalisation(rule="lerobot"), "actions").normalise(values).dtype == np.float64
    assert made(Normalisation()).normalise(values).dtype == np.float64


def test_the_kinds_of_state_and_actions_may_differ() -> None:
    given: dict[str, Any] = {"kind": "quantile", "state_kind": "mean_std", "actions_kind": "limits"}
    config = Normalisation(**given, state={"mean": (0.0, 1.0), "std": (1.0, 1.0)})
    assert made(config, "state").base == 0.0
    assert made(config, "actions").unnormalise(np.array([1.0, 0.0])).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("rule", ["openpi", "lerobot"])
@pytest.mark.parametrize("eps", [0.0, None])
@pytest.mark.parametrize(
    ("kind", "first", "second", "rest"),
    [
        ("mean_std", (5.0, 0.0), (0.0, 1.0), 0.0),
        ("quantile", (5.0, 0.0), (5.0, 1.0), -1.0),
        ("min_max", (5.0, 0.0), (5.0, 1.0), -1.0),
        ("limits", (5.0, 0.0), (5.0, 1.0), -1.0),
    ],
)
def test_a_constant_dimension_carries_nothing(
    kind: str, first: Any, second: Any, rest: float, eps: float | None, rule: Any
) -> None:
    if (kind, rule) == ("min_max", "openpi"):
        return
    for part in ("state", "actions"):
        scale = made(statistics(kind, first, second, eps=eps, rule=rule), part)
        assert scale.constant.tolist() == [True, False]
        assert scale.normalise(np.array([5.0, 0.0]))[0] == rest  # what training saw: by either formula the same
        assert scale.normalise(np.array([5.3, 0.0]))[0] == rest
        assert scale.unnormalise(np.array([0.7, 0.0], dtype=np.float32))[0] == 5.0


def test_a_constant_dimension_differs_from_the_formulas_by_less_than_their_eps() -> None:
    y = np.array([0.7, 0.0])
    for rule, formula in (("openpi", (0.7 + 1) / 2 * 1e-6 + 5), ("lerobot", (0.7 + 1) * 1e-8 / 2 + 5)):
        scale = made(statistics("quantile", (5.0, 0.0), (5.0, 1.0), rule=rule), "actions")
        assert abs(scale.unnormalise(y)[0] - formula) < 1e-6


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(NAMES)),
    rule=st.sampled_from(["openpi", "lerobot"]),
    first=st.lists(st.floats(-100, 100), min_size=2, max_size=2),
    width=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 100)), min_size=2, max_size=2),
    share=st.lists(st.floats(-1.5, 1.5), min_size=2, max_size=2),
)
def test_round_trip(kind: str, rule: Any, first: list[float], width: list[float], share: list[float]) -> None:
    a, w = np.array(first), np.array(width)
    second = w if kind == "mean_std" else a + w
    scale = made(statistics(kind, a, second, rule="lerobot" if kind == "min_max" else rule), "actions")
    values = a + np.where(scale.constant, 0.0, w) * np.array(share)
    normalised = scale.normalise(values)
    assert np.isfinite(normalised).all()
    np.testing.assert_allclose(scale.unnormalise(normalised), values, rtol=1e-9, atol=1e-9)


# --- statistics and the robot's entries ---


@pytest.mark.parametrize(("kind", "rule"), [("mean_std", "openpi"), ("quantile", "lerobot"), ("limits", "openpi")])
def test_statistics_of_the_padded_vector_are_used_up_to_the_robots_entries(kind: str, rule: Any) -> None:
    exact = made(statistics(kind, (1.0, 2.0), (3.0, 4.0), rule=rule))
    nan = float("nan")  # what is not used is not judged
    padded = made(statistics(kind, (1.0, 2.0, 9.0, nan), (3.0, 4.0, 1.0, 0.0), rule=rule), padded=4)
    np.testing.assert_array_equal(padded.low, exact.low)
    np.testing.assert_array_equal(padded.span, exact.span)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_statistics_of_any_other_length_are_refused_with_both_lengths(count: int) -> None:
    config = statistics("mean_std", (0.0,) * count, (1.0,) * count)
    with pytest.raises(ConfigError, match=rf"got {count} values, wanted 2, .* or 4, the model's padded vector"):
        made(config, padded=4)


def test_a_robot_as_wide_as_the_model_needs_all_statistics() -> None:
    with pytest.raises(ConfigError, match="got 1 values"):
        made(statistics("mean_std", (0.0,), (1.0,)), padded=1)  # never shorter than the robot


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Normalisation(kind="mean_std"), r"normalisation.state.mean is missing, wanted 2 values"),
        (statistics("mean_std", (0.0,), (1.0, 1.0)), r"mean does not fit the robot, got 1 values, wanted 2"),
        (
            statistics("mean_std", (0.0, 0.0), (1.0, -1.0)),
            r"not ordered, got 0.0, -1.0, wanted std >= 0, at normalisation.state\[1\]",
        ),
        (statistics("quantile", (0.0, 2.0), (1.0, 1.0)), r"not ordered, got 2.0, 1.0, wanted q01 <= q99"),
        (statistics("min_max", (0.0, 2.0), (1.0, 1.0), rule="lerobot"), r"not ordered, .* wanted min <= max"),
        (statistics("quantile", (0.0, float("nan")), (1.0, 1.0)), r"q01 is not finite"),
        (statistics("quantile", (0.0, 0.0), (1.0, 1e39), rule="lerobot"), r"range of j2 is not finite.*q99 inf"),
        (statistics("min_max", (0.0, 0.0), (1.0, 1.0)), "openpi has no normalisation by min and max, wanted rule: ler"),
        (Normalisation(kind="limits", state={"mean": (0.0, 0.0)}), r"not use: mean, wanted lower and upper"),
        (Normalisation(state={"mean": (0.0, 0.0)}), r"not use: mean, wanted none"),
        (
            Normalisation(state_kind="quantile", state={"mean": (0.0, 0.0)}),
            r"not use: mean, wanted q01 and q99",
        ),
    ],
)
def test_refused_statistics(config: Normalisation, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(config)


@pytest.mark.parametrize(("lower", "upper"), [(-np.inf, np.inf), (0.0, np.inf), (np.inf, np.inf), (-1e308, 1e308)])
@pytest.mark.parametrize(("part", "rule"), [("actions", "openpi"), ("state", "lerobot")])
def test_limits_without_a_finite_range_are_refused_by_name(lower: float, upper: float, part: Any, rule: Any) -> None:
    limits = np.array([0.0, lower]), np.array([1.0, upper])
    with pytest.raises(ConfigError, match=rf"range of j2 is not finite.*'limits', at normalisation.{part}\[1\]"):
        scaling(Normalisation(kind="limits", rule=rule), part, limits, ("j1", "j2"), 32)
    assert scaling(Normalisation(), "actions", limits, ("j1", "j2"), 32).normalise(np.ones(2)).tolist() == [1.0, 1.0]


def test_an_eps_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="range of j1 is not finite"):
        made(statistics("mean_std", (0.0, 0.0), (1.0, 1.0), eps=float("nan")))
