"""Backends by name: which one "auto" takes, and what is said when one can't run."""

from __future__ import annotations

import pytest

from mvllm.backends import registry
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.registry import create_backend
from mvllm.core.errors import BackendUnavailable, ConfigError


def test_without_metal_auto_is_the_cpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.platform, "system", lambda: "Linux")
    assert create_backend("auto").name == "cpu"


def test_where_there_is_metal_auto_is_the_mlx_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    mlx = pytest.importorskip("mlx.core")
    monkeypatch.setattr(registry.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(registry.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(mlx.metal, "is_available", lambda: True)
    assert create_backend("auto").name == "mlx"


def test_a_mac_without_mlx_falls_back_to_the_cpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(registry.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert create_backend("auto").name == "cpu"


def test_a_missing_library_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'mvllm-engine\[mlx\]'"):
        create_backend("mlx")


def test_a_gpu_that_is_not_there_is_named() -> None:
    mlx = pytest.importorskip("mlx.core")
    if mlx.is_available(mlx.gpu):
        pytest.skip("MLX has a GPU here")
    with pytest.raises(BackendUnavailable, match="no GPU"):
        create_backend("mlx", mlx=MlxOptions(device="gpu"))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, cpu, mlx, reference"):
        create_backend("tpu")


@pytest.mark.parametrize("setting", [{"rows_apart": -1}, {"activations": "f64"}, {"device": "metal"}])
def test_mlx_options_refuse_what_they_cannot_mean(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        MlxOptions(**setting)  # type: ignore[arg-type]
