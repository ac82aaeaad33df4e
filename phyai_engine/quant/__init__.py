"""Weights and activations in fewer bits: which schemes there are, what they need to know, how a model takes them."""
