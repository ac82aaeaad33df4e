"""The matrix instructions of Hopper as C++, and the program that a kernel is compiled from.

One struct per form and width, since the number of a thread's registers is part of the instruction's text. ``add`` makes
sum[64, width] += A[64, 16] @ B[16, width], of eight bits A[64, 32] @ B[32, width], by one warpgroup, from 0 where
``more`` is 0; operands in shared memory are swizzled panels (layout.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Form(NamedTuple):
    """:param registers: A is in registers. :param turned: B's outer axis is contiguous. :param kind: inputs, types."""

    registers: bool = False
    turned: bool = False
    kind: str = "k16.f32.bf16.bf16"


FORMS = {
    "Mma": Form(),
    "Deep": Form(registers=True),
    "Turned": Form(turned=True),
    "Wide": Form(registers=True, turned=True),
    "Eight": Form(kind="k32.f32.e4m3.e4m3"),
}

HEADERS = ("hopper.cuh", "layout.cuh")


def matrix_instruction(form: str, width: int) -> str:
    """The struct of one form and width."""
    in_registers, turned, kind = FORMS[form]
    count = width // 2
    sums = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    if in_registers:
        a, operand = "const u32* a", ", ".join(f"%{count + i}" for i in range(4))
        given, operand = ", ".join(f'"r"(a[{i}])' for i in range(4)), f"{{{operand}}}"
    else:
        a, given, operand = "u64 a", '"l"(a)', f"%{count}"
    b, more = (count + 4, count + 5) if in_registers else (count + 1, count + 2)
    # Only an operand of 16 bits in shared memory says how it stands.
    outer = "" if "e4m3" in kind else f", {turned:d}" if in_registers else f", 0, {turned:d}"
    return f"""
template <> struct {form}<{width}> {{
    static __device__ __forceinline__ void add(float (&sum)[{count}], {a}, u64 b, int more) {{
        asm volatile("{{.reg .pred p; setp.ne.b32 p, %{more}, 0; "
            "wgmma.mma_async.sync.aligned.m64n{width}{kind} {_registers(count)}, {operand}, %{b}, "
            "p, 1, 1{outer};}}" : {sums} : {given}, "l"(b), "r"(more));
    }}
}};
"""


def _registers(count: int) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(count)) + "}"


def source(instructions: Iterable[tuple[str, int]], files: Iterable[str]) -> str:
    """The whole program.

    :param instructions: forms and widths that the kernel uses. :param files: behind the headers.
    """
    head = "using u32 = unsigned int;\nusing u64 = unsigned long long;\n"
    head += "".join(f"template <int N> struct {form};\n" for form in FORMS)
    made = "".join(matrix_instruction(*each) for each in sorted(set(instructions)))
    return head + made + "".join(Path(__file__).with_name(name).read_text() for name in (*HEADERS, *files))
