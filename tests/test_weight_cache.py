# SPDX-License-Identifier: Apache-2.0
"""Packed weights on disk: made once, then mapped, and made anew when they are damaged."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import make_mtp_model
from safetensors.torch import save_file
from shared_fixtures import every_isa
from specops import dense
from specops.api import tokenizer
from specops.checkpoints import stored_tensor
from specops.dense import PackedWeight
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import CachedWeights, WeightCache, load_model, weight_cache
from specops.engine.models.weights import WeightSettings, WeightSource
from torch import Tensor

pytestmark = pytest.mark.usefixtures("empty_disk")

ROOMY = 1 << 40
SIZES = {"q_proj": 64, "k_proj": 16, "v_proj": 20}  # outputs, not multiples of 16, of 52 inputs


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    (tmp_path / "model").mkdir()
    tensors = {f"{name}.weight": torch.randn(size, 52) for name, size in SIZES.items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the list of weights that are packed."""
    found: list[Tensor] = []
    pack = dense._C.pack_weight

    def noted(weight: Tensor, *rest: Any) -> None:
        found.append(weight)
        pack(weight, *rest)

    monkeypatch.setattr(dense._C, "pack_weight", noted)
    return found


def source(
    model_dir: Path, root: Path | None, max_bytes: int = ROOMY, **options: Any
) -> WeightSource:
    cache = None if root is None else WeightCache(root, max_bytes)
    settings = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "cache": cache, **options}
    return WeightSettings(**settings).open(model_dir)


def read(of: WeightSource, **options: Any) -> PackedWeight:
    return of.linear("", list(SIZES), list(SIZES.values()), 52, **options)


def assert_equal(ours: PackedWeight, theirs: PackedWeight) -> None:
    for name, value in ours._asdict().items():
        want = getattr(theirs, name)
        if isinstance(value, Tensor):
            assert value.dtype == want.dtype and torch.equal(value, want), name
            assert value.data_ptr() % 64 == 0
        else:
            assert value == want, name


def files(root: Path, pattern: str = "*/*") -> list[Path]:
    return sorted(one for one in root.glob(pattern) if one.parent.name != "digests")


VARIANTS: list[dict[str, Any]] = [
    {},
    {"quantization": "wint8"},
    {"quantization": "wint4"},
    {"quantization": "wint4", "activation": "silu"},
    {"activation": "silu"},
    {"rows": torch.tensor([1, 5, 99], dtype=torch.int32)},
    {"rows": torch.tensor([1, 5, 98], dtype=torch.int32)},
]


def test_second_load_packs_nothing(model_dir: Path, root: Path, packed: list[Tensor]) -> None:
    expected = [read(source(model_dir, None), **variant) for variant in VARIANTS]
    expected.append(read(source(model_dir, None, dtype=torch.float32)))
    for times in (2, 2, 1):  # the third source is another checkpoint of the same bytes
        del packed[:]
        again = source(model_dir, root)
        found = [read(again, **variant) for variant in VARIANTS]
        assert again.read == {f"{name}.weight" for name in SIZES}
        found.append(read(source(model_dir, root, dtype=torch.float32)))
        for one, want in zip(found, expected, strict=True):
            assert_equal(one, want)
        assert len(files(root)) == len(expected)
        if times == 1 or not packed:
            assert not packed
            continue
        assert len(packed) == len(expected)
        shutil.copytree(model_dir, model_dir.parent / "copy")
        model_dir = model_dir.parent / "copy"
        os.rename(model_dir / "model.safetensors", model_dir / "other.safetensors")
        index = {"weight_map": {f"{name}.weight": "other.safetensors" for name in SIZES}}
        (model_dir / "model.safetensors.index.json").write_text(str(index).replace("'", '"'))


@pytest.mark.parametrize(("quantization", "kind"), [("none", "plain"), ("mix_quant", "int4")])
def test_experts_share_one_file(
    model_dir: Path, root: Path, packed: list[Tensor], quantization: str, kind: str
) -> None:
    tensors = {
        f"experts.{expert}.{part}.weight": torch.randn(32, 52)
        for expert in range(3)
        for part in ("gate_proj", "up_proj")
    }
    save_file(tensors, model_dir / "model.safetensors")

    def experts(root: Path | None) -> PackedWeight:
        of = source(model_dir, root, quantization=quantization)
        parts = ("gate_proj", "up_proj")
        return of.experts("experts.", range(3), parts, (32, 32), 52, activation="silu")

    want = experts(None)
    assert want.kind == kind and len(want.data) == 3 == len(packed)
    for _ in range(2):
        assert_equal(experts(root), want)
        assert len(packed) == 6 and len(files(root)) == 1


def test_instruction_set_build_and_config_have_folders_of_their_own(
    model_dir: Path, root: Path, packed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    isas = 0
    for isas, _ in enumerate(every_isa(), 1):
        read(source(model_dir, root))
        assert len(packed) == len(files(root)) == isas
    monkeypatch.setattr(weight_cache, "_code_digest", lambda: "another build")
    read(source(model_dir, root))
    assert len(packed) == isas + 1
    for number in (4, 8):  # readers of files depend on this
        config = {"quantization_config": {"bits": number}, "rope_theta": number}
        (model_dir / "config.json").write_text(json.dumps(config))
        read(source(model_dir, root))
    assert len(packed) == isas + 3
    (model_dir / "config.json").write_text(json.dumps({**config, "rope_theta": 1}))
    read(source(model_dir, root))
    assert len(packed) == isas + 3


def test_digest_of_a_build_covers_the_code_that_reads_and_packs() -> None:
    code = weight_cache._code_files()
    for module in (dense, stored_tensor, weight_cache):
        assert Path(module.__file__) in code
    assert Path(tokenizer.__file__) not in code


def test_changed_file_is_read_again(
    model_dir: Path, root: Path, packed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changed file has the same size and modification time."""
    monkeypatch.setattr(weight_cache, "_SETTLED_SECONDS", -1.0)
    file = model_dir / "model.safetensors"
    before = read(source(model_dir, root))
    (known,) = (root / "digests").iterdir()
    shown = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    os.utime(file, ns=(shown.st_atime_ns, shown.st_mtime_ns))
    assert file.stat().st_mtime_ns == shown.st_mtime_ns and file.stat().st_size == shown.st_size
    after = read(source(model_dir, root))
    assert_equal(after, read(source(model_dir, None)))
    assert not torch.equal(before.data, after.data)
    # Only a valid digest of exactly this file is trusted.
    (other,) = set((root / "digests").iterdir()) - {known}
    (digest, _), whole = known.read_text().split(" "), other.read_bytes()
    check = weight_cache._check([*weight_cache._facts(file), digest])
    other.write_bytes(digest.encode() + b" " + check)
    assert_equal(read(source(model_dir, root)), before)
    flipped = bytearray(whole)
    flipped[0] ^= 1
    for damaged in (b"", b"0", b"\xff" * 64, bytes(flipped), whole[:-1], known.read_bytes()):
        other.write_bytes(damaged)
        assert_equal(read(source(model_dir, root)), after)
        assert other.read_bytes() == whole


def test_numbers_are_measured_once_and_again_if_damaged(tmp_path: Path) -> None:
    cached = CachedWeights(WeightCache(tmp_path, ROOMY), tmp_path)
    measured: list[int] = []

    def measure() -> list[float]:
        measured.append(1)
        return [0.5, 1.0, 2.25]

    def numbers() -> list[float]:
        return cached.numbers("key", measure, 3)

    assert numbers() == numbers() == [0.5, 1.0, 2.25] and len(measured) == 1
    assert cached.numbers("other", lambda: [7.0], 1) == [7.0]
    (tmp_path / f"{weight_cache._digest(['other'])}.json").unlink()
    (file,) = tmp_path.glob("*.json")
    whole = file.read_bytes()

    def signed(text: str) -> bytes:
        return text.encode() + b"\n" + weight_cache._check(["key", text])

    wrong = [
        "[]",
        "{}",
        "null",
        "[0.5, 1.0]",
        "[0.5, 1.0, NaN]",
        "[0.5, 1.0, Infinity]",
        "[" * 9999,
    ]
    wrong += [
        "[0.5, 1.0, -2.25]",
        '[0.5, 1.0, "2.25"]',
        "[0.5, 1.0, true]",
        "[0.5, 1.0, 2.25, 3.0]",
    ]
    damaged = [
        b"",
        b"[]",
        b"\xff\n",
        whole[:-1],
        whole.replace(b"2.25", b"3.25"),
        *map(signed, wrong),
    ]
    for number, content in enumerate(damaged, 2):
        file.write_bytes(content)
        assert numbers() == [0.5, 1.0, 2.25] and len(measured) == number, content
        assert file.read_bytes() == whole
    assert numbers() == [0.5, 1.0, 2.25] and len(measured) == number


@pytest.mark.parametrize("scale", [1.0, 3.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embedding_is_cached_if_the_file_has_other_values(
    model_dir: Path, root: Path, dtype: torch.dtype, scale: float
) -> None:
    shape = (SIZES["q_proj"], 52)
    plain = source(model_dir, None, dtype=dtype).tensor("q_proj.weight", *shape)
    expected = plain * torch.tensor(scale, dtype=dtype)

    def found() -> Tensor:
        of = source(model_dir, root, dtype=dtype)
        table = of.embedding("q_proj.weight", *shape, scale=scale)
        assert table.dtype == dtype and of.read == {"q_proj.weight"}
        return table

    for _ in range(2):  # written, then mapped
        assert torch.equal(found(), expected)
    assert len(files(root)) == (scale != 1.0 or dtype != torch.float32)
    for file in files(root):
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole[:-9] + b"x" + whole[-8:], whole[:5000], b""):
            file.write_bytes(damaged)
            assert torch.equal(found(), expected)
            assert file.read_bytes() == whole
    other = source(model_dir, root, dtype=dtype).embedding("q_proj.weight", *shape, scale=2.5)
    assert torch.equal(other, plain * 2.5)


def test_digest_of_a_file_just_written_is_not_stored(model_dir: Path, root: Path) -> None:
    os.utime(model_dir / "model.safetensors")
    read(source(model_dir, root))
    assert list((root / "digests").iterdir()) == []


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "empty": lambda file: file.write_bytes(b""),
    "a bit of the data": lambda file: flip(file, -1000),
    "a bit of the header": lambda file: flip(file, file.read_bytes().index(b"num_inputs") + 14),
    "another weight's": lambda file: shutil.copy(
        next(one for one in file.parent.iterdir() if one != file), file
    ),
    "a folder": lambda file: (file.unlink(), file.mkdir()),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_made_anew(
    model_dir: Path,
    root: Path,
    packed: list[Tensor],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = read(source(model_dir, root))
    (file,) = files(root)
    before = PackedWeight(*(x.clone() if isinstance(x, Tensor) else x for x in before))
    read(source(model_dir, root), activation="silu")
    damage(file)
    del packed[:]
    assert_equal(read(source(model_dir, root)), before)
    assert len(packed) == 1
    assert f"{file} is damaged and is rebuilt" in caplog.text
    caplog.clear()
    if file.is_file():
        assert_equal(read(source(model_dir, root)), before)
        assert len(packed) == 1 and not caplog.text


def test_least_recently_used_folders_are_evicted(
    tmp_path: Path, root: Path, packed: list[Tensor]
) -> None:
    foreign_folder = root / "photos"  # existed before the folder became a cache
    foreign_folder.mkdir(parents=True)
    os.utime(foreign_folder, (0, 0))
    folders = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        tensors = {f"{name}.weight": torch.randn(size, 52) for name, size in SIZES.items()}
        save_file(tensors, tmp_path / str(number) / "model.safetensors")
        folders.append(tmp_path / str(number))
    read(source(folders[0], root))
    (file,) = files(root)
    limit = file.stat().st_size * 5 // 2
    read(source(folders[1], root, limit))
    assert len(files(root)) == 2
    for number, one in enumerate((file, *set(files(root)) - {file}), 1):
        os.utime(one.parent, (number, number))
    read(source(folders[0], root, limit))  # now the second is the least recently used
    read(source(folders[2], root, limit))
    assert len(files(root)) == 2 and file in files(root) and len(packed) == 3
    assert foreign_folder.exists()
    # The folder in use stays, and weights that do not fit are used without the cache.
    tight = source(folders[2], root, limit)
    read(tight, activation="silu")
    assert_equal(
        read(tight, quantization="wint8"),
        read(source(folders[2], None, limit), quantization="wint8"),
    )


def test_full_disk_is_a_warning(
    model_dir: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    want = read(source(model_dir, None))
    usage = shutil.disk_usage(model_dir)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        for _ in range(2):
            assert_equal(read(one := source(model_dir, root)), want)
        assert_equal(read(one), want)
        assert caplog.text.count("stores no more weights: the disk has 0 MiB left") == 2
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert_equal(read(source(model_dir, root)), want)
    assert "stores no more weights: [Errno 28]" in caplog.text
    assert files(root) == []
    assert_equal(read(source(model_dir, root, max_bytes=100)), want)
    assert "it would be larger than 0 MiB" in caplog.text and files(root) == []


def test_unusable_folder_is_a_warning(
    model_dir: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.write_text("a file")
    assert_equal(read(source(model_dir, root)), read(source(model_dir, None)))
    assert f"the weight cache {root} is disabled: " in caplog.text


def test_read_only_folder_is_read(
    model_dir: Path,
    root: Path,
    packed: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(weight_cache, "_SETTLED_SECONDS", -1.0)
    want = read(source(model_dir, root))
    for name in ("utime", "replace"):
        monkeypatch.setattr(os, name, read_only)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", read_only)
    assert_equal(read(source(model_dir, root)), want)
    assert len(packed) == 1 and not caplog.text


def test_several_threads_may_make_the_same_file(model_dir: Path, root: Path) -> None:
    want = read(source(model_dir, None))
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: read(source(model_dir, root)), range(24)):
            assert_equal(found, want)
    assert len(files(root)) == 1


def test_old_unfinished_files_are_removed(model_dir: Path, root: Path) -> None:
    read(source(model_dir, root))
    (file,) = files(root)
    old, young = (file.parent / f"unfinished-{name}" for name in ("old", "young"))
    for one in (old, young):
        one.write_text("of a process that is no more")
    os.utime(old, (1, 1))
    read(source(model_dir, root), quantization="wint8")
    assert young.exists() and not old.exists()


def test_setting_selects_the_cache_folder(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = [model_dir / "model.safetensors"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert WeightCache.of_setting("none", ROOMY) is None
    auto = WeightCache.of_setting("auto", ROOMY)
    assert auto is not None and auto.of(file) is None  # too small
    assert not (tmp_path / "own").exists()
    monkeypatch.setattr(weight_cache, "_LEAST_BYTES", file[0].stat().st_size)
    auto = WeightCache.of_setting("auto", ROOMY)
    assert auto is not None and isinstance(auto.of(file), CachedWeights)
    assert (tmp_path / "own" / "specops" / "weights" / "digests").is_dir()
    named = WeightCache.of_setting(str(tmp_path / "named"), ROOMY)
    assert named is not None and named.of(file) is not None and (tmp_path / "named").is_dir()
    small = tmp_path / "model.gguf"  # GGUF files of any size are cached
    small.write_bytes(b"GGUF")
    monkeypatch.setattr(weight_cache, "_LEAST_BYTES", 1 << 40)
    auto = WeightCache.of_setting("auto", ROOMY)
    assert auto is not None and isinstance(auto.of([small]), CachedWeights)
    for wrong in ("", None, 3):
        with pytest.raises(ValueError, match="weight_cache must be a non-empty string, got"):
            EngineConfig(weight_cache=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_cache_bytes must be at least 1, got 0"):
        EngineConfig(weight_cache_bytes=0)


def mappings(name: str) -> list[dict[str, int]]:
    """Return the fields of this process's mappings of files with such a name, in KiB."""
    found: list[dict[str, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split()
        if not field.endswith(":"):
            is_ours = bool(values) and name in values[-1]
            found += [{}] if is_ours else []
        elif is_ours and values[-1:] == ["kB"]:
            found[-1][field] = int(values[0])
    return found


def test_memory_of_a_checkpoint_is_released(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensor, "_COPIED_BYTES", 0)
    path = str(model_dir / "model.safetensors")
    one = source(model_dir, None, dtype=torch.float32)
    weight = read(one)
    assert weight.data.numel() and not mappings(path)
    tensor = one.tensor("q_proj.weight", 64, 52)  # it is not copied and has a mapping of its own
    assert len(mappings(path)) == 1
    del tensor
    assert not mappings(path)


def run(model: Path, method: str, cache: str) -> list[Completion]:
    speculative = {"method": method, "adaptive_verification": method == "ngram"}
    if method == "mtp":
        speculative["quantization"] = "wint4"
    if method != "naive":
        speculative["num_speculative_tokens"] = 3
    engine = Engine(
        EngineConfig(
            model=str(model),
            quantize_head="wint8",
            speculative_config=SpeculativeConfig.from_dict(speculative),
            weight_cache=cache,
            num_pages=50,
        )
    )
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
    found = engine.generate([[5, 9, 23, 5, 9], [11]], [params] * 2)
    if cache != "none":
        maps = mappings(cache)
        assert sum(one["Rss:"] for one in maps) > 0
        # Pages of a file that are written to would become the process's own.
        assert sum(one["Anonymous:"] for one in maps) == 0
    return found


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_engine_starts_from_the_cache(tmp_path: Path, packed: list[Tensor], method: str) -> None:
    model = make_mtp_model(tmp_path / "model")
    plain = run(model, "naive", "none")
    root = tmp_path / "cache"
    for _ in range(2):
        del packed[:]
        found = run(model, method, str(root))
        for one, other in zip(found, plain, strict=True):
            assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
    # A dry run packs narrow weights of its own.
    assert not {weight.shape[1] for weight in packed} & {64, 96, 128}
    assert len(files(root, "*/*.json")) == (method == "ngram")
    again = load_model(model, weight_cache=WeightCache(root, ROOMY))
    assert again.cached is not None
