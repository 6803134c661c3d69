"""MLX-quantized folders on the CPU backend: near the reference, and the same bits in every batch."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from mvllm.backends.registry import create_backend
from mvllm.bench.micro.crossover import compare_forms, shapes_of
from mvllm.core.load.checkpoint import load_checkpoint
from tests.conformance.random_models import Row, geometry, make_batch
from tests.mlx_files import write_tiny_mlx

BLOCK_SIZE = 4
EIGHT_BIT_LIMIT = 0.1
"""Largest relative rms difference of logits when activations are rounded to 8 bits."""

OVERRIDES = {
    "model.layers.0.mlp.down_proj": {"bits": 3, "group_size": 128},
    "model.layers.1.self_attn.q_proj": {"bits": 4, "group_size": 32},
    "model.layers.1.mlp.gate_proj": False,
}


def test_a_folder_with_settings_by_matrix_runs_like_the_reference_alone_and_in_a_batch(
    tmp_path: Path,
) -> None:
    write_tiny_mlx(tmp_path, bits=8, group_size=64, scale_type="BF16", overrides=OVERRIDES)
    checkpoint = load_checkpoint(tmp_path)
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, checkpoint.spec.vocab_size, (3, 12)).tolist()
    tables = [[7, 2, 9], [1, 30, 4], [11, 12, 20]]
    rows = [
        Row(sequence, 0, 12, table, num_logits=12) for sequence, table in zip(sequences, tables, strict=True)
    ]
    with (
        closing(
            create_backend("cpu", threads=2).load(checkpoint.spec, checkpoint.weights, geometry())
        ) as model,
        closing(
            create_backend("reference").load(checkpoint.spec, checkpoint.weights, geometry())
        ) as reference,
    ):
        batch = make_batch(rows, BLOCK_SIZE)
        together, expected = model.logits(batch), reference.logits(batch)
        assert np.std(together - expected) / np.std(expected) <= EIGHT_BIT_LIMIT
        alone = [model.logits(make_batch([row], BLOCK_SIZE)) for row in rows]
    assert np.array_equal(together, np.concatenate(alone))


def test_products_of_a_folder_can_be_timed(tmp_path: Path) -> None:
    write_tiny_mlx(tmp_path, bits=8, group_size=64, scale_type="BF16", overrides=OVERRIDES)
    shapes = shapes_of(load_checkpoint(tmp_path))
    assert {shape.format_name for shape in shapes} == {"AFFINE4_BF16", "AFFINE8_BF16", "BF16"}
    [result] = compare_forms(shapes[:1], threads=1, seconds=0, tokens=(1, 2))
    assert all(seconds > 0 for timing in result.timings for seconds in timing.seconds.values())
