"""Families of workloads: names with numbers in them, so that concurrency and length are free axes.

The letters in a name stand for numbers: ``B`` requests, ``N`` tokens of a prompt, ``C`` tokens of a chunk.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from bcg_harness.bench.lognormal import Lognormal
from bcg_harness.bench.scheduler import TOKEN_BUDGET, Request, pack
from bcg_harness.bench.workloads import Workload
from bcg_harness.cases import Case
from bcg_harness.errors import HarnessError
from bcg_harness.selection import MOST_TOKENS

_CHAT = Lognormal(median=180, sigma=1.0, least=8, most=2048)
_DOCUMENTS = Lognormal(median=2500, sigma=0.7, least=512, most=8192)
_HISTORY = Lognormal(median=900, sigma=1.0, least=64, most=6000)
_TURN = Lognormal(median=60, sigma=0.9, least=4, most=512)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Describe requests that arrive at once.

    Attributes:
        description: in words.
        count: how many there are.
        prompt: new tokens of each.
        prefix: cached tokens of each; none when left out.
        token_budget: most new tokens of a batch; None where the caller decides.
    """

    description: str
    count: int
    prompt: Lognormal
    prefix: Lognormal | None = None
    token_budget: int | None = None

    def draw(self, random: Random) -> Iterator[Request]:
        """Yield the requests; those of a smaller count come first in a larger one."""
        for _ in range(self.count):
            cached = self.prefix.draw(random) if self.prefix else 0
            yield Request(prompt_tokens=self.prompt.draw(random), prefix_tokens=cached)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describe workloads that differ in numbers only.

    Attributes:
        form: the name, with a capital letter for each number and brackets around what may be left out.
        example: a name.
        summary: what it is, with letters in place of numbers.
        mix: returns the requests, from the numbers by letter.
    """

    form: str
    example: str
    summary: str
    mix: Callable[..., Mix]

    def parse(self, name: str) -> Mix | None:
        """Return what ``name`` stands for; None when it is no name of this family."""
        optional = self.form.replace("[", "(?:").replace("]", ")?")
        match = re.fullmatch(re.sub("([A-Z])", r"(?P<\1>[1-9][0-9]{0,6})", optional), name)
        if match is None:
            return None
        found = match.groupdict()
        return self.mix(**{letter: int(found[letter]) for letter in found if found[letter]})


FAMILIES = (
    Family(
        form="single-N",
        example="single-256",
        summary="one prompt of N tokens",
        mix=lambda N: Mix(
            description=f"one prompt of {N} tokens",
            count=1,
            prompt=Lognormal.exactly(N),
            token_budget=N,
        ),
    ),
    Family(
        form="concurrent-BxN",
        example="concurrent-16x64",
        summary="B prompts of N tokens in one batch",
        mix=lambda B, N: Mix(
            description=f"{B} prompts of {N} tokens in one batch",
            count=B,
            prompt=Lognormal.exactly(N),
            token_budget=B * N,
        ),
    ),
    Family(
        form="chat-B[xN]",
        example="chat-16",
        summary=f"B chat prompts at once, with a median of N ({_CHAT.median}) tokens",
        mix=lambda B, N=_CHAT.median: Mix(
            description=f"{B} chat prompts at once ({_CHAT.around(N)})",
            count=B,
            prompt=_CHAT.around(N),
        ),
    ),
    Family(
        form="documents-B[xN]",
        example="documents-4",
        summary=f"B long documents at once, with a median of N ({_DOCUMENTS.median}) tokens",
        mix=lambda B, N=_DOCUMENTS.median: Mix(
            description=f"{B} long documents at once ({_DOCUMENTS.around(N)})",
            count=B,
            prompt=_DOCUMENTS.around(N),
        ),
    ),
    Family(
        form="turns-B[xN]",
        example="turns-16",
        summary=f"B next turns of chats at once, behind cached tokens with a median of N ({_HISTORY.median})",
        mix=lambda B, N=_HISTORY.median: Mix(
            description=f"{B} next turns of chats at once ({_TURN}) behind cached ones ({_HISTORY.around(N)})",
            count=B,
            prompt=_TURN,
            prefix=_HISTORY.around(N),
        ),
    ),
    Family(
        form="chunked-NxC",
        example="chunked-8192x1024",
        summary="one prompt of N tokens in chunks of C",
        mix=lambda N, C: Mix(
            description=f"one prompt of {N} tokens in chunks of {C}",
            count=1,
            prompt=Lognormal.exactly(N),
            token_budget=C,
        ),
    ),
)
"""All families, in the order of reports."""

DEFAULT_WORKLOADS = (
    *(f"single-{tokens}" for tokens in (16, 64, 256, 512, 1024, 2048, 8192)),
    *("concurrent-4x64", "concurrent-16x64", "concurrent-64x32", "concurrent-8x256"),
    *("chat-16", "chat-64", "documents-4", "turns-16", "chunked-8192x1024"),
)
"""What is measured on a GPU unless something else is asked for; needs a context of 8192 tokens."""

CPU_WORKLOADS = (
    *("single-16", "single-64", "single-256", "concurrent-4x32"),
    *("chat-8x64", "turns-4x128", "chunked-512x128"),
)
"""What is measured on a CPU unless something else is asked for; fits a context of 2048 tokens with any seed."""


def parse_workload(name: str, *, seed: int = 0, token_budget: int = TOKEN_BUDGET) -> Workload:
    """Return the workload called ``name``; the same name, seed and budget give the same workload everywhere.

    With one seed, a mix of fewer requests is the beginning of a mix of more.

    Args:
        name: of one of ``FAMILIES``, with numbers in place of the letters.
        seed: of the mixes, at least 0.
        token_budget: most new tokens of a batch of a mix; a longer prompt is split into chunks.

    Raises:
        HarnessError: for an unknown name, with the families there are; for numbers that make no sense.
    """
    if seed < 0:
        raise HarnessError(f"seed is {seed}, expected at least 0")
    for family in FAMILIES:
        if mix := family.parse(name):
            return _build(name, mix, seed, token_budget)
    known = "\n".join(f"  {each.form}, such as {each.example}: {each.summary}" for each in FAMILIES)
    raise HarnessError(
        f"no workload {name!r}; possible are\n{known}\nNumbers go from 1 to {MOST_TOKENS}, without leading zeros; what "
        "is in brackets may be left out"
    )


def _build(name: str, mix: Mix, seed: int, token_budget: int) -> Workload:
    description, budget = mix.description, mix.token_budget
    if budget is None:
        budget = token_budget
        description += f", in batches of at most {budget} tokens; seed {seed}"
    requests, total = [], 0
    try:
        # Counted while they are drawn, so that a number that is far too large is refused at once.
        for request in mix.draw(Random(seed)):
            requests.append(request)
            total += request.total_tokens
            if total > MOST_TOKENS:
                raise HarnessError(f"more than {MOST_TOKENS} tokens: choose smaller numbers")
        steps = pack(requests, token_budget=budget, max_requests=len(requests))
    except HarnessError as error:
        raise HarnessError(f"workload {name!r}: {error}") from error
    return Workload(case=Case(name=name, description=description, steps=steps))
