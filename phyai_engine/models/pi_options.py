"""Options of pi0 and pi0.5, and what follows from them alone. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from phyai_engine.solvers import flow_times
from phyai_engine.types import BufferSpec, ModelSpec

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Images = Literal["bytes", "planes"]


class PiOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dimensions and conventions; the defaults are the released pi0.5.

    :param vis_width: ``vis_*`` are SigLIP's, ``width mlp`` the prefix stack's, ``exp_*`` the action expert's;
        ``depth heads kv_heads head_dim`` hold for both stacks.
    :param images: how the model takes them: ``bytes`` [s, s, 3], which it brings to [-1, 1] where it computes, or
        ``planes`` [3, s, s] of float32 that are so already. A model file that does not say gets ``images_of``.
    :param prompt_len: P, tokens of the padded prompt (released pi0: 48). :param image_size: pixels, square.
    :param cameras: roles in the order in which they enter the prefix.
    :param dtype: of the towers' matrices and activations; norms, action heads and the actions stay float32.
    :param vision_dtype: ``float32`` keeps the vision tower and its projector exact, as lerobot's bfloat16 does.
    :param time_rule: how the flow times are rounded: ``accumulate`` (openpi) or ``direct`` (lerobot).
    :param min_period, max_period: of the time embedding's sinusoids, in flow time.
    :param kernels: which operators run: layers/ops.py.
    :param graphs: ``auto`` captures CUDA graphs on an accelerator at load, ``none`` never.
    :param quant: a scheme of quant/schemes.py for the prefix stack's matrices, and for the action expert's where an
        accelerator has a fused form of its coded layers. Without one, in a batch of several rows, with a clean prefix
        and where guidance takes a gradient the expert runs as it is. The vision tower is not coded: it would take
        longer (LOG.md).
    :param quant_keep: patterns of matrices that stay as they are, such as ``language.layers.[0-5].qkv``. The expert is
        coded as a whole: to keep one of its matrices (``expert.layers.0.down``) or all (``expert.*``) is the same.
    :param quant_scales: file of ``phyai calibrate``; empty: the one in the checkpoint's folder, and random weights are
        calibrated at load.
    :param prompt_buckets: prompt lengths that graphs are captured for, beside ``prompt_len``; a prompt takes the next.
    """

    variant: Literal["pi0", "pi05"] = "pi05"
    vocab: Count = 257152
    vis_width: Count = 1152
    vis_depth: Count = 27
    vis_mlp: Count = 4304
    vis_heads: Count = 16
    width: Count = 2048
    depth: Count = 18
    mlp: Count = 16384
    heads: Count = 8
    kv_heads: Count = 1
    head_dim: Count = 256
    exp_width: Count = 1024
    exp_mlp: Count = 4096
    action_dim: Count = 32
    action_horizon: Count = 50
    num_steps: Count = 10
    prompt_len: Count = 200
    rope_theta: Annotated[float, Meta(gt=1)] = 10000.0
    image_size: Count = 224
    images: Images = "planes"
    patch: Count = 14
    cameras: Annotated[tuple[str, ...], Meta(min_length=1)] = (
        "base_0_rgb",
        "left_wrist_0_rgb",
        "right_wrist_0_rgb",
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    vision_dtype: Literal["same", "float32"] = "same"
    time_rule: Literal["accumulate", "direct"] = "accumulate"
    min_period: Positive = 4e-3
    max_period: Positive = 4.0
    kernels: Literal["auto", "triton", "flashinfer", "reference"] = "auto"
    quant: Literal["none", "w8a8_fp8"] = "none"
    quant_keep: tuple[str, ...] = ()
    quant_scales: str = ""
    graphs: Literal["auto", "none"] = "auto"
    prompt_buckets: tuple[Count, ...] = (16, 48, 96)

    def __post_init__(self) -> None:
        rules = (
            (self.vis_width % self.vis_heads == 0, "vis_width must be a multiple of vis_heads"),
            (self.heads % self.kv_heads == 0, "heads must be a multiple of kv_heads"),
            (self.head_dim % 2 == 0, "head_dim must be even (rotary pairs)"),
            (
                self.exp_width % 2 == 0 and self.exp_width >= 4,
                "exp_width must be even and at least 4 (sine and cosine)",
            ),
            (self.image_size >= self.patch, "image_size must be at least one patch"),
            (len(set(self.cameras)) == len(self.cameras), "cameras must differ"),
            (self.min_period < self.max_period, "min_period must be below max_period"),
            (self.quant == "none" or self.dtype == "bfloat16", "quant needs dtype: bfloat16"),
        )
        for holds, rule in rules:
            if not holds:
                raise ValueError(rule)

    @property
    def image_tokens(self) -> int:
        """Tokens per image; a border narrower than a patch is not seen."""
        return (self.image_size // self.patch) ** 2

    @property
    def image(self) -> BufferSpec:
        """One camera's."""
        size = self.image_size
        if self.images == "bytes":
            return BufferSpec((size, size, 3), "uint8")
        return BufferSpec((3, size, size), "float32")

    @property
    def state_tokens(self) -> int:
        """Tokens between prefix and actions: pi0 has one for the state."""
        return 1 if self.variant == "pi0" else 0

    def spec(self) -> ModelSpec:
        """What a model of these options declares to the runner and the adapter."""
        cameras = len(self.cameras)
        inputs = {
            "images": BufferSpec((cameras, *self.image.shape), self.image.dtype),
            "image_mask": BufferSpec((cameras,), "bool"),
            "tokens": BufferSpec((self.prompt_len,), "int64"),
            "token_mask": BufferSpec((self.prompt_len,), "bool"),
        }
        if self.variant == "pi0":
            inputs["state"] = BufferSpec((self.action_dim,), "float32")
        return ModelSpec(
            family=self.variant,
            horizon=self.action_horizon,
            action_dim=self.action_dim,
            times=flow_times(self.num_steps, self.time_rule),
            inputs=inputs,
            cameras=self.cameras,
            vocabulary=self.vocab,
        )


def images_of(resize: str) -> Images:
    """How images come to the model: as bytes where the resampler ends in them, a quarter of what planes are.

    :param resize: of the model file.
    """
    return "bytes" if resize == "pillow" else "planes"
