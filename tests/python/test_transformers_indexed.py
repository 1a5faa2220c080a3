"""attn_implementation="dmattn" with the models of Transformers that choose the keys of every query: they equal their
own eager and sdpa attention, and attention is given lists of keys, no mask of Sq * Sk."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from flash_dmattn import KeyIndices, KeyIntervals
from flash_dmattn.integrations import attention_interface
from flash_dmattn.integrations.attention_interface import dmattn_attention_forward
from tiny_models import (
    DEEPSEEK_V4,
    EXPERTS,
    HEADS,
    INDEXER,
    LENGTH,
    PADDING,
    PADDING_RIGHT,
    SIZES,
    VOCABULARY,
    tiny,
    with_attention,
)
from torch import Tensor, nn
from transformers import masking_utils

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "num_key_value_heads": 4}
# Values narrower than queries and keys, as DeepSeek's are.
DEEPSEEK = SIZES | LATENT | EXPERTS | INDEXER | {"v_head_dim": 6, "n_group": 1, "topk_group": 1}
SHARED = {"indexer_types": ["full", "shared"]}  # the second layer uses the lists of the first
WINDOW = {f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank")} | {"sliding_window": 7}
WINDOW |= {f"swa_num_{name}_heads": 4 for name in ("attention", "key_value")}
WINDOW |= {"swa_head_dim": 8, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8}
VISION = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"intermediate_size": 16, "head_dim": 8, "image_size": 28, "patch_size": 14}
MINIMAX = SIZES | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48}
MINIMAX |= {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2, "rotary_dim": 4}

MODELS = {
    "axk2": ("AXK2ForCausalLM", DEEPSEEK),
    "deepseek_v32": ("DeepseekV32ForCausalLM", DEEPSEEK),
    "dots3_note": (
        "Dots3NoteForCausalLM",
        DEEPSEEK | WINDOW | {"layer_types": ["indexed_attention", "sliding_attention"]},
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", DEEPSEEK | SHARED),
    "hy_v4": ("HYV4ForCausalLM", DEEPSEEK | SHARED),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", MINIMAX | {"layer_types": ["full_attention", "minimax_m3_sparse"]}),
    # The indexer scores keys of padding, too, whose states differ behind a layer: nothing here, an average in eager.
    "minimax_m3_vl, one layer": (
        "MiniMaxM3VLForCausalLM",
        MINIMAX | {"num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"]},
    ),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        {"text_config": DEEPSEEK | SHARED, "vision_config": VISION, "image_token_index": 3},
    ),
    # More entries than a row has keys: those of padding and of slots that are empty are listed while tokens are made.
    "deepseek_v32, long lists": ("DeepseekV32ForCausalLM", DEEPSEEK | {"index_topk": 18}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", DEEPSEEK_V4),  # no lists: it appends to its mask
}
WITH_LISTS = [name for name in MODELS if name != "deepseek_v4"]
WITHOUT_SDPA = ("hy_v4", "deepseek_v4")
# Their own choice of blocks depends on where padding stands, and on what it holds.
RIGHT_ONLY = ("minimax_m3_vl", "deepseek_v4")
PADDED = {"plain": None, "left": PADDING, "right": PADDING_RIGHT}


@functools.cache
def model_of(name: str) -> transformers.PreTrainedModel:
    kind, settings = MODELS[name]
    return tiny(kind, settings)


def prompt(length: int = LENGTH) -> Tensor:
    """Without the token that stands for an image."""
    return torch.randint(4, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


def assert_close(got: Tensor, expected: Tensor, name: str) -> None:
    tolerance = 1e-4 * max(float(expected.detach().abs().max()), 1e-3)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=tolerance, msg=lambda text: f"{name}: {text}")


# ---- Training


TRAINED = [
    (name, "eager", padded) for name in MODELS for padded in PADDED if padded != "left" or name not in RIGHT_ONLY
]
TRAINED += [(name, "sdpa", "right" if name in RIGHT_ONLY else "left") for name in MODELS if name not in WITHOUT_SDPA]


def test_models_without_sdpa() -> None:
    assert [name for name in MODELS if not model_of(name)._supports_sdpa] == list(WITHOUT_SDPA)


@pytest.mark.parametrize(("name", "theirs", "padded"), TRAINED)
def test_training_equals_other_attentions(name: str, theirs: str, padded: str) -> None:
    """Logits, loss and gradients, and the loss behind a step with them."""
    first, text, mask = model_of(name), prompt(), PADDED[padded]
    real = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    results = []
    for implementation in (theirs, "dmattn"):
        model = with_attention(first, implementation).train()
        # The last row of padding on the left would predict the first token.
        labels = text.masked_fill(~(real & real.roll(1, 1)), -100)
        outputs = model(text, attention_mask=mask, labels=labels)
        outputs.loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
            second = model(text, attention_mask=mask, labels=labels).loss
        results.append((outputs.logits[real], grads, torch.stack([outputs.loss, second]).detach()))
    (logits, grads, losses), (our_logits, our_grads, our_losses) = results
    assert_close(our_logits, logits, "logits")
    assert_close(our_losses, losses, "losses")
    assert any("self_attn" in name for name in grads) and grads.keys() == our_grads.keys()
    for name, grad in grads.items():
        assert_close(our_grads[name], grad, name)


# ---- Prefill and generation

GENERATED = [
    (name, padded, cache) for name in WITH_LISTS for padded in ("plain", "left") for cache in ("dynamic", "static")
]
GENERATED = [case for case in GENERATED if case[1] == "plain" or case[0] not in RIGHT_ONLY]
GENERATED += [("deepseek_v4", "plain", "dynamic")]  # Transformers has no static cache for it


@pytest.mark.parametrize(("name", "padded", "cache"), GENERATED)
def test_generation_equals_eager(name: str, padded: str, cache: str) -> None:
    """Prefill of 19 rows and steps of one, with keys of padding and with slots of a static cache that are empty."""
    eager, text = model_of(name), prompt()
    mask = torch.ones_like(PADDING) if padded == "plain" else PADDING
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    expected, got = (model.generate(text, attention_mask=mask, **settings) for model in (eager, with_attention(eager)))
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), "logits")


@pytest.mark.parametrize("first", [3, LENGTH - 3])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", WITH_LISTS)
def test_prefill_in_two_parts_equals_eager(name: str, static: bool, first: int) -> None:
    eager, text = model_of(name), prompt(2 * LENGTH)
    parts = []
    for model in (eager, with_attention(eager)):
        config = model.config.get_text_config()
        cache = transformers.StaticCache(config, 50) if static else transformers.DynamicCache(config=config)
        with torch.no_grad():
            parts.append([model(part, past_key_values=cache).logits for part in text.split([first, 38 - first], 1)])
    for expected, got in zip(*parts, strict=True):
        assert_close(got, expected, "logits")


# ---- What attention is given


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, dict[str, object]]]:
    """The masks of all calls of attention, each with the call's other arguments."""
    seen = []
    attention = attention_interface.attention

    def spy(*tensors: Tensor, mask: object = None, **arguments: object) -> object:
        seen.append((mask, arguments))
        return attention(*tensors, mask=mask, **arguments)

    monkeypatch.setattr(attention_interface, "attention", spy)
    return seen


@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("name", WITH_LISTS)
def test_attention_gets_lists(name: str, padded: str, calls: list) -> None:
    model = with_attention(model_of(name), "eager")
    model.set_attn_implementation("dmattn")
    config = model.config.get_text_config()
    with torch.no_grad():
        outputs = model(prompt(), attention_mask=PADDED[padded])
        model(prompt(1), past_key_values=outputs.past_key_values, attention_mask=_longer(PADDED[padded]))
    layers = len(config.layer_types)
    assert len(calls) == 2 * layers
    for layer, (mask, arguments) in enumerate(calls):
        assert arguments["bias"] is None
        if config.layer_types[layer % layers] in ("full_attention", "sliding_attention"):
            assert not isinstance(mask, KeyIndices)
            continue
        assert isinstance(mask, KeyIndices)
        blocks = name.startswith("minimax")
        assert mask.block_size == (4 if blocks else 1)
        entries = config.index_topk_blocks if blocks else config.index_topk
        assert mask.shape[1:] == ((2 if blocks else 1), LENGTH if layer < layers else 1, entries)
        # The causal rule and padding are intervals, or bools of keys.
        if layer < layers:
            assert isinstance(mask.intervals, KeyIntervals) or (padded == "plain" and arguments["is_causal"])
        else:
            assert padded == "plain" or mask.intervals is not None or mask.key_mask is not None


def _longer(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else nn.functional.pad(mask, (0, 1), value=1)


def masks_of(name: str, **settings: object) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Those of full layers and of layers with a window."""
    config = type(model_of(name).config)(**(MODELS[name][1] | settings), attn_implementation="dmattn")
    arguments = {"config": config, "inputs_embeds": torch.zeros(2, LENGTH, 8), "attention_mask": PADDING}
    masks = [masking_utils.create_causal_mask(**arguments, past_key_values=None)]
    if getattr(config, "sliding_window", None) is not None:
        masks.append(masking_utils.create_sliding_window_causal_mask(**arguments, past_key_values=None))
    return [(mask.dtype, tuple(mask.shape)) for mask in masks]


INTERVALS, DENSE = (torch.int32, (2, 1, 2, LENGTH)), (torch.bool, (2, 1, LENGTH, LENGTH))


@pytest.mark.parametrize("name", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "minimax_m3_vl"])
def test_only_indexers_get_masks_of_all_scores(name: str) -> None:
    assert masks_of(name) == [INTERVALS if name == "minimax_m3_vl" else DENSE]


def test_only_indexers_of_dots3_note_get_masks_of_all_scores() -> None:
    assert masks_of("dots3_note") == [DENSE, INTERVALS]
    without = {"layer_types": ["full_attention", "sliding_attention"], "use_dsa": False}
    assert masks_of("dots3_note", **without) == [INTERVALS, INTERVALS]


# ---- The function itself

ROWS, KEYS, HELD_HEADS, ALL_HEADS = 24, 24, 2, 8


class Indexed(nn.Module):
    """What an attention module with lists of blocks tells."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.indexer = nn.Module()
        self.indexer.block_size = block_size


def attend(
    block_size: int | None, rows: int = ROWS, dtype: torch.dtype = torch.float64, **keywords: object
) -> tuple[Tensor, Tensor, Tensor]:
    """out, and the scores and values of its query heads."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, ALL_HEADS, rows, 8, dtype=dtype, generator=generator)
    key, value = torch.randn(2, 2, HELD_HEADS, KEYS, 8, dtype=dtype, generator=generator)
    module = nn.Module() if block_size is None else Indexed(block_size)
    out, _ = dmattn_attention_forward(module, query, key, value, keywords.pop("attention_mask", None), **keywords)
    key, value = (tensor.repeat_interleave(ALL_HEADS // HELD_HEADS, 1) for tensor in (key, value))
    return out.transpose(1, 2), query @ key.mT / 8**0.5, value


def expected_out(scores: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Rows that see nothing are 0."""
    visible = visible.expand_as(scores)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.where(visible.any(-1, keepdim=True), weights, 0.0) @ value


def listed(lists: Tensor, block_size: int) -> Tensor:
    """lists (B, heads, rows, n) -> bool (B, H, rows, KEYS), entry by entry."""
    visible = torch.zeros(*lists.shape[:3], KEYS, dtype=torch.bool)
    for b, h, i, e in torch.cartesian_prod(*map(torch.arange, lists.shape)).tolist():
        begin = int(lists[b, h, i, e]) * block_size
        if begin >= 0:
            visible[b, h, i, begin : begin + block_size] = True
    return visible.repeat_interleave(ALL_HEADS // lists.shape[1], 1)


CAUSAL = torch.ones(ROWS, KEYS, dtype=torch.bool).tril()
HOLES = (torch.arange(ROWS)[:, None] + torch.arange(KEYS)) % 3 != 1
BOUNDS = torch.tensor([0, 5, 6, ROWS])
DOCUMENTS = torch.bucketize(torch.arange(ROWS), BOUNDS, right=True)
SOME = torch.ones(2, KEYS, dtype=torch.bool)
SOME[0, :7] = False
FLAT = {"is_causal": False}
PER_HEAD = torch.stack([CAUSAL, HOLES]).repeat(4, 1, 1)[None]

CONDITIONS = {
    "none": (FLAT, torch.ones_like(CAUSAL)),
    "causal": ({}, CAUSAL),
    "window": ({"sliding_window": 5}, CAUSAL & ~CAUSAL.tril(-5)),
    "intervals": ({"attention_mask": "intervals"}, CAUSAL & SOME[:, None, None]),
    "keys": ({"attention_mask": SOME[:, None, None]}, SOME[:, None, None]),
    "bool of intervals": ({"attention_mask": (CAUSAL & SOME[:, None, None])}, CAUSAL & SOME[:, None, None]),
    "bool": ({"attention_mask": HOLES[None, None]}, HOLES),
    "bool of heads": ({"attention_mask": PER_HEAD}, PER_HEAD),
    "bool of rows": ({"attention_mask": HOLES[None, None, :, :1]}, HOLES[:, :1]),
    "numbers": ({"attention_mask": torch.zeros(1, 1, ROWS, KEYS).masked_fill(~HOLES, -torch.inf)}, HOLES),
}


# Masks of 9 rows, the first ones here, are so short that they are not looked at beforehand.
FEW_ROWS = ["keys", "bool of intervals", "bool", "bool of heads", "bool of rows", "numbers"]
FEW_OR_ALL = [(name, ROWS) for name in CONDITIONS] + [(name, 9) for name in FEW_ROWS]


@pytest.mark.parametrize(("condition", "rows"), FEW_OR_ALL)
@pytest.mark.parametrize("lists", ["indices", "1 head", "2 heads", "4 heads", "8 heads"])
def test_lists_hide_beside_all_masks(lists: str, condition: str, rows: int) -> None:
    """The oracle is softmax over a dense mask."""
    torch.manual_seed(1)
    keywords, visible = CONDITIONS[condition]
    if isinstance(keywords.get("attention_mask"), str):
        config = transformers.LlamaConfig(num_hidden_layers=1, attn_implementation="dmattn")
        embeds = torch.zeros(2, ROWS, 8)
        mask = masking_utils.create_causal_mask(
            config=config, inputs_embeds=embeds, attention_mask=SOME, past_key_values=None
        )
        assert mask.dtype == torch.int32
        keywords = {"attention_mask": mask}
    if "attention_mask" in keywords and keywords["attention_mask"].shape[2] == ROWS:
        keywords = {"attention_mask": keywords["attention_mask"][:, :, :rows]}
    visible = visible[..., :rows, :] if visible.shape[-2] == ROWS else visible
    if lists == "indices":
        block_size, chosen = None, torch.randint(0, KEYS + 5, (2, rows, 9), dtype=torch.int32)
        out, scores, value = attend(None, rows, indices=chosen, **keywords)
        shown = listed(chosen[:, None], 1)
    else:
        block_size, chosen = 5, torch.randint(-1, 6, (2, int(lists[0]), rows, 3))
        out, scores, value = attend(block_size, rows, block_indices=chosen, **keywords)
        shown = listed(chosen, block_size)
    torch.testing.assert_close(out, expected_out(scores, value, shown & visible))


@pytest.mark.parametrize("condition", ["causal", "bool"])
def test_sinks_beside_lists(condition: str) -> None:
    torch.manual_seed(2)
    chosen, sinks = torch.randint(0, KEYS, (2, ROWS, 9)), torch.randn(ALL_HEADS, dtype=torch.float64)
    keywords, visible = CONDITIONS[condition]
    out, scores, value = attend(None, indices=chosen, s_aux=sinks, **keywords)
    scores = scores.masked_fill(~(listed(chosen[:, None], 1) & visible), -torch.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(2, -1, ROWS, 1)], -1).softmax(-1)
    torch.testing.assert_close(out, weights[..., :-1] @ value)


@pytest.mark.parametrize("condition", ["none", "causal", "window", "keys", "bool"])
def test_documents_beside_lists(condition: str, calls: list) -> None:
    """They stay intervals, whatever the mask is."""
    torch.manual_seed(2)
    chosen = torch.randint(0, KEYS, (1, ROWS, 9))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, ALL_HEADS, ROWS, 8, dtype=torch.float64, generator=generator)
    keywords, visible = CONDITIONS[condition]
    if condition == "keys":
        keywords, visible = {"attention_mask": SOME[:1, None, None]}, SOME[:1, None, None]
    bounds = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS.clone()}
    mask = keywords.get("attention_mask")
    flags = {name: value for name, value in keywords.items() if name != "attention_mask"}
    out, _ = dmattn_attention_forward(nn.Module(), *states, mask, indices=chosen, **bounds, **flags)
    seen = listed(chosen[:, None], 1) & visible & (DOCUMENTS[:, None] == DOCUMENTS)
    torch.testing.assert_close(out.transpose(1, 2), expected_out(states[0] @ states[1].mT / 8**0.5, states[2], seen))
    (given, _), *_ = calls
    assert isinstance(given, KeyIndices) and given.shape == (1, 1, ROWS, 9)
    assert given.intervals is not None and (condition == "keys") == (given.key_mask is not None)


@pytest.mark.parametrize("mask", [None, HOLES[None, None]], ids=["causal", "bool"])
@pytest.mark.parametrize("block_size", [None, 5])
def test_compiled_lists(block_size: int | None, mask: Tensor | None) -> None:
    torch.manual_seed(3)
    shape = (2, ROWS, 9) if block_size is None else (2, HELD_HEADS, ROWS, 3)
    lists = torch.randint(-1, KEYS if block_size is None else 6, shape)
    keyword = "indices" if block_size is None else "block_indices"
    states = [torch.randn(2, heads, ROWS, 8) for heads in (ALL_HEADS, HELD_HEADS, HELD_HEADS)]
    module = Indexed(block_size)

    def attention(lists: Tensor, *states: Tensor) -> Tensor:
        return dmattn_attention_forward(module, *states, mask, **{keyword: lists})[0]

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(lists, *states), attention(lists, *states))


def test_masks_of_users_with_four_dimensions() -> None:
    """No mask function is asked; lists are hidden by the mask's elements."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & (torch.rand(2, 1, LENGTH, LENGTH) < 0.7)
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    for name in ("deepseek_v32", "hy_v4", "minimax_m3_vl"):
        eager, text = model_of(name), prompt()
        numbers = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        with torch.no_grad():
            expected = eager(text, attention_mask=numbers).logits
            for given in (mask, numbers):
                assert_close(with_attention(eager)(text, attention_mask=given).logits, expected, name)


# ---- Errors

LISTS = torch.zeros(2, ROWS, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("block_size", "keywords", "message"),
    [
        (4, {"indices": LISTS, "block_indices": LISTS[:, None]}, "indices and block_indices are two forms of one"),
        (
            None,
            {"indices": LISTS[:, None]},
            r"indices must be \(B or 1, Sq, n\) with query's rows; got indices",
        ),
        (None, {"indices": LISTS[:, 1:]}, r"indices must be \(B or 1, Sq, n\) with query's rows"),
        (None, {"indices": LISTS.float()}, "indices must be int32 or int64"),
        (4, {"block_indices": LISTS}, r"block_indices must be \(B or 1, heads, Sq, n\) with query's rows"),
        (None, {"block_indices": LISTS[:, None]}, "a module that tells the size of blocks as indexer.block_size"),
        (4, {"block_indices": LISTS[:, None].expand(-1, 3, -1, -1)}, "heads must divide the 8 of query; got 3"),
        (
            None,
            {"indices": LISTS, "attention_mask": HOLES[None, None, :, 1:]},
            r"attention_mask must have Sq or 1 rows and Sk or 1 keys, \(24, 24\); got \(1, 1, 24, 23\)",
        ),
        (None, {"indices": LISTS, "topk_scores": LISTS}, "topk_scores is a keyword that flash_dmattn does not know"),
        (4, {"block_indices": LISTS[:, None], "block_counts": 1}, "block_counts is a keyword that flash_dmattn does"),
    ],
)
def test_lists_that_do_not_fit_are_refused(block_size: int | None, keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(block_size, **keywords)


@pytest.mark.parametrize("name", WITH_LISTS)
def test_models_do_not_swallow_keywords(name: str) -> None:
    with pytest.raises(ValueError, match="index_bias is a keyword that flash_dmattn does not know"):
        with_attention(model_of(name))(prompt(), index_bias=torch.zeros(3))
