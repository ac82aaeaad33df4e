"""``phyai bench``: what one chunk costs, phase by phase, on this machine."""
