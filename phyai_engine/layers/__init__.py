"""Tensor maths shared by the model families that is no operator: tables and shapes."""
