# SPDX-License-Identifier: Apache-2.0
"""Engine steps compared with peers' on the same weights; speculation; server start.

A peer's step is one forward pass over the same number of rows and an argmax, no more than ours.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median

from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig

from bench.checkpoints import QWEN8, Checkpoint, bundled, decode_bytes, qwen06, without_weights
from bench.common import BENCH, Bench, Figure, Peer, PeerError, Timing
from bench.cuda import CudaBench, free_memory
from bench.engine_runs import Decoding, Stepper, decode
from bench.limits import instructions, lowest_limit

PEERS = ("llama_cpp_peer", "openvino_peer", "transformers_peer")
NAMES = {
    "llama_cpp_peer": "llama.cpp",
    "openvino_peer": "OpenVINO GenAI",
    "transformers_peer": "transformers",
}
DRAFTS = 4
MAX_TOKENS = 128
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8, "adaptive_verification": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive_verification": False}


def run_qwen06(bench: Bench) -> None:
    """Measure decoding and verification in the shape of Qwen3-0.6B at kv 1,024."""
    peers = load_peers(bench, qwen06(), PEERS)
    for batch in (1, 8):
        names = PEERS if batch == 1 else PEERS[:2]
        _steps(
            bench,
            qwen06(),
            {name: peers[name] for name in names if name in peers},
            family="qwen06",
            batch=batch,
            kv_len=1024,
            steps=5 if batch == 1 else 2,
            rounds=9,
            bars={
                (1, 1): {
                    "floor": "ratio <= 1.25",
                    "llama_cpp_peer": "ratio >= 0.95",
                    "openvino_peer": "ratio >= 1.1",  # OpenVINO is near the memory floor
                },
                (1, 5): {"one_row": "ratio <= 1.2"},
                (8, 1): {"openvino_peer": "ratio >= 1.15"},
                (8, 5): {"openvino_peer": "ratio >= 1.3"},
            },
        )


def run_bundled(bench: Bench) -> None:
    """Measure the bundled model at kv 384: decoding, verification, host time, busy core, pauses."""
    peers = load_peers(bench, bundled(), PEERS)
    for batch in (1, 8):
        _steps(
            bench,
            bundled(),
            peers,
            family="bundled",
            batch=batch,
            kv_len=384,
            # Many steps, so that the first one, which finds the weights evicted, hardly counts.
            steps=28,
            rounds=7,
            bars={
                (1, 1): {"transformers_peer": "ratio >= 4", "openvino_peer": "ratio >= 1"},
                (8, 1): {"openvino_peer": "ratio >= 1"},
            },
        )
    stepper = Stepper(bundled(), batch=1, kv_len=512, drafts=0, num_threads=bench.num_threads)
    reads = [bench.read_gb_s() for _ in range(5)]
    host = median(bench.undisturbed(lambda: stepper.host_seconds(20)) for _ in range(9))
    bench.add(
        Figure(
            "bundled.b1.host",
            "bundled model, batch 1: time of a step outside the compiled ops",
            host * 1e3,
            "ms",
            bar="value <= 0.3",
            threads=bench.num_threads,
            read_gb_s=median(reads),
        )
    )
    _busy_neighbor(bench, stepper)
    _after_a_pause(bench, stepper)


def run_ngram(bench: Bench) -> None:
    """Measure n-gram drafts with the bundled model on edits and completions, batch 1."""
    checkpoint = bundled()
    peers = load_peers(bench, checkpoint, PEERS[:1])
    engine = Engine(
        EngineConfig(
            device="cpu",
            speculative_config=SpeculativeConfig(method="naive"),
            enable_prefix_caching=False,
            num_threads=bench.num_threads,
        )
    )
    for kind in ("edits", "completions"):
        prompts = prompt_token_ids(engine, kind)
        for temperature in (0.0, 0.8):
            _speculation(bench, engine, peers, kind, prompts, temperature)


def run_suffix(bench: Bench) -> None:
    """Measure suffix drafts with the bundled model, with an empty shared tree and a filled one."""
    engine = Engine(
        EngineConfig(
            device="cpu",
            speculative_config=SpeculativeConfig(method="naive"),
            enable_prefix_caching=False,
            num_threads=bench.num_threads,
        )
    )
    for kind in ("edits", "completions"):
        prompts = prompt_token_ids(engine, kind)
        for temperature in (0.0, 0.8):
            _suffix(bench, engine, kind, prompts, temperature)


def _suffix(
    bench: Bench, engine: Engine, kind: str, prompts: list[list[int]], temperature: float
) -> None:
    """Add the decoding speed after the first token, over all prompts, plain and with drafts."""
    cache = engine.drafters["suffix"].cache
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def run(index: int, config: Mapping[str, object], known: Iterable[int]) -> Decoding:
        for name in cache.cached_requests:
            cache.evict(name)
        cache.reclaim()  # free evicted answers now, since drafts may use them until then
        for other in known:
            cache.add(answers[other], request_id=other)
        return decode(engine, prompts[index], params[index], config)

    everyone = range(len(prompts))
    plain = {"method": "naive"}
    answers = [run(index, plain, ()).token_ids for index in everyone]
    runs: dict[str, list[Decoding]] = {"plain": [], "cold": [], "warm": [], "again": []}
    reads = []
    for index in everyone:
        reads.append(bench.read_gb_s())
        others = [other for other in everyone if other != index]
        for case, config, known in (
            ("plain", plain, []),
            ("cold", SUFFIX, []),
            ("warm", SUFFIX, others),
            ("again", SUFFIX, everyone),
        ):
            runs[case].append(bench.undisturbed(partial(run, index, config, known)))
    tokens = (MAX_TOKENS - 1) * len(prompts)
    rates = {case: tokens / sum(one.seconds for one in done) for case, done in runs.items()}
    mode = "greedy" if temperature == 0 else f"t{temperature}"
    known_texts = {
        "cold": "the shared tree empty",
        "warm": "with the answers to all other prompts",
        "again": "asked again",
    }
    common = {"threads": bench.num_threads, "read_gb_s": median(reads)}
    for case, known_text in known_texts.items():
        per_step = tokens / sum(one.num_steps for one in runs[case])
        bench.add(
            Figure(
                f"suffix.{kind}.{mode}.{case}",
                f"bundled model, {kind}, {mode}, suffix, {known_text}: {per_step:.2f} tokens per "
                "step, times faster than own plain decoding",
                rates[case],
                "tok/s",
                "specops, plain",
                rates["plain"],
                rates[case] / rates["plain"],
                "ratio >= 1.5" if temperature == 0 and case != "warm" else None,
                **common,
            )
        )
    differ = sum(
        one.token_ids != answer
        for case in known_texts
        for one, answer in zip(runs[case], answers, strict=True)
    )
    bench.add(
        Figure(
            f"suffix.{kind}.{mode}.differ",
            f"bundled model, {kind}, {mode}: texts of {3 * len(prompts)} that suffix changes",
            differ,
            "texts",
            bar="value == 0",
            **common,
        )
    )


def run_server(bench: Bench) -> None:
    """Time the server from its command line to the first token of a streamed answer."""
    seconds = [bench.undisturbed(_first_token_seconds) for _ in range(bench.pick(3, 1))]
    bench.add(
        Figure(
            "server.first_token",
            "bundled model: from starting the server to the first streamed token",
            median(seconds),
            "s",
            bar="value <= 3",
            threads=bench.num_threads,
            read_gb_s=bench.read_gb_s(),
        )
    )


def prompt_token_ids(engine: Engine, kind: str) -> list[list[int]]:
    """Return the committed prompts as the bundled model's tokens."""
    prompts = json.loads((BENCH / "prompts" / f"{kind}.json").read_text())
    return [engine.tokenizer.encode(prompt["text"]) for prompt in prompts]


def load_peers(
    bench: Bench, checkpoint: Checkpoint, names: tuple[str, ...], kind: str = "bf16"
) -> dict[str, Peer]:
    """Start the installed peers, each with a copy of the weights in format `kind`."""
    peers = {}
    for name in names:
        peer = bench.peer(name)
        if peer is None:
            continue
        try:
            peer.ask("load", model=str(checkpoint.for_peer(name, kind)))
        except (PeerError, subprocess.CalledProcessError) as error:
            print(f"  no {name}: {error}", flush=True)
            continue
        peers[name] = peer
    return peers


def _steps(
    bench: Bench,
    checkpoint: Checkpoint,
    peers: dict[str, Peer],
    *,
    family: str,
    batch: int,
    kv_len: int,
    steps: int,
    rounds: int,
    bars: dict[tuple[int, int], dict[str, str]],
) -> None:
    """Time steps of 1 and of 1 + DRAFTS rows per request, ours and every peer's in turn."""
    stepper = Stepper(
        checkpoint, batch=batch, kv_len=kv_len, drafts=DRAFTS, num_threads=bench.num_threads
    )
    for rows in (1, 1 + DRAFTS):
        cases: dict[str, Callable[[], float]] = {
            "ours": lambda r=rows: stepper.step(steps, drafts=r - 1)
        }
        if rows > 1:
            cases["one_row"] = lambda: stepper.step(steps)
        for name, peer in peers.items():
            if name == "transformers_peer" and rows > 1:
                continue
            peer.ask("prepare", batch=batch, kv_len=kv_len, rows=rows)
            cases[name] = lambda p=peer: p.ask("step", steps=steps)["seconds"]
        timing = bench.rounds(cases, rounds=rounds)
        step_figures(
            bench,
            timing,
            prefix=f"{family}.b{batch}.rows{rows}",
            what=f"{family}, batch {batch}, kv {kv_len}, {rows} row{'s' * (rows > 1)} a request",
            bytes_read=checkpoint.weight_bytes + batch * stepper.kv_len * checkpoint.kv_bytes,
            work=instructions(bench, "bf16", checkpoint.weight_bytes / 2, batch * rows),
            bars=bars.get((batch, rows), {}),
        )


def step_figures(
    bench: Bench,
    timing: Timing,
    *,
    prefix: str,
    what: str,
    bytes_read: float,
    work: Mapping[str, float],
    bars: dict[str, str],
) -> None:
    """Add a step's times, relative to reading its bytes, to one row, and to peers."""
    step = timing.median("ours")
    limit, least = lowest_limit(bench, bytes_read, timing.read_gb_s("ours"), work)
    common = {"threads": bench.num_threads, "read_gb_s": timing.read_gb_s("ours")}
    bench.add(
        Figure(
            f"{prefix}.floor",
            f"{what}: a step over reading its bytes once",
            step * 1e3,
            "ms",
            "memory floor",
            bytes_read * 1e-6 / timing.read_gb_s("ours"),
            1 / timing.share("ours", bytes_read),
            bars.get("floor"),
            limit=limit,
            of_limit=least / step,
            **common,
        )
    )
    for name in timing.seconds:
        if name == "ours":
            continue
        own = name == "one_row"
        ratio = timing.ratio("ours", name) if own else timing.ratio(name, "ours")
        bench.add(
            Figure(
                f"{prefix}.vs_{name.removesuffix('_peer')}",
                f"{what}: {'over one row' if own else f'times faster than {NAMES[name]}'}",
                step * 1e3,
                "ms",
                "one row" if own else NAMES[name],
                timing.median(name) * 1e3,
                ratio,
                bars.get(name),
                **common,
            )
        )


def _busy_neighbor(bench: Bench, stepper: Stepper) -> None:
    """Time a step while another process keeps one of the two cores busy."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.kill(busy.pid, signal.SIGSTOP)

    def beside() -> float:
        os.kill(busy.pid, signal.SIGCONT)
        seconds = stepper.step(15)
        os.kill(busy.pid, signal.SIGSTOP)
        return seconds

    try:
        timing = bench.rounds(
            {"busy": beside, "alone": lambda: stepper.step(15)}, rounds=15, guarded=False
        )
    finally:
        busy.kill()
        busy.wait()
    bench.add(
        Figure(
            "bundled.b1.busy",
            "bundled model, batch 1: a step beside one busy thread over one without",
            timing.median("busy") * 1e3,
            "ms",
            "undisturbed",
            timing.median("alone") * 1e3,
            timing.ratio("busy", "alone"),
            "ratio <= 2.5",
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s("alone"),
        )
    )


def _after_a_pause(bench: Bench, stepper: Stepper) -> None:
    """Time steps after a pause, as in a server, when the worker threads have gone to sleep."""

    def after() -> float:
        time.sleep(0.03)
        return stepper.step(8)

    timing = bench.rounds({"after": after, "before": lambda: stepper.step(8)}, rounds=21)
    bench.add(
        Figure(
            "bundled.b1.after_pause",
            "bundled model, batch 1: the first eight steps after 30 ms without work over others",
            timing.median("after") * 1e3,
            "ms",
            "without pause",
            timing.median("before") * 1e3,
            timing.ratio("after", "before"),
            "ratio <= 1.6",
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s("before"),
        )
    )


def _speculation(
    bench: Bench,
    engine: Engine,
    peers: dict[str, Peer],
    kind: str,
    prompts: list[list[int]],
    temperature: float,
) -> None:
    """Add the decoding speed after the first token, over all prompts, plain and with drafts."""
    runs: dict[str, list[Decoding]] = {"plain": [], "ngram": []}
    llama_seconds, reads = 0.0, []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=temperature, seed=index, ignore_eos=True
        )
        reads.append(bench.read_gb_s())
        for case, config in (("plain", {"method": "naive"}), ("ngram", NGRAM)):
            run = partial(decode, engine, prompt, params, config)
            runs[case].append(bench.undisturbed(run))
        if "llama_cpp_peer" in peers and temperature == 0:
            ask = partial(peers["llama_cpp_peer"].ask, "generate", prompts=[prompt])
            answer = bench.undisturbed(partial(ask, max_tokens=MAX_TOKENS, lookup=0))
            llama_seconds += answer["decode_seconds"]
    tokens = (MAX_TOKENS - 1) * len(prompts)
    rates = {case: tokens / sum(run.seconds for run in done) for case, done in runs.items()}
    per_step = tokens / sum(run.num_steps for run in runs["ngram"])
    differ = sum(
        a.token_ids != b.token_ids for a, b in zip(runs["plain"], runs["ngram"], strict=True)
    )
    mode = "greedy" if temperature == 0 else f"t{temperature}"
    prefix = f"ngram.{kind}.{mode}"
    what = f"bundled model, {kind}, {mode}, ngram: {per_step:.2f} tokens per step"
    edits = kind == "edits" and temperature == 0
    common = {"threads": bench.num_threads, "read_gb_s": median(reads)}
    bench.add(
        Figure(
            f"{prefix}.vs_plain",
            f"{what}, times faster than own plain decoding",
            rates["ngram"],
            "tok/s",
            "specops, plain",
            rates["plain"],
            rates["ngram"] / rates["plain"],
            "ratio >= 2" if edits else None,
            **common,
        )
    )
    if llama_seconds:
        bench.add(
            Figure(
                f"{prefix}.vs_llama_cpp",
                f"{what}, times faster than llama.cpp's plain decoding",
                rates["ngram"],
                "tok/s",
                "llama.cpp, plain",
                tokens / llama_seconds,
                rates["ngram"] * llama_seconds / tokens,
                "ratio >= 1.2" if edits else None,
                **common,
            )
        )
    bench.add(Figure(f"{prefix}.tokens_per_step", what, per_step, "tokens", **common))
    bench.add(
        Figure(
            f"{prefix}.differ",
            f"bundled model, {kind}, {mode}: texts of {len(prompts)} that ngram changes",
            differ,
            "texts",
            bar="value == 0",
            **common,
        )
    )


def _first_token_seconds() -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = json.dumps({"prompt": "def main():", "max_tokens": 4, "stream": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    begun = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "specops.engine", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    while not answer.readline().startswith(b"data:"):
                        pass
                return time.perf_counter() - begun
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
            except urllib.error.URLError:
                if server.poll() is not None:
                    raise RuntimeError("the server ended before it answered") from None
            time.sleep(0.01)
    finally:
        server.terminate()
        server.wait()


# On a GPU


def run_bundled_cuda(bench: CudaBench) -> None:
    """Measure the bundled model with and without n-gram drafts: speed, and texts that differ."""
    device = bench.pick("cuda", "cpu")
    count, max_tokens = bench.pick((20, MAX_TOKENS), (2, 8))
    for batch in (1, 8):
        engine = Engine(
            EngineConfig(
                device=device,
                speculative_config=SpeculativeConfig(method="naive"),
                enable_prefix_caching=False,
                max_num_seqs=batch,
            )
        )
        for kind in ("edits", "completions"):
            prompts = prompt_token_ids(engine, kind)[:count]
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            texts, rates = {}, {}
            for case, config in (("plain", {"method": "naive"}), ("ngram", NGRAM)):
                took = []
                for _ in range(bench.pick(3, 1)):  # the first round captures CUDA graphs
                    begun = time.perf_counter()
                    done = engine.generate(prompts, params, speculative_config=config)
                    took.append(time.perf_counter() - begun)
                texts[case] = [output.token_ids for output in done]
                rates[case] = max_tokens * len(prompts) / min(took)
            prefix, what = f"bundled.{kind}.b{batch}", f"bundled model, {kind}, batch {batch}"
            bench.add(
                Figure(
                    f"{prefix}.ngram",
                    f"{what}, greedy, prefill included: ngram over plain",
                    rates["ngram"],
                    "tok/s",
                    "specops, plain",
                    rates["plain"],
                    rates["ngram"] / rates["plain"],
                )
            )
            differ = sum(a != b for a, b in zip(texts["plain"], texts["ngram"], strict=True))
            bench.add(
                Figure(
                    f"{prefix}.differ",
                    f"{what}: greedy texts of {len(prompts)} that ngram changes",
                    differ,
                    "texts",
                    bar="value == 0",
                )
            )


def run_qwen8_cuda(bench: CudaBench) -> None:
    """Time steps in the shape of Qwen3-8B (random weights), relative to reading the weights."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}
    small |= {"num_key_value_heads": 1, "intermediate_size": 64}
    config = bench.pick(QWEN8, {**QWEN8, **small})
    checkpoint = without_weights(bench.pick("qwen8", "rehearsal"), config)
    kv_len, steps = bench.pick((1024, 20), (32, 2))
    for batch in bench.pick((1, 32), (1, 2)):
        took: dict[int, float] = {}
        for drafts in (0, DRAFTS):
            stepper = Stepper(
                checkpoint,
                batch=batch,
                kv_len=kv_len,
                drafts=drafts,
                device=bench.pick("cuda", "cpu"),
                load_format="dummy",
            )
            stepper.step(steps, drafts)
            windows = [stepper.step(steps, drafts) for _ in range(bench.pick(7, 1))]
            took[1 + drafts] = median(windows)
            length = stepper.kv_len
            del stepper
            free_memory()
        reads = [bench.read_gb_s() for _ in range(9)]
        floor = decode_bytes(config, batch=batch, kv_len=length) * 1e-9 / median(reads)
        prefix, what = f"qwen8.b{batch}", f"Qwen3-8B shape, kv {kv_len}, batch {batch}"
        bench.add(
            Figure(
                f"{prefix}.decode",
                f"{what}: a decode step over the time to read weights and KV",
                took[1] * 1e3,
                "ms",
                "read floor",
                floor * 1e3,
                took[1] / floor,
                "ratio <= 1.25",
                read_gb_s=median(reads),
            )
        )
        rows = 1 + DRAFTS
        bench.add(
            Figure(
                f"{prefix}.verify",
                f"{what}: a step of {rows} rows a request over one of 1",
                took[rows] * 1e3,
                "ms",
                "1 row",
                took[1] * 1e3,
                took[rows] / took[1],
                "ratio <= 1.2",
                read_gb_s=median(reads),
            )
        )
