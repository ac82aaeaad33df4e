"""Demonstrations in the simulator, and the training of a small pi0.5 on them. Needs torch and the simulator's extra."""
