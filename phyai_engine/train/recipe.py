"""What is trained, on what, for how long."""

from __future__ import annotations

from msgspec import Struct

from phyai_engine.models.pi_options import PiOptions


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training.

    :param robot: a robot file or name. :param model: of the network. :param max_delay: d_max of the clean prefixes.
    :param episodes: of the expert alone. :param corrections: how many more in each later round, in which the policy
        plays and the expert takes over. :param rounds: of training, the first on the expert's episodes alone.
    :param stages: fewest and most instructions of an episode. :param collect_minutes: a collection ends then, whatever
        it has.
    :param steps: of one round. :param minutes: a round ends then, with the learning rate brought down by then.
    :param batch: observations of a step. :param draws: noises and flow times for each of them: the prefix, which costs
        most, is computed once for all. :param average: kept share of the running average of the weights, which is what
        plays.
    :param check_episodes: of each task at the end, each of at most ``check_steps`` steps for each instruction.
    :param shift_px, light: largest random shift of the images and change of their brightness.
    :param lag: shares of images that are 0, 1, 2 .. steps older than the state, as cameras of a real robot are.
    """

    robot: str = "sawyer_20hz"
    model: PiOptions = PiOptions(
        vocab=768,
        vis_width=216,
        vis_depth=4,
        vis_mlp=432,
        vis_heads=3,
        width=256,
        depth=4,
        mlp=512,
        heads=4,
        kv_heads=1,
        head_dim=64,
        exp_width=192,
        exp_mlp=384,
        action_dim=4,
        action_horizon=20,
        num_steps=5,
        prompt_len=32,
        image_size=160,
        patch=20,
        cameras=("base_0_rgb", "left_wrist_0_rgb"),
        time_rule="direct",
        graphs="none",
        kernels="reference",
    )
    max_delay: int = 10
    episodes: int = 2000
    corrections: int = 2000
    rounds: int = 3
    stages: tuple[int, int] = (2, 3)
    collect_minutes: float = 1.2
    steps: int = 20000
    minutes: float = 2.0
    batch: int = 512
    draws: int = 4
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    clip: float = 1.0
    average: float = 0.999
    shift_px: int = 2
    light: float = 0.15
    lag: tuple[float, ...] = (0.55, 0.2, 0.15, 0.1)
    seed: int = 0
    check_episodes: int = 10
    check_steps: int = 200


SMOKE = Recipe(
    model=PiOptions(
        vocab=768,
        vis_width=72,
        vis_depth=1,
        vis_mlp=72,
        vis_heads=1,
        width=32,
        depth=2,
        mlp=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        exp_width=32,
        exp_mlp=32,
        action_dim=4,
        action_horizon=20,
        num_steps=2,
        prompt_len=32,
        image_size=80,
        patch=20,
        cameras=("base_0_rgb", "left_wrist_0_rgb"),
        time_rule="direct",
        graphs="none",
        kernels="reference",
    ),
    episodes=1,
    corrections=1,
    rounds=2,
    stages=(1, 1),
    steps=3,
    batch=4,
    draws=2,
    check_episodes=1,
    check_steps=5,
)
"""Every part once, in seconds: what it makes has learned nothing."""
