"""The reference and the oracle are right by arguments that do not use the library."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bcg_core import PagedKVCache, PrefillBatch, causal_attention, low_attention
from bcg_core.attention import sequential_matmul, tensor_core_matmul
from bcg_core.batch import Chunk
from bcg_harness import LlamaReference, RandomTokens
from bcg_harness.oracle import HiddenOracle, cached_slots
from bcg_harness.reference import high_precision
from bcg_harness.testing import sequence_on
from bcg_llama import PRESETS, LlamaModel, random_llama


def heads(rows: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, 8, dtype=torch.float64, generator=generator)


def by_hand(q_RNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, scale: float) -> Tensor:
    """Attend with loops over rows and heads."""
    out = torch.zeros_like(q_RNH)
    before = len(k_SKH) - len(q_RNH)
    group = q_RNH.shape[1] // k_SKH.shape[1]
    for row in range(q_RNH.shape[0]):
        for head in range(q_RNH.shape[1]):
            seen = slice(before + row + 1)
            logits = k_SKH[seen, head // group] @ q_RNH[row, head] * scale
            weights = [math.exp(logit) for logit in logits.tolist()]
            for weight, value in zip(weights, v_SKH[seen, head // group], strict=True):
                out[row, head] += weight / sum(weights) * value
    return out


@pytest.mark.parametrize("prefix", [0, 5], ids=["no-prefix", "prefix"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
def test_attention_follows_its_definition(prefix: int, kv_heads: int) -> None:
    q, k, v = heads(6, 4, 1), heads(6 + prefix, kv_heads, 2), heads(6 + prefix, kv_heads, 3)
    found = causal_attention(q, k, v, scale=0.3, dtype=torch.float64)
    torch.testing.assert_close(found, by_hand(q, k, v, 0.3))


def test_cached_slots_follow_the_page_table(small_model: LlamaModel) -> None:
    cache = PagedKVCache(small_model.spec, num_pages=8, page_size=4)
    batch = PrefillBatch.build(
        input_ids=[1, 2, 3, 4, 5, 6, 7],
        new_lens=[1, 6],
        page_table=[[5], [7, 2]],
        kv_cache=cache,
    )
    assert [slots.tolist() for slots in cached_slots(batch)] == [[20], [28, 29, 30, 31, 8, 9]]


def test_cached_slots_begin_with_the_prefix(small_model: LlamaModel) -> None:
    cache = PagedKVCache(small_model.spec, num_pages=8, page_size=4)
    sequence = sequence_on(cache, [3, 1], cached=3)
    batch = PrefillBatch.from_chunks([Chunk(token_ids=[1, 2], sequence=sequence)], cache)
    assert [slots.tolist() for slots in cached_slots(batch)] == [[12, 13, 14, 15, 4]]


def test_reference_is_causal(small_model: LlamaModel) -> None:
    reference = LlamaReference(small_model)
    long = reference.hidden([[1, 2, 3, 4, 5, 6]], torch.float64)
    short = reference.hidden([[1, 2, 3]], torch.float64)
    torch.testing.assert_close(long[:, :3], short)


def test_reference_depends_on_the_order_of_tokens(small_model: LlamaModel) -> None:
    reference = LlamaReference(small_model)
    one, other = reference.hidden([[1, 2, 3], [2, 1, 3]], torch.float64)
    assert (one[2] - other[2]).norm() > 0.1 * one[2].norm()


def test_reference_treats_requests_apart(small_model: LlamaModel) -> None:
    reference = LlamaReference(small_model)
    together = reference.hidden([[1, 2, 3], [7, 8, 9]], torch.float64)
    alone = reference.hidden([[7, 8, 9]], torch.float64)
    torch.testing.assert_close(together[1:], alone)


def test_reference_agrees_with_transformers(small_model: LlamaModel) -> None:
    transformers = pytest.importorskip("transformers")
    config = small_model.config
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_positions,
            rope_theta=config.rope.theta,
        )
    )
    llama.load_state_dict(dict(small_model.named_tensors()))
    token_ids = [RandomTokens(config.vocab_size).tokens(0, 50)]
    with torch.inference_mode():
        theirs = llama.model(torch.tensor(token_ids)).last_hidden_state
    ours = LlamaReference(small_model).hidden(token_ids, torch.float64)
    assert (theirs - ours).norm() < 1e-5 * ours.norm()


@pytest.mark.parametrize(
    ("dtype", "high"),
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_results_are_judged_by_a_wider_type(dtype: torch.dtype, high: torch.dtype) -> None:
    assert high_precision(dtype) == high


@pytest.fixture(scope="module")
def oracle(small_model: LlamaModel) -> HiddenOracle:
    source = RandomTokens(small_model.spec.vocab_size)
    lengths = {0: 40, 1: 12, 2: 12}
    return HiddenOracle(LlamaReference(small_model), source, lengths, torch.float32)


def test_oracle_knows_every_row(oracle: HiddenOracle, small_model: LlamaModel) -> None:
    token_ids = RandomTokens(small_model.spec.vocab_size).tokens(2, 12)
    whole = LlamaReference(small_model).hidden([token_ids], torch.float64)[0]
    torch.testing.assert_close(oracle.hidden(2, 5, 12), whole[5:])


def test_errors_of_one_row_are_those_of_the_worst_row(oracle: HiddenOracle) -> None:
    low = oracle.low_errors(1)
    assert low.whole == low.row > 0


def test_longer_stretches_have_smaller_errors(oracle: HiddenOracle) -> None:
    assert (
        0 < oracle.low_errors(40).whole < oracle.low_errors(12).whole < oracle.low_errors(1).whole
    )


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@HALVES
def test_attention_in_16_bit_types_errs_by_a_rounding_step(dtype: torch.dtype) -> None:
    q, k, v = (heads(rows, count, 4).to(dtype) for rows, count in ((30, 4), (50, 2), (50, 2)))
    low = low_attention(q, k, v, scale=0.3)
    high = causal_attention(q, k, v, scale=0.3, dtype=torch.float64)
    assert low.dtype == dtype
    assert 0 < ((low - high).norm() / high.norm()).item() < torch.finfo(dtype).eps / 2


@HALVES
def test_attention_of_large_logits_does_not_lose_them(dtype: torch.dtype) -> None:
    q, k, v = (heads(rows, 2, 5).to(dtype) * 16 for rows in (30, 50, 50))
    low = low_attention(q, k, v, scale=1.0)
    high = causal_attention(q, k, v, scale=1.0, dtype=torch.float64)
    assert ((low - high).norm() / high.norm()).item() < torch.finfo(dtype).eps


def test_attention_in_float32_stays_in_float32() -> None:
    q, k, v = (heads(rows, 2, 6).float() for rows in (30, 50, 50))
    low = low_attention(q, k, v, scale=0.3)
    high = causal_attention(q, k, v, scale=0.3, dtype=torch.float64)
    assert low.dtype == torch.float32
    assert 0 < ((low - high).norm() / high.norm()).item() < 1e-6


def test_sums_in_sequence_stay_in_float32_and_err_as_much_for_one_row_as_for_many() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 128, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    many = sequential_matmul(a, b)
    one = torch.cat([sequential_matmul(row[None], b) for row in a])
    errors = [((found - exact).norm() / exact.norm()).item() for found in (many, one)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert 1e-7 < errors[0] < 1e-6


@HALVES
def test_squares_beyond_float16_do_not_spoil_the_reference(dtype: torch.dtype) -> None:
    model = random_llama(replace(PRESETS["tiny"], num_layers=1), dtype=dtype)
    model.weights.embedding_VD[:, 3] = 1000.0  # its square is no float16
    token_ids = [RandomTokens(model.spec.vocab_size).tokens(0, 40)]
    reference = LlamaReference(model)
    low, high = (reference.hidden(token_ids, kind)[0] for kind in (dtype, torch.float32))
    assert ((low - high).norm() / high.norm()).item() < 0.05


def test_tensor_core_products_lie_between_float32_and_16_bit_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    error = ((tensor_core_matmul(a, b) - exact).norm() / exact.norm()).item()
    plain = ((a @ b - exact).norm() / exact.norm()).item()
    assert plain < error < 1e-6
