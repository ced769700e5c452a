# SPDX-License-Identifier: Apache-2.0
"""Print digests of random answers, to compare the numerics of CPUs: equal digests, equal bits.

    PYTHONPATH=. python tests/portable_answers.py [--answers 40] [--model DIRECTORY_OR_FILE]

A line is printed for each instruction set of portable numerics that this build and this CPU have,
and each kind of weights. A digest covers the token ids and the bits of all logprobs of answers with
random sampling parameters, each drafted by another method. The lines of two machines are equal up
to the name of the instruction set; for 64-bit ARM, run the script by build/arm/python, which
`make -C tools test-arm` makes.
"""

import argparse
import hashlib
import random
import struct

import specops
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.minimal import BUNDLED

METHODS = ("naive", "ngram", "suffix")
KINDS = ("none", "wint8", "wint4")


def answers(model: str, kind: str, isa: str, count: int) -> list[Completion]:
    """Return the answers of an engine with some kind of weights on an instruction set."""
    draw = random.Random(7)
    engine = Engine(
        EngineConfig(
            model=model,
            isa=isa,
            numerics="portable",
            quantization=kind,
            quantize_head=kind,
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=4),
            methods=("ngram", "suffix"),
            max_model_len=256,
        )
    )
    names = []
    for number in range(count):
        piece = [draw.randrange(200) for _ in range(draw.randint(2, 12))]
        params = SamplingParams(
            max_tokens=draw.randint(8, 48),
            temperature=draw.choice([0.0, 0.7, 1.2]),
            top_p=draw.choice([0.9, 1.0]),
            min_p=draw.choice([0.0, 0.02]),
            repetition_penalty=draw.choice([1.0, 1.1]),
            seed=draw.getrandbits(64),
            logprobs=2,
            ignore_eos=True,
        )
        method = METHODS[number % len(METHODS)]
        names.append(
            engine.add_request(
                piece * draw.randint(1, 8), params, speculative_config={"method": method}
            )
        )
    while engine.has_unfinished():
        engine.step()
    return [engine.completion(name) for name in names]


def digest(completions: list[Completion]) -> str:
    """Return a digest of all tokens and logprob bits."""
    found = hashlib.sha256()
    for one in completions:
        assert one.error is None, one.error
        for token in one.logprobs:
            pairs = [(token.token_id, token.logprob), *token.alternatives]
            for token_id, logprob in pairs:
                found.update(struct.pack("<id", token_id, logprob))
    return found.hexdigest()[:16]


def main() -> None:
    """Print the digests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=int, default=40, help="number of answers per line")
    parser.add_argument("--model", default=str(BUNDLED))
    options = parser.parse_args()
    for kind in KINDS:
        for isa in specops.portable_isas():
            found = digest(answers(options.model, kind, isa, options.answers))
            print(f"{kind:5}  {isa:11}  {found}", flush=True)


if __name__ == "__main__":
    main()
