"""Mooncake's traces, as they are published: a JSON object a line, with the hashes of the prompt's blocks.

``timestamp`` is milliseconds. Each of ``hash_ids`` stands for a block of 512 tokens and all tokens before it, so
requests whose hashes begin alike share that prefix: https://github.com/kvcache-ai/Mooncake.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bcg_harness.bench.json_line import Key, is_integer, is_number, read_line
from bcg_harness.bench.scheduler import Request
from bcg_harness.bench.trace_lines import Lines, read_each

SHAPE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}'
)
BLOCK_TOKENS = 512
"""Tokens of a block; the last one of a prompt may have fewer."""

_KEYS = {
    "timestamp": Key(words="milliseconds, at least 0", fits=is_number, required=True),
    "input_length": Key(words="a whole number, at least 1", fits=is_integer, required=True),
    "output_length": Key(words="a whole number, at least 0", fits=is_integer, required=True),
    "hash_ids": Key(
        words="a list of whole numbers",
        fits=lambda value: isinstance(value, list) and all(map(is_integer, value)),
        required=True,
    ),
}


def read_mooncake(lines: Lines) -> Iterator[tuple[int, Request]]:
    """Yield the requests with the numbers of their lines, in order of arrival.

    What a request has in common with an earlier one is its cached prefix, as if nothing were ever evicted; at least one
    token is new. Raises HarnessError, with the number, for a line that makes no sense.
    """
    read = sorted(read_each(lines, _prompt), key=lambda each: each[1][0].arrival_seconds)
    seen = _Block()
    for number, (request, hash_ids) in read:
        prefix = min(seen.share(hash_ids, request.prompt_tokens), request.prompt_tokens - 1)
        yield (
            number,
            replace(request, prompt_tokens=request.prompt_tokens - prefix, prefix_tokens=prefix),
        )


def _prompt(line: str) -> tuple[Request, list[int]]:
    raw = read_line(line, _KEYS, SHAPE)
    request = Request(
        prompt_tokens=raw["input_length"],
        output_tokens=raw["output_length"],
        arrival_seconds=raw["timestamp"] / 1000,
    )
    return request, raw["hash_ids"]


@dataclass(kw_only=True)
class _Block:
    """Hold a block that was seen, with the blocks that were seen behind it.

    Attributes:
        tokens: how many of the prompts that ended in this block or went beyond it reach from their start.
        following: by hash.
    """

    tokens: int = 0
    following: dict[int, "_Block"] = field(default_factory=dict)

    def share(self, hash_ids: list[int], length: int) -> int:
        """Return how many tokens of a prompt of ``length`` were seen, and remember all of it."""
        block, shared, known = self, 0, True
        for place, each in enumerate(hash_ids, start=1):
            known = known and each in block.following
            block = block.following.setdefault(each, _Block())
            if known:
                shared = block.tokens
            block.tokens = max(block.tokens, min(place * BLOCK_TOKENS, length))
        return shared
