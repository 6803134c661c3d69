"""Hypothesis profiles: dev (default), ci (HYPOTHESIS_PROFILE=ci: always the same examples), nightly."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("dev", max_examples=50, stateful_step_count=30, **_COMMON)
settings.register_profile("ci", max_examples=80, stateful_step_count=30, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=20_000, stateful_step_count=60, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
