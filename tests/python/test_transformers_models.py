"""attn_implementation="dmattn" with models that want more than attention within a mask, and the keywords that models
hand to attention."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from flash_dmattn.integrations._inputs import HARMLESS
from flash_dmattn.integrations.attention_interface import dmattn_attention_forward
from packed import document_mask
from tiny_models import (
    DEEPSEEK_V4,
    HEADS,
    LENGTH,
    PADDING,
    PADDING_RIGHT,
    SIZES,
    VOCABULARY,
    tiny,
    tokens,
    with_attention,
)
from torch import Tensor, nn

T5GEMMA2 = SIZES | HEADS | {"sliding_window": 7, "query_pre_attn_scalar": 8}
BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
BART |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
BART |= {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}


def assert_equals_eager(eager: transformers.PreTrainedModel, inputs: dict[str, Tensor], real: Tensor | None) -> None:
    with torch.no_grad():
        expected, got = (model(**inputs)[0] for model in (eager, with_attention(eager)))
    real = torch.ones(expected.shape[:2], dtype=torch.bool) if real is None else real.bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


# ---- Models that read or edit masks, or compute attention themselves

DECODERS = {
    "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "DeepseekV4ForCausalLM": DEEPSEEK_V4,
    "FalconForCausalLM": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "Inkling2ForCausalLM": {
        "vocab_size": VOCABULARY,
        "unpadded_vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 7,
        "d_rel": 4,
        "rel_extent": 16,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
    "Qwen4ExpForCausalLM": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
}


@pytest.mark.parametrize("given", ["plain", "padded"])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_that_use_masks_themselves_equal_eager(kind: str, given: str) -> None:
    eager = tiny(kind, DECODERS[kind])
    inputs = {"input_ids": tokens()} | ({} if given == "plain" else {"attention_mask": PADDING_RIGHT})
    assert_equals_eager(eager, inputs, inputs.get("attention_mask"))


ENCODER_DECODERS = {
    "BigBirdPegasusForConditionalGeneration": BART | {"attention_type": "original_full"},
    "NllbMoeForConditionalGeneration": BART | {"num_experts": 4, "expert_capacity": 64},
    "PegasusXForConditionalGeneration": BART | {"num_global_tokens": 2, "block_size": 4},
    "T5Gemma2ForConditionalGeneration": {
        "encoder": {
            "text_config": T5GEMMA2,
            "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
            | {"intermediate_size": 16, "patch_size": 14},
        },
        "decoder": T5GEMMA2,
        "image_token_index": 3,
    },
}


@pytest.mark.parametrize("given", ["plain", "padded"])
@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_encoder_decoders_that_use_masks_themselves_equal_eager(kind: str, given: str) -> None:
    eager = tiny(kind, ENCODER_DECODERS[kind])
    inputs = {"input_ids": tokens().clamp(min=4), "decoder_input_ids": tokens(9).clamp(min=4), "use_cache": False}
    inputs |= {} if given == "plain" else {"attention_mask": PADDING_RIGHT}
    assert_equals_eager(eager, inputs, None)


def test_masks_of_one_row_hold_for_all_rows() -> None:
    """BridgeTower and LightGlue ask for the mask of one row and hand it to attention of all rows."""
    create = transformers.masking_utils.create_bidirectional_mask
    config = transformers.BertConfig(num_hidden_layers=1, attn_implementation="dmattn")
    mask = create(config=config, inputs_embeds=torch.zeros(2, 1, 8), attention_mask=PADDING)
    query, key, value = torch.randn(3, 2, 2, LENGTH, 8)
    out, _ = dmattn_attention_forward(nn.Module(), query, key, value, mask)
    scores = (query @ key.mT / 8**0.5).masked_fill(PADDING[:, None, None] == 0, -torch.inf)
    torch.testing.assert_close(out, (scores.softmax(-1) @ value).transpose(1, 2))


# ---- Keywords


def attend(**keywords: object) -> Tensor:
    """One sequence of 12 tokens."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, 4, 12, 8, dtype=torch.float64, generator=generator)
    return dmattn_attention_forward(nn.Module(), *states, keywords.pop("attention_mask", None), **keywords)[0]


@pytest.mark.parametrize(
    "keywords",
    [{"topk_indices": torch.zeros(1, 12, 4)}, {"block_mask": torch.zeros(1)}, {"attention_bias": torch.zeros(1)}]
    + [{"causal": 1}, {"cache": object()}, {"sink_tokens": 0}],
    ids=lambda keywords: next(iter(keywords)),
)
def test_keywords_that_are_not_known_are_refused(keywords: dict[str, object]) -> None:
    message = f"{next(iter(keywords))} is a keyword that flash_dmattn does not know and that may change the result"
    with pytest.raises(ValueError, match=message):
        attend(**keywords)


def test_keywords_that_change_nothing_pass() -> None:
    expected = attend()
    for name in HARMLESS - {"output_attentions"}:
        assert torch.equal(attend(**{name: torch.ones(3)}), expected), name
    assert torch.equal(attend(indices=None, block_indices=None, something_new=False), expected)


def test_sinks_of_every_row() -> None:
    sinks = torch.tensor([0.0, -3.0, 1.0, 5.0], dtype=torch.float64)
    got = attend(sinks=sinks[None, :, None, None].expand(1, 4, 12, 1))
    torch.testing.assert_close(got, attend(s_aux=sinks))
    assert not torch.allclose(got, attend())
    with pytest.raises(ValueError, match="s_aux and sinks are two forms of one argument"):
        attend(sinks=sinks[None, :, None, None], s_aux=sinks)


@pytest.mark.parametrize("how", ["causal", "all", "window", "intervals", "bool", "numbers"])
def test_documents_of_cu_seq_lens(how: str) -> None:
    """What a collator of packed sequences hands to attention says the same as position_ids that begin anew."""
    bounds = torch.tensor([0, 5, 6, 12])
    number = torch.bucketize(torch.arange(12), bounds, right=True)
    documents, causal = number[:, None] == number, torch.ones(12, 12, dtype=torch.bool).tril()
    holes = (torch.arange(12)[:, None] + torch.arange(12)) % 3 != 1
    config = transformers.LlamaConfig(num_hidden_layers=1, attn_implementation="dmattn")
    intervals = transformers.masking_utils.create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, 12, 8),
        attention_mask=torch.tensor([[0] + [1] * 11]),
        past_key_values=None,
    )
    keywords, shown = {
        "causal": ({}, causal),
        "all": ({"is_causal": False}, torch.ones_like(causal)),
        "window": ({"sliding_window": 3}, causal & ~causal.tril(-3)),
        "intervals": ({"attention_mask": intervals}, causal & (torch.arange(12) > 0)),
        "bool": ({"attention_mask": holes[None, None]}, holes),
        "numbers": ({"attention_mask": torch.zeros(1, 1, 12, 12).masked_fill(~holes, -torch.inf)}, holes),
    }[how]
    got = attend(**keywords, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.clone(), max_length_q=6, max_length_k=6)
    torch.testing.assert_close(got, attend(attention_mask=(documents & shown)[None, None]))


def test_documents_that_do_not_fit_are_refused() -> None:
    bounds = torch.tensor([0, 5, 12])
    for other in (None, torch.tensor([0, 12]), bounds[None]):
        with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must both be bounds of the documents of"):
            attend(cu_seq_lens_q=bounds, cu_seq_lens_k=other)
    for query, states in ((2, torch.randn(3, 2, 4, 12, 8)), (1, torch.randn(3, 1, 4, 12, 8))):
        query = torch.randn(query, 4, 12 if query == 2 else 3, 8)  # two sequences; keys of a cache
        with pytest.raises(ValueError, match=r"of one sequence .* without keys of a cache; got cu_seq_lens_q"):
            dmattn_attention_forward(nn.Module(), query, *states[1:], None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_documents_of_other_numbers_of_keys(sliding_window: int | None) -> None:
    """The causal rule and the window are aligned to the last row and key of each document."""
    bounds, key_bounds = torch.tensor([0, 5, 6, 12]), torch.tensor([0, 2, 6, 11])
    left = None if sliding_window is None else sliding_window - 1
    shown = document_mask(bounds, key_bounds, 12, 12, left, 0)
    got = attend(cu_seq_lens_q=bounds, cu_seq_lens_k=key_bounds, sliding_window=sliding_window)
    torch.testing.assert_close(got, attend(attention_mask=shown[None, None]))


def keywords_of_models() -> dict[str, str]:
    """The keywords that Transformers' models write in their calls of an attention function, each with a file."""
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "ALL_ATTENTION_FUNCTIONS" not in text:
            continue
        for call in re.finditer(r"attention_interface\(\n?((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", text):
            for keyword in ast.parse(f"f({call[1]})", mode="eval").body.keywords:
                if keyword.arg is not None:
                    found.setdefault(keyword.arg, path.name)
    return found


def test_all_keywords_of_transformers_models_are_known() -> None:
    """New ones have to be honoured, found harmless, or refused by name."""
    known = {*inspect.signature(dmattn_attention_forward).parameters, *HARMLESS}
    found = keywords_of_models()
    assert {"scaling", "dropout", "sliding_window", "s_aux", "position_bias", "softcap"} <= set(found)
    assert {name: file for name, file in found.items() if name not in known} == {}
