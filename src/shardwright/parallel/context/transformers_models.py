"""Models of `transformers`: their attention and their masks, replaced through its registries.

Two attention implementations are registered, `shardwright_heads` and `shardwright_gather`, with a function that
describes masks instead of making tensors of all pairs of positions. On plain tensors they compute what `sdpa` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwright.errors import PlanError, UnsupportedError
from shardwright.parallel.context.attention import Mode, attend, refuse_dropout
from shardwright.parallel.context.layouts import context_dim
from shardwright.parallel.context.mask import Mask
from shardwright.parallel.plan.transformers_model import own_configuration
from shardwright.tensor.base.sequence_attention import sequence_attention
from shardwright.tensor.base.tagging import DTensorBase

__all__ = ["check_model", "use_context_attention"]

# Arguments that change what attention computes, and that are not known here.
_REFUSED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "cache")


def check_model(model: Any, mode: Mode, ranks: int, tensor_ranks: int) -> None:
    """Raise `PlanError` if the attention of a model cannot be replaced, or has too few heads to exchange."""
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise PlanError(
            f"parallelize: {name} does not take its attention from the registry of transformers (AttentionInterface), "
            "so it cannot be context parallel: use a mesh without cp"
        )
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if mode == "heads" and isinstance(heads, int) and heads // tensor_ranks < ranks:
        over_tp = f" over {tensor_ranks} ranks of tp" if tensor_ranks > 1 else ""
        raise PlanError(
            f'parallelize: ContextParallel("heads") exchanges heads among the {ranks} ranks along cp, but {name} has '
            f'{heads} heads{over_tp}: use ContextParallel("gather"), or a smaller cp'
        )


def use_context_attention(model: Any, mode: Mode) -> None:
    """Make a model of `transformers` use context-parallel attention, by its configuration."""
    from transformers import AttentionInterface, AttentionMaskInterface

    own_configuration(model)
    name = f"shardwright_{mode}"
    AttentionInterface.register(name, partial(_attention, mode))
    AttentionMaskInterface.register(name, _mask)
    model.set_attn_implementation(name)


def _attention(
    mode: Mode,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """Compute attention as `sdpa_attention_forward` of transformers does."""
    if _is_sharded(query):
        refuse_dropout(dropout)
        given = [name for name in _REFUSED if options.get(name) is not None]
        if given or options.get("output_attentions"):
            raise UnsupportedError(
                f"context-parallel attention: {type(module).__name__} passes {(given or ['output_attentions'])[0]!r}, "
                "which is not supported: use a mesh without cp"
            )
        if attention_mask is not None and not isinstance(attention_mask, Mask):
            shape = tuple(getattr(attention_mask, "shape", ()))
            raise UnsupportedError(
                f"context-parallel attention: a mask of shape {shape} ({type(attention_mask).__name__}) would need all "
                "pairs of positions on every rank: pass a padding mask of shape (samples, positions), or none"
            )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask = attention_mask if isinstance(attention_mask, Mask) else Mask(causal=causal and query.shape[2] > 1)
        out = attend(mode, query, key, value, mask, scaling)
        if out is not NotImplemented:
            return out.transpose(1, 2).contiguous(), None
    if isinstance(attention_mask, Mask):  # sequences that are not sharded
        attention_mask = attention_mask.as_tensor(query.shape[2], key.shape[2], query.device)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
    result: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result


def _is_sharded(query: Any) -> bool:
    if not isinstance(query, DTensorBase):
        return False
    over = context_dim(query._layout.mesh)
    return over is not None and query._layout.placements[over].is_shard(2)


def _mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Any:
    """Describe the mask of a self-attention inside the forward of a parallel model; else make the tensor for `sdpa`.

    None if the module's `is_causal` says all, as for `sdpa`.
    """
    whole = isinstance(q_offset, int) and isinstance(kv_offset, int) and not q_offset and not kv_offset
    padded = attention_mask is not None and tuple(attention_mask.shape[1:]) != (kv_length,)
    if sequence_attention() is None or not whole or q_length != kv_length or q_length == 1 or padded:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            **options,
        )
    mask = Mask(**{**_described(mask_function), **({} if attention_mask is None else {"padding": attention_mask})})
    if mask.window is not None and not mask.causal:
        raise UnsupportedError("context-parallel attention: a sliding window without a causal mask is not supported")
    skips = allow_is_causal_skip if mask.causal else allow_is_bidirectional_skip
    return None if mask.is_simple and skips else mask


def _described(function: Any) -> dict[str, Any]:
    """Return what a mask function of transformers means, as arguments of `Mask`; raise if it is not known."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return {"causal": True}
    if function is masking_utils.bidirectional_mask_function:
        return {}
    made_by = getattr(function, "__qualname__", repr(function)).partition(".<locals>")[0]
    values = {}
    if getattr(function, "__module__", None) == masking_utils.__name__:
        cells = function.__closure__ or ()
        values = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    match made_by, values:
        case "and_masks", {"mask_functions": parts}:
            described: dict[str, Any] = {}
            for part in map(_described, parts):
                if described.keys() & part.keys() - {"causal"}:
                    break
                described |= part
            else:
                return described
        case "sliding_window_overlay", {"sliding_window": int(window)}:
            return {"window": window}
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as segments}:
            return {"segments": segments}
        case "padding_mask_function", {"padding_mask": Tensor() as padding}:
            return {"padding": padding}
    raise UnsupportedError(
        f"context-parallel attention: the mask function {made_by} of transformers is not supported: causal masks, "
        "sliding windows, padding and packed sequences are. Use a mesh without cp"
    )
