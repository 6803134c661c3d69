"""The forward pass, written once. Every backend runs this; a new architecture is a change here."""

from __future__ import annotations

from collections.abc import Callable

from mvllm.core.model.spec import LayerSpec, ModelSpec
from mvllm.core.tensor import Handle, LayerWeights, ModelWeights, TensorOps, Weight


def forward(
    ops: TensorOps[Handle],
    spec: ModelSpec,
    weights: ModelWeights,
    tap: Callable[[Handle], None] | None = None,
) -> Handle:
    """Logits of the batch's logit rows, f32[S, vocab].

    `tap`, if given, sees the activations [T, hidden] after the embedding and after each layer.
    """
    x = ops.embed(weights.embedding)
    if spec.embedding_scale != 1.0:
        x = ops.scale(x, spec.embedding_scale)
    if tap:
        tap(x)
    for index, (layer_spec, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        attention = _attention(ops, spec, layer_spec, layer, index, x)
        x = ops.add(x, _maybe_norm(ops, attention, layer.post_attention_norm, spec.norm_eps))
        x = ops.add(x, _maybe_norm(ops, _mlp(ops, spec, layer, x), layer.post_mlp_norm, spec.norm_eps))
        if tap:
            tap(x)
    x = ops.rms_norm(ops.take_logit_rows(x), weights.final_norm, spec.norm_eps)
    logits = ops.linear(x, weights.head)
    return logits if spec.final_soft_cap is None else ops.soft_cap(logits, spec.final_soft_cap)


def _attention(
    ops: TensorOps[Handle],
    spec: ModelSpec,
    layer_spec: LayerSpec,
    layer: LayerWeights,
    index: int,
    x: Handle,
) -> Handle:
    h = ops.rms_norm(x, layer.attention_norm, spec.norm_eps)
    q = ops.linear(h, layer.q, layer.q_bias)
    k = ops.linear(h, layer.k, layer.k_bias)
    v = ops.linear(h, layer.v, layer.v_bias)
    q = ops.rotate(_maybe_norm(ops, q, layer.q_norm, spec.norm_eps), layer_spec.rope)
    k = ops.rotate(_maybe_norm(ops, k, layer.k_norm, spec.norm_eps), layer_spec.rope)
    mixed = ops.attend(
        q,
        k,
        v,
        layer=index,
        window=layer_spec.window,
        scale=spec.attention_scale,
        soft_cap=spec.attention_soft_cap,
    )
    return ops.linear(mixed, layer.o, layer.o_bias)


def _mlp(ops: TensorOps[Handle], spec: ModelSpec, layer: LayerWeights, x: Handle) -> Handle:
    h = ops.rms_norm(x, layer.mlp_norm, spec.norm_eps)
    gated = ops.gate(
        ops.linear(h, layer.gate, layer.gate_bias),
        ops.linear(h, layer.up, layer.up_bias),
        spec.activation,
    )
    return ops.linear(gated, layer.down, layer.down_bias)


def _maybe_norm(ops: TensorOps[Handle], x: Handle, gain: Weight | None, eps: float) -> Handle:
    return x if gain is None else ops.rms_norm(x, gain, eps)
