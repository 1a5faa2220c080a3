"""What the package tells by Python's logging, and that telling it changes nothing."""

from __future__ import annotations

import logging
import subprocess
import sys

import flash_dmattn
import pytest
import torch
from flash_dmattn import KeyIntervals, attention, dynamic_mask_attention, flash_dmattn_func, prepare_mask
from flash_dmattn.integrations.attention_interface import dmattn_mask
from torch import Tensor


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    """(1, 8, 2, 16) each; a backward may follow."""
    return tuple(torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))


def told(caplog: pytest.LogCaptureFixture, level: int = logging.DEBUG) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_call_says_what_it_is(caplog: pytest.LogCaptureFixture, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    caplog.set_level(logging.DEBUG, logger="flash_dmattn")
    attention(*qkv, mask=torch.ones(8, 8, dtype=torch.bool), is_causal=True)
    with torch.no_grad():
        attention(*qkv, mask=KeyIntervals.causal(8, 8), sink=torch.zeros(2))
    torch.func.vmap(attention)(*(tensor.detach()[None] for tensor in qkv))
    shape = "float32 (1, 8, 2, 16)"
    assert told(caplog)[0] == (
        f"attention on cpu, with a backward: query {shape}, key {shape}, value {shape}, mask bool (8, 8), causal; "
        "plan: none"
    )
    assert "forward alone" in told(caplog)[1] and "sink float32 (2,), interval_begin int32" in told(caplog)[1]
    assert "by torch.func" in told(caplog)[2]
    assert {record.name for record in caplog.records} == {"flash_dmattn"}
    assert caplog.records[0].filename == "_library.py"


def test_nothing_is_put_together_that_nobody_sees(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, qkv: tuple[Tensor, Tensor, Tensor]
) -> None:
    caplog.set_level(logging.INFO, logger="flash_dmattn")
    monkeypatch.setattr(flash_dmattn._log, "described", lambda tensor: pytest.fail("described in vain"))
    attention(*qkv)
    assert not caplog.records


def test_costly_choices_are_told(caplog: pytest.LogCaptureFixture, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    caplog.set_level(logging.INFO, logger="flash_dmattn")
    flash_dmattn_func(*qkv, KeyIntervals.causal(8, 8), return_attn_probs=True)
    assert told(caplog, logging.INFO) == [
        "a dense mask of 8 rows and 8 keys is made of KeyIntervals",
        "attention probabilities, unfused: 8 x 8 scores in each of 2 heads",
    ]


def test_preparing_says_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="flash_dmattn")
    prepare_mask(torch.ones(8, 8, dtype=torch.bool).tril())
    assert len(told(caplog)) == 1
    assert told(caplog)[0].startswith("prepared PreparedMask(intervals: one interval of rows per key")


def test_a_mask_that_stays_dense_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flash_dmattn")
    mask = dmattn_mask(1, 8, 8, mask_function=lambda b, h, i, j: (i + j) % 2 == 0)
    assert mask.dtype == torch.bool
    assert told(caplog, logging.INFO) == [
        "a mask that no interval of rows per key can say stays dense: bool (1, 1, 8, 8)"
    ]


def test_logging_breaks_no_graph(caplog: pytest.LogCaptureFixture, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    caplog.set_level(logging.DEBUG, logger="flash_dmattn")
    key_bias = torch.randn(1, 2, 8)
    prepared = prepare_mask(torch.ones(8, 8, dtype=torch.bool).tril())
    lengths = torch.tensor([5], dtype=torch.int32)
    caplog.clear()

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(query, key, value, mask=prepared, seqlens_k=lengths, sink=key_bias[0, :, 0])
        probs = flash_dmattn_func(query, key, value, KeyIntervals.causal(8, 8), return_attn_probs=True)[2]
        return out.sum() + probs.sum() + dynamic_mask_attention(query, key, value, key_bias, 4).sum()

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(*qkv), step(*qkv))
    eager = told(caplog)
    caplog.clear()
    torch.compile(step, fullgraph=True, backend="aot_eager")(*qkv)
    torch._dynamo.reset()
    assert len(eager) >= 3 and not caplog.records  # compiled code says nothing


def test_warnings_reach_programs_that_set_nothing_up() -> None:
    code = """if True:
        import logging, flash_dmattn
        logging.getLogger("flash_dmattn").debug("quiet")
        logging.getLogger("flash_dmattn.integrations").warning("heard")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "heard\n" and not done.stdout
