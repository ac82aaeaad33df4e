"""attend in CUDA C++: heads whose keys stand in shared memory as a whole, and many queries over a slab."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulation import Emulator, imported
from phyai_kernels import reference
from torch import Tensor

from phyai_engine.layers.self_check import TOLERANCES, cases, largest_error

# batch, heads, queries, columns, dim: whole and odd chunks, tiles of queries that are not whole, as few columns as go
SIZES = [(2, 3, 150, 40, 72), (1, 2, 128, 256, 72), (1, 1, 3, 16, 16), (1, 2, 70, 100, 128)]
# batch, heads, K/V heads, queries, columns, and the lengths: one tile to several, more and fewer than stand on the chip
LONG = [
    ((1, 2, 1, 40, 100), [70]),
    ((2, 4, 2, 40, 330), [330, 1]),
    ((1, 3, 1, 100, 600), None),
    ((1, 2, 1, 33, 64), [64]),
]
VISION, PREFIX = (3, 16, 16, 256, 256, 72), (1, 8, 1, 968, 1018, 256)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module, its kernels emulated."""
    with imported("cuda_attend") as (module,):
        names = [module.expression(dim, columns)[0] for *_, columns, dim in SIZES]
        names += [module.expression(256, 0, coded=coded)[0] for coded in (False, True)]
        made = Emulator(module.hopper, module.FILES, names, tmp_path_factory.mktemp("emulated"))
        with made.in_place():
            yield module


def merged(batch: int, heads: int, tokens: int, dim: int) -> list[Tensor]:
    """Queries, keys and values as the vision tower makes them: views of one projection."""
    qkv = torch.randn(batch, tokens, 3, heads, dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    return list(qkv.permute(2, 0, 3, 1, 4))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_reference(fused: Any, size: tuple[int, ...]) -> None:
    batch, heads, queries, columns, dim = size
    query, keys, values = merged(batch, heads, max(queries, columns), dim)
    query, keys, values = query[:, :, :queries], keys[:, :, :columns], values[:, :, :columns]
    values[..., -1, :] *= 16  # or losing the last of many columns would pass as rounding
    assert fused.has_few_columns(query, keys, values)
    wanted = reference.attend(query.float(), keys.float(), values.float(), None)
    found = fused.attend(query, keys, values)
    assert found.shape == wanted.shape and found.dtype == torch.bfloat16
    assert (found.float() - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def packed(size: tuple[int, ...], lengths: list[int] | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and lengths as the prefix has them. What stands beyond a length is NaN."""
    batch, heads, kv_heads, queries, columns = size
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, queries, 256, generator=draw).bfloat16()
    keys, values = (torch.randn(batch, kv_heads, columns, 256, generator=draw).bfloat16() for _ in range(2))
    for row, length in enumerate(lengths or []):
        values[row, :, length - 1] *= 16  # or losing the last of many columns would pass as rounding
        keys[row, :, length:], values[row, :, length:] = float("nan"), float("nan")
    return query, keys, values, None if lengths is None else torch.tensor(lengths)


@pytest.mark.parametrize(("size", "lengths"), LONG, ids=str)
def test_many_queries_are_the_reference(
    fused: Any, size: tuple[int, ...], lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are, and coded: the same values in eight bits, many of them beyond the largest."""
    monkeypatch.setattr(fused.others, "attend", None)
    query, keys, values, given = packed(size, lengths)
    wanted = reference.attend(query.float(), keys.float(), values.float(), given)
    found = fused.attend(query, keys, values, given)
    assert found.shape == wanted.shape and found.dtype == torch.bfloat16
    assert (found.float() - wanted).abs().max() <= 1e-2 * wanted.abs().max()
    code = torch.randn(wanted.shape[2], generator=torch.Generator().manual_seed(1)), torch.tensor(300.0)
    coded = fused.attend(query, keys, values, given, code)
    assert coded.dtype == reference.FP8 and torch.equal(coded.float(), reference.encode_fp8(found, code).float())


def test_every_value_is_coded_as_the_format_says(fused: Any) -> None:
    """One column each, so that its values are the result: each bfloat16 from 2**-12 to 1024, and what is no number."""
    bits = torch.arange((127 - 12) << 7, (127 + 10) << 7)  # the low bit goes into the sign as well
    values = (bits + ((bits & 1) << 15)).to(torch.uint16).view(torch.bfloat16).view(1, 11, 1, 256)
    values[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    query, keys = torch.randn(1, 11, 70, 256).bfloat16(), torch.randn(1, 11, 1, 256).bfloat16()
    code = torch.zeros(11 * 256), torch.tensor(1.0)
    found = fused.attend(query, keys, values, torch.tensor([1]), code).float()
    wanted = reference.encode_fp8(values.float().view(-1), code).float()
    assert wanted.isnan().sum() == 1 and (wanted.abs() == 448).sum() > 128 and wanted.unique().numel() > 240
    torch.testing.assert_close(found, wanted.expand(1, 70, -1), rtol=0, atol=0, equal_nan=True)


def test_nothing_beside_a_head_is_seen(fused: Any) -> None:
    """NaN in the other heads, whose values stand next to it in memory, and behind the last column."""
    query, keys, values = merged(2, 3, 150, 72)
    plain = fused.attend(query[:, 1:2], keys[:, 1:2, :40], values[:, 1:2, :40])
    for part in (query, keys, values):
        part[:, ::2] = float("nan")
    keys[:, :, 40:], values[:, :, 40:] = float("nan"), float("nan")
    assert torch.equal(fused.attend(query[:, 1:2], keys[:, 1:2, :40], values[:, 1:2, :40]), plain)


def test_what_it_does_not_take_goes_to_the_other_form(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(fused.others, "attend", lambda *args: called.append(args) or args[0])
    query, keys, values = merged(1, 2, 40, 72)
    lengths, odd = torch.tensor([40]), [part[..., :20] for part in (query, keys, values)]
    for args in (
        (query, keys, values, lengths),
        (query, keys[:, :1], values[:, :1]),
        tuple(part.float() for part in (query, keys, values)),
        tuple(odd),
        tuple(torch.cat([part] * 7, dim=2) for part in (query, keys, values)),
        tuple(part[..., 1:65] for part in (query, keys, values)),
    ):
        assert fused.attend(*args) is args[0]
    assert len(called) == 6


def test_what_is_not_coded_here_goes_to_the_other_form(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(fused.others, "attend", lambda *args: called.append(args) or args[0])
    *whole, lengths = packed((1, 2, 1, 40, 100), [70])
    centre, inverse = torch.zeros(512), torch.tensor(1.0)
    few = [part[:, :, :20].contiguous() for part in whole]
    for args in (
        (*few, lengths, (centre, inverse)),
        (*(part.float() for part in whole), lengths, (centre, inverse)),
        (*whole, lengths, (torch.zeros(513)[1:], inverse)),
        (*whole, lengths, (centre.bfloat16(), inverse)),
        (*whole, lengths, (centre, inverse.bfloat16())),
        (*merged(1, 2, 40, 72), None, (torch.zeros(144), inverse)),
    ):
        assert fused.attend(*args) is args[0]
    assert len(called) == 6
    with pytest.raises(ValueError, match="a code of 512 numbers is wanted"):
        fused.attend(*whole, lengths, (centre[:256], inverse))


@pytest.mark.gpu
def test_it_is_the_reference_on_a_gpu() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    fused, coded = (getattr(importlib.import_module(f"phyai_kernels.cuda_{op}"), op) for op in ("attend", "attend_fp8"))
    several = 2, 4, 2, 90, 500, 256
    for dims in (VISION, PREFIX, (1, 3, 3, 70, 100, 128), (2, 2, 2, 150, 40, 72), several):
        assert largest_error("attend", torch.bfloat16, dims, fused, torch.device("cuda")) <= 1e-2
    for dims in (PREFIX, several):
        allowed = TOLERANCES[torch.bfloat16]
        assert largest_error("attend_fp8", torch.bfloat16, dims, coded, torch.device("cuda")) <= allowed
        for *args, code in cases("attend_fp8", torch.bfloat16, dims, torch.device("cuda")):
            wanted = reference.encode_fp8(fused(*args), code)
            assert torch.equal(coded(*args, code).float(), wanted.float())
    query, keys, values = (part.cuda() for part in merged(3, 16, 256, 72))
    first = fused(query, keys, values)
    assert all(torch.equal(fused(query, keys, values), first) for _ in range(3))
