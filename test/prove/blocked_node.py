"""The policy node with one more callback on its executor: Float32 on ~/block sleeps so many seconds, below 0 raises."""

from __future__ import annotations

import time
from typing import Any

from std_msgs.msg import Float32

from phyai_ros.policy_node import PolicyNode
from phyai_ros.spin import StopFlag, run


class BlockedNode(PolicyNode):
    """See the module."""

    def __init__(self, flag: StopFlag, **options: Any) -> None:
        super().__init__(flag, **options)
        self.create_subscription(Float32, "~/block", self._guarded(self._on_block), 1)

    def _on_block(self, message: Float32) -> None:
        if message.data < 0:
            raise ZeroDivisionError("planted")
        time.sleep(message.data)


if __name__ == "__main__":
    raise SystemExit(run(BlockedNode))
