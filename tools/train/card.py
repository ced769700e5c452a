# SPDX-License-Identifier: Apache-2.0
"""The documents of an exported model: model card, metrics, license and notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.train.export import psf_license, write_text

_CARD = """\
---
license: other
license_name: psf-2.0
language: code
pipeline_tag: text-generation
---
<!-- Written by tools/train; run that instead of editing this file. -->

# The bundled model

A small language model of Python source code, {parameters:.1f} M parameters, that continues code.
It exists so that `python -m specops.engine` can show, test and measure speculative decoding
on any machine without a download. It is not a coding assistant: it knows the shape of Python and
the idioms of the standard library, and it reasons about nothing.

| | |
| --- | --- |
| architecture | `Qwen3ForCausalLM`: hidden {hidden_size}, {num_hidden_layers} layers, \
{num_attention_heads} query and {num_key_value_heads} key/value heads of {head_dim}, MLP \
{intermediate_size}, tied embeddings, context {max_position_embeddings} |
| MTP | one DeepSeek-V3-style module, `model.layers.{num_hidden_layers}.*`, \
`num_nextn_predict_layers: 1` |
| tokenizer | byte-level BPE, {vocab_size} entries; `<\\|endoftext\\|>` before every document |
| weights | bf16, {megabytes:.1f} MB |

`transformers` loads the directory as `Qwen3ForCausalLM` and ignores the MTP tensors.

A prompt that begins a file should begin with `<|endoftext|>`. A prompt should end *before* a line
break rather than after it: a line break and the indentation that follows are one token here, so a
prompt that ends in a bare line break tells the model that the next line is not indented.

## The MTP module

Row i takes `eh_proj(concat(enorm(Emb(t[i+1])), hnorm(h[i])))`, in that order, where h[i] is the
target's hidden state after its final norm; it runs one decoder layer at position i and predicts
t[i+2] through `shared_head.norm` and the target's LM head. To draft further, feed the output of
`shared_head.norm` back as h. Checkpoints of this family usually repeat the embedding and the head
inside the module (`embed_tokens`, `shared_head.head`); here they are shared and **not stored
twice**.

## Corpus

{corpus}

## Training

{steps} steps of {batch_tokens} tokens, {million_tokens:.1f} M tokens in all, in {hours} on
{machine}.
The corpus has {unique:.1f} M tokens to train on; library modules come {library_repeats} times for \
every time a test comes once.
Muon (lr {matrix_lr}) for matrices, AdamW (lr {vector_lr}) for the embedding and the norms; bf16
autocast; sequences of {length} tokens, of {long_length} for the last {long_percent} % of the steps;
{warmup_steps} steps of warm-up, constant, linear down over the last {decay_percent} %. The MTP
loss has weight {mtp_weight}, {mtp_weight_in_decay} from the start of the warm-down.
{resumed}
In a second phase the MTP module alone was trained on draft chains, the target frozen:
{recycle_steps} steps of {recycle_batch_tokens} tokens, in {recycle_duration} on {recycle_machine}.
After {chain_percent} % of the tokens it drafts {depth} tokens along the target's greedy \
continuation, from the second on by
reading its own output. Each draft is trained towards the target's distribution at that point,
with weight {dead_weight} once a draft before it is wrong. Muon (lr {recycle_matrix_lr}), AdamW \
(lr {recycle_vector_lr}),
{recycle_warmup_steps} steps of warm-up, linear down over {recycle_decay_percent} % of the steps.
{recycle_resumed}
`python -m tools.train` repeats all of it; `--resume` continues from this directory.

## Held-out figures

Measured in fp32 with the shipped weights, on files that training never saw:

| | library modules | tests |
| --- | --- | --- |
| files | {library[documents]} | {tests[documents]} |
| tokens | {library[tokens]} | {tests[tokens]} |
| loss, nats per token | **{library[nats_per_token]:.3f}** | {tests[nats_per_token]:.3f} |
| bits per byte | **{library[bits_per_byte]:.3f}** | {tests[bits_per_byte]:.3f} |
| greedy token is the true one | {library[greedy_accuracy]:.3f} | {tests[greedy_accuracy]:.3f} |
| first MTP draft accepted | **{library[mtp_first_draft_acceptance]:.3f}** | \
{tests[mtp_first_draft_acceptance]:.3f} |

"First MTP draft accepted": over every position of the text, how often the argmax of MTP row i,
given the true tokens 0..i+1, equals the target's own greedy token at row i+1, given the same
tokens.

How often each of {depth} drafts is kept, counted only while all drafts before it are kept, and
the mean acceptance length: the tokens of a step that drafts k tokens, with the target's own.

{chains}

"Library": after every sixteenth token of the held-out library modules ({chain_count} chains).
"Continuations": after every token of greedy continuations of the model's own ({own[prompts]} \
prompts of
{own[prompt_tokens]} tokens cut from held-out library modules, {own[new_tokens]} tokens each). \
A draft is judged by the target's
greedy choice after all drafts before it. Small models repeat themselves when they are decoded
greedily, and repetition is easy to draft: read the continuations as upper figures.
"Before": the module as the first phase of training left it, which knew nothing of its own output.

{heads}{mixture}
## Limits and license

The model was trained on code under the PSF license, and **its output may repeat that code**: treat
long verbatim passages as what they are. The license is in `LICENSE.PSF`, what was taken from where
in `NOTICE`. The model knows one code base of one language, English comments only; it has had no
instruction tuning and no safety tuning, and its code must not be run unread.
"""


_HEADS = """\
## Heads of other methods

`python -m tools.train.train_heads` trains them, with the target frozen, on {texts} texts that the
target has written itself at temperature 0.7. Each draft learns the target's whole distribution.
How often drafts are kept is told of the continuations above.

{table}

None is in this directory: no one of them makes a request faster than the MTP module does. They were
trained for minutes. Each head of Medusa and Hydra has a matrix of logits of its own, which makes
them large. DSpark's steps are those of its Markov head; the DFlash head below it had 295. The draft
model has an embedding and two layers, and reads nothing of the target.
"""


_MIXTURE = """\
## As a mixture of experts

`python -m tools.train.mixture` makes a mixture of this model without training, in
`build/mixture`: the neurons of each MLP, the module's too, are shared out among 8 experts, of
which a router takes 4 for a row. Tests and benches use it, since random weights do not show how
often a mixture accepts drafts. A step of one row reads 0.69 times the bytes of a dense one. The
mixture predicts worse, so it is not in the package. On the beginnings of the held-out modules
({library[tokens]} tokens):

| | dense | mixture |
|---|---|---|
| loss, nats per token | {dense[nats_per_token]:.3f} | {library[nats_per_token]:.3f} |
| greedy token is the true one | {dense[greedy_accuracy]:.3f} | {library[greedy_accuracy]:.3f} |
| first MTP draft accepted | {dense[mtp_first_draft_acceptance]:.3f} | \
{library[mtp_first_draft_acceptance]:.3f} |

How often the engine accepts draft k, of steps with drafts, counted only while all before it are
accepted; and the tokens of a step, of all steps. The prompts are the first 16 of each kind in
`bench/prompts`, continued greedily in bf16 by {new_tokens} tokens; no method changed a text
(`python -m tools.train.mixture_card`).

{runs}

How many of the 8 experts neighboring rows of these texts have together, on average over layers,
and how many if they chose independently, which is what the engine expects of them:

{routing}
"""


def _mixture_section(mixture: dict[str, Any]) -> str:
    """Return the Markdown section on mixture and dense model; empty without a mixture."""
    if not mixture:
        return ""
    depth = len(mixture["mixture"]["runs"][0]["accepted_by_position"])
    head = " | ".join(f"k = {k}" for k in range(1, depth + 1))
    runs = [
        f"| prompts | method | model | {head} | tokens of a step |",
        "|---|" + "---|" * (depth + 3),
    ]
    for pair in zip(mixture["dense"]["runs"], mixture["mixture"]["runs"], strict=True):
        for name, one in zip(("dense", "**mixture**"), pair, strict=True):
            values = " | ".join(f"{value:.3f}" for value in one["accepted_by_position"])
            length = f"{one['tokens_per_step']:.2f}"
            runs.append(f"| {one['text']} | {one['method']} | {name} | {values} | {length} |")
    routing = mixture["routing"]
    of_rows = [
        f"| rows | {' | '.join(map(str, routing['rows']))} |",
        "|---|" + "---|" * len(routing["rows"]),
        f"| of a text | {' | '.join(f'{value:.2f}' for value in routing['distinct'])} |",
        f"| independent | {' | '.join(f'{value:.2f}' for value in routing['independent'])} |",
    ]
    return _MIXTURE.format(
        dense=mixture["dense"]["library"],
        library=mixture["mixture"]["library"],
        new_tokens=mixture["new_tokens"],
        runs="\n".join(runs),
        routing="\n".join(of_rows),
    )


def _heads_section(heads: dict[str, Any]) -> str:
    """Return the Markdown section with a row per head; empty without heads."""
    if not heads:
        return ""
    rows = []
    for name, one in heads.items():
        kept = " ".join(f"{value:.3f}" for value in one["kept_by_position"])
        length = one["mean_acceptance_length"][-1]
        size = f"{one['megabytes']:.1f} MB"
        trained = f"{one['steps']} of {one['texts_per_step']} texts"
        rows.append(f"| {name} | {size} | {trained} | {kept} | {length:.3f} |")
    head = [
        "| head | bf16 | steps | draft 1, 2, .. kept | length with all drafts |",
        "|---|---|---|---|---|",
    ]
    return _HEADS.format(texts=one["texts"], table="\n".join([*head, *rows])) + "\n"


def _chains_table(held_out: dict[str, Any]) -> str:
    """Return a Markdown table with rows for each text and measure, before and after recycling."""
    rows, depth = [], len(held_out["chains"]["library"]["kept_by_position"])
    phases = [("chains_before_recycling", "before"), ("chains", "**now**")]
    for text, title in (("library", "library"), ("own_continuations", "continuations")):
        for measure, unit in (
            ("kept_by_position", "draft k kept"),
            ("mean_acceptance_length", "length with k drafts"),
        ):
            for key, phase in phases:
                if held_out[key]:
                    values = (f"{value:.3f}" for value in held_out[key][text][measure])
                    rows.append(f"| {title}, {unit} | {phase} | {' | '.join(values)} |")
    head = " | ".join(f"k = {k}" for k in range(1, depth + 1))
    return "\n".join([f"| | | {head} |", "|---|---|" + "---|" * depth, *rows])


_PINNED = """\
The pure-Python standard library of CPython {python} with its test suite: {files} files, \
{million_bytes:.1f} MB,
listed with their hashes in `tools/train/manifest.json` (sha256 of the list:
`{manifest_sha256}`).
Left out: files with any copyright holder or license that is not plainly Python's own, idlelib,
lib2to3, demos, fixtures, generated text and tables of data. {held_out_files} files, chosen by a \
hash of their path
and listed in `tools/train/held_out.json`, were held out."""

_OTHER = """\
A directory given by `--corpus`, not the pinned one: {files} files, {million_bytes:.1f} MB, of
which {held_out_files}, chosen by a hash of their path, were held out."""

_RESUMED = """\
The run was interrupted and resumed at steps {}, each time with a fresh optimizer and a short
warm-up, which an uninterrupted run does not repeat to the bit.
"""

_NOTICE = """\
The model in this directory
===========================

The tokenizer and the weights (tokenizer.json, model.safetensors) were made by training on
source code of the Python standard library, CPython {python}:

    Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved

used under the PSF License Agreement, which LICENSE.PSF reproduces together with the older
agreements that it rests on. Changes made: the source files listed in tools/train/manifest.json
were tokenised and used as training data for the network described in README.md; no file
of the library is distributed here, but the network's output may repeat passages of it.

Everything else in this directory is covered by the license of the project.
"""


def _resumed(phase: dict[str, Any]) -> str:
    resumed_at = phase["resumed_at"]
    return _RESUMED.format(" and ".join(map(str, resumed_at))) if resumed_at else ""


def _duration(seconds: int) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def write_papers(directory: Path, metrics: dict[str, Any]) -> None:
    """Write metrics.json, the model card, and, for the pinned corpus, license and notice."""
    write_text(directory / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    corpus, recipe = metrics["corpus"], metrics["recipe"]
    pinned = corpus["manifest_sha256"] is not None
    recycle, recycling = metrics["recycle_recipe"], metrics["recycling"]
    held_out = metrics["held_out"]
    card = _CARD.format(
        **{**metrics["model"], **recipe, "steps": metrics["training"]["steps"]},
        corpus=(_PINNED if pinned else _OTHER).format(
            **corpus, million_bytes=corpus["bytes"] / 1e6
        ),
        million_tokens=metrics["training"]["tokens"] / 1e6,
        unique=corpus["training_tokens"] / 1e6,
        hours=_duration(metrics["training"]["seconds"]),
        machine=metrics["training"]["machine"],
        resumed=_resumed(metrics["training"]),
        recycle_resumed=_resumed(recycling),
        long_percent=round(100 * recipe["long_fraction"]),
        decay_percent=round(100 * recipe["decay_fraction"]),
        recycle_steps=recycling["steps"],
        recycle_batch_tokens=recycle["batch_tokens"],
        recycle_duration=_duration(recycling["seconds"]),
        recycle_machine=recycling["machine"],
        recycle_matrix_lr=recycle["matrix_lr"],
        recycle_vector_lr=recycle["vector_lr"],
        recycle_warmup_steps=recycle["warmup_steps"],
        recycle_decay_percent=round(100 * recycle["decay_fraction"]),
        chain_percent=round(100 * recycle["chains"]),
        depth=recycle["depth"],
        dead_weight=recycle["dead_weight"],
        library=held_out["library"],
        tests=held_out["tests"],
        chains=_chains_table(held_out),
        chain_count=held_out["chains"]["library"]["chains"],
        own=held_out["chains"]["own_continuations"],
        heads=_heads_section(metrics.get("heads", {})),
        mixture=_mixture_section(metrics.get("mixture", {})),
    )
    write_text(directory / "README.md", card)
    if pinned:
        write_text(directory / "LICENSE.PSF", psf_license())
        write_text(directory / "NOTICE", _NOTICE.format(**corpus))
