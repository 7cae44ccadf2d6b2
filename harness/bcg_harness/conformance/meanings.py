"""What each check stands for, in the words of a message to the author of a backend."""

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "bit_equal": "replay gives the bits that eager execution of the same padded shape gives, and no NaN",
        "raw_shape": "replay gives, within a budget, what eager execution without padding gives",
        "oracle": "each request gives, within a budget, what an independent Llama gives over its whole history",
        "attention": "each layer's attention is, within a budget, what its definition gives on the same inputs",
        "structure": "one break a layer, the expected bucket, one metadata for the live batch, real rows only, and the "
        "batch stays as it is",
        "kv_isolation": "no slot of the KV cache changes but those of the batch's new tokens; page 0 stays finite",
        "padding": "padded rows are finite, and the backend leaves rows behind the real ones alone",
        "interleaved": "metadata stays valid while other batches are prepared, by this instance and by others",
        "full_graph": "a graph with attention inside gives, within a budget, what an independent Llama gives",
        "one_pass": "a prompt in chunks gives, within a budget, what it gives in one pass",
    }
)
"""What must hold, by the name of the check."""
