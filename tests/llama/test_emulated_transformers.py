"""Models of transformers, captured whole by the emulator: nothing that they do on the device is refused."""

from typing import Any

import pytest
import torch

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, CPUSegmentEngine

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STATES = {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 8},
    "phi": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "mamba": STATES,
    "mamba2": {**STATES, "chunk_size": 8},
}
ATTENDING = MODELS.keys() - {"mamba", "mamba2"}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_captured_and_replays_with_the_bits_of_eager(name: str) -> None:
    config = transformers.AutoConfig.for_model(name, **SMALL, **MODELS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.bfloat16).eval()
    # Without a mask, transformers looks at the positions on the host.
    mask = torch.full((1, 1, 10, 10), -1e4, dtype=torch.bfloat16).triu(1)
    masks = {"attention_mask": mask} if name in ATTENDING else {}
    ids = torch.randint(3, 97, (1, 10))
    graph = BreakableCUDAGraph(CPUSegmentEngine())
    with torch.no_grad():
        model(ids, use_cache=False, **masks)
        with BreakableCUDAGraphCapture(graph):
            logits = model(ids, use_cache=False, **masks).logits
        ids.copy_(torch.randint(3, 97, (1, 10)))
        graph.replay()
        assert torch.equal(logits, model(ids, use_cache=False, **masks).logits)
