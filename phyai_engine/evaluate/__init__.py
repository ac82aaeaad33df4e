"""Closed-loop evaluation in the simulator: episodes of a manifest, the node's own control loop, a virtual clock."""
