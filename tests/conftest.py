"""Shared by all tests: mlxft is imported first, so that its choice of BLAS is the one MLX gets."""

import mlxft  # noqa: F401
