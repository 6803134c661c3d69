"""Leaves out what needs a library that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

NEED_MLX = ["test_mlx_bounds.py", "test_mlx_engine.py", "test_mlx_formats.py"]

collect_ignore = [] if find_spec("mlx") else NEED_MLX
