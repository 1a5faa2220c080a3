"""Dynamic-mask attention over a sequence that is split across ranks.

Every rank puts the best keys of earlier ranks (kept_keys.py says why they are enough) in front of its own. Keys keep
their order, so ties resolve as in one process; each rank then makes one ordinary call. No ring, no merging of results,
and shapes that depend on nothing but shapes.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import functional
from .._arguments import as_int, check_bool, check_optional_tensor, check_tensor
from ._dtensor import from_share, to_shares
from ._ranks import check_agreement, check_shares, group_of, wants_gradient
from .kept_keys import GatheredKeys, prepend_kept, start_gather
from .packed import check_cu_seqlens


def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    scores: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    selection: str = "causal",
    seqlens_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    gathered: GatheredKeys | None = None,
    check: bool = False,
) -> Tensor:
    """`flash_dmattn.dynamic_mask_attention` of a whole sequence, of which every rank of `group` holds a share.

    Rank r of P has the tokens r S / P to (r + 1) S / P - 1. Every rank sends its `window_size` best keys to all others
    and receives theirs: (P - 1) w Hkv (2 D elements and a bias) bytes each way in the forward, (P - 1) w Hkv (2 D + 1)
    float32 in the backward (float64 for float64). The host does not wait for them. Results are those of one process but
    for roundings of gradients, which are added up in float32. Source: docs/distributed.md.

    All ranks call it, and all run the backward if one does: a rank that needs no gradient itself still has others'.

    Args:
        query: (B, S / P, H, D): this rank's share, the same shape on every rank.
        key, value: (B, S / P, Hkv, D), as query.
        key_bias: (B or 1, Hkv or 1, S / P), query's dtype or float32.
        window_size: keys that a row sees at most, of the whole sequence.
        group: the ranks, in the order of the sequence; or a mesh of one dimension. DTensors have one: query, key, value
            and what is per key, all split along the sequence, may be given instead of shares.
        scores: what to select by, detached; default key_bias. (B or 1, Hkv or 1, S / P), any floating dtype.
        key_mask: bool (B or 1, heads of scores or 1, S / P); False hides the key, before the selection.
        cu_seqlens: packed documents, int32 (documents + 1), of the whole sequence and the same on every rank: where
            each begins and the last ends, wherever shares begin. Rows see keys of their own document only, and the
            selection restarts in each. Contents are clamped as in `KeyIntervals.documents`.
        selection, seqlens_k: for the names of the other function only; see below.
        scale, softcap, deterministic: as in `flash_dmattn.dynamic_mask_attention`.
        gathered: the exchange, if `gather_kept_keys` has started it, with the same objects; group need not be given.
        check: let ranks compare shapes, dtypes and options in this call, which waits for all of them. The first call
            in a group does so, and all with TORCH_DISTRIBUTED_DEBUG=DETAIL; others trust the ranks.

    Returns:
        out (B, S / P, H, D), this rank's share; of DTensors (B, S, H, D), split likewise.

    Raises:
        TypeError: as in `flash_dmattn.dynamic_mask_attention`.
        ValueError: as there, and what is not exact this way, which is selection "per_key" (every rank's keys compete
            with later ones), seqlens_k (use key_mask), a head of scores or of the bias for each query head (heads of a
            group would see different keys of other ranks), and shares of unequal length; ranks that disagree; gathered
            of other arguments. A rank that is gone or never calls ends in torch's own timeout on the others.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value), ("key_bias", key_bias)):
        check_tensor(name, tensor)
    for name, tensor in (("scores", scores), ("key_mask", key_mask), ("seqlens_k", seqlens_k)):
        check_optional_tensor(name, tensor)
    check_cu_seqlens(cu_seqlens)
    check_bool("check", check)
    window_size = as_int("window_size", window_size)
    if gathered is not None and not isinstance(gathered, GatheredKeys):
        raise TypeError(
            f"gathered must be what gather_kept_keys returns, or None; got gathered of type {type(gathered).__name__}"
        )
    given = {"key": key, "value": value, "key_bias": key_bias, "scores": scores, "key_mask": key_mask}
    shares, mesh = to_shares({"query": query} | given, group)
    if gathered is None:
        process_group = group_of(group if mesh is None else mesh)
    else:
        gathered.check_given(given | {"cu_seqlens": cu_seqlens}, window_size, group)
        process_group = gathered.group
    options = {"window_size": window_size, "scale": scale, "softcap": softcap, "selection": selection}
    options["gradients"] = wants_gradient(shares)
    facts = shares | {"seqlens_k": seqlens_k, "cu_seqlens": cu_seqlens}
    check_agreement(process_group, "dynamic_mask_attention", facts, options, check)
    query = shares["query"]
    check_shares({name: shares[name] for name in ("query", "key", "value")})
    _refuse_inexact(selection, seqlens_k)
    if gathered is None:
        gathered = start_gather(given, shares, window_size, process_group, cu_seqlens)
    key, value, key_bias, scores, key_mask = prepend_kept(query, shares, gathered)
    out = functional.dynamic_mask_attention(
        query,
        key,
        value,
        key_bias,
        window_size,
        scores=scores,
        key_mask=key_mask,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        **gathered.bounds(),
    )
    return out if mesh is None else from_share(out, mesh)


def _refuse_inexact(selection: str, seqlens_k: Tensor | None) -> None:
    if selection != "causal":
        raise ValueError(
            "selection must be 'causal' where the sequence is split across ranks, since later keys compete in others; "
            f"got selection {selection!r}"
        )
    if seqlens_k is not None:
        raise ValueError("seqlens_k is not supported where the sequence is split across ranks: hide keys by key_mask")
