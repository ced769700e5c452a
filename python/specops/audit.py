# SPDX-License-Identifier: Apache-2.0
"""Audit: derive every token and every logprob bit of an answer again, at the speed of prefill.

A row of the engine has the same bits whether it decodes one token or verifies a draft. So an answer
is audited by generating it again with the answer itself as its draft: a step derives tens of tokens
in the time of a few. The audit applies everything that shapes an answer: sampling parameters,
seeds, logits processors, grammars, stops.

    record = AuditRecord.of(completion, params)
    (verdict,) = audit(engine, [record])
    print(verdict.sentence())
"""

from collections.abc import Sequence
from uuid import uuid4

from specops.api.audit import AuditRecord, AuditVerdict, Comparison
from specops.engine import Engine

__all__ = ["AuditRecord", "AuditVerdict", "Comparison", "audit"]


def audit(
    engine: Engine, records: Sequence[AuditRecord], *, contract: str | None = None
) -> list[AuditVerdict]:
    """Derive answers again, and compare every token and every bit.

    Args:
        engine: an engine of the model that is said to have given the answers.
        records: the answers.
        contract: digest of the engine's execution contract, to compare with that of the records.

    Returns:
        The verdict on each record.

    Raises:
        EngineError: a whole step failed.
        ValueError: the engine cannot run the request of a record, for example because its prompt
            exceeds the context or its LoRA adapter is not loaded.
    """
    adapters = {digest: name for name, digest in engine.adapters.items()}
    for record in records:
        if record.adapter is not None and record.adapter not in adapters:
            loaded = ", ".join(adapters) or "none"
            raise ValueError(
                f"record.adapter must be the digest of a loaded adapter ({loaded}), got "
                f"{record.adapter}; load the adapter with lora_modules"
            )
    comparisons = [Comparison(record, contract) for record in records]
    running: dict[str, Comparison] = {}
    salt = uuid4().hex
    try:
        for record, comparison in zip(records, comparisons, strict=True):
            while engine.num_waiting >= engine.config.max_waiting:
                _step(engine, running)
            name = engine.add_request(
                record.prompt_token_ids,
                record.request(salt),
                choice_index=record.choice_index,
                speculative_config=record.speculation(engine.max_num_drafts),
                adapter=None if record.adapter is None else adapters[record.adapter],
            )
            running[name] = comparison
        while running:
            _step(engine, running)
    finally:
        for name in running:
            engine.abort(name)
    return [one.verdict for one in comparisons if one.verdict is not None]


def _step(engine: Engine, running: dict[str, Comparison]) -> None:
    """Run a step, compare its tokens, and drop the requests whose verdict is known."""
    for output in engine.step():
        comparison = running.get(output.request_id)
        if comparison is None:
            continue
        comparison.take(output.token_ids, output.logprobs)
        if output.finish_reason is not None:
            done = engine.completion(output.request_id)
            comparison.end(done.finish_reason, done.stop_reason, done.error)
        elif comparison.verdict is not None:
            engine.abort(output.request_id)
        if comparison.verdict is not None:
            del running[output.request_id]
