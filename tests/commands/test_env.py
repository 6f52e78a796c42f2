"""``python -m dsv4 env``: a report that shows no home folder."""

from __future__ import annotations

from pathlib import Path

import dsv4
from dsv4 import __main__ as command_line
from dsv4.commands import env


def test_versions_and_gpus_are_named(capsys):
    assert command_line.main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"dsv4 {dsv4.__version__} (" in text
    for word in ("Python ", "torch ", "triton ", "transformers ", "GPU"):
        assert f"\n{word}" in text
    assert str(Path.home()) + "/" not in text


def test_settings_are_shown_and_secrets_and_homes_are_not():
    environment = {
        "DSV4_BACKEND": "reference",
        "DSV4_CACHE_DIR": f"{Path.home()}/cache:/home/somebody/x:/Users/other/y:/srv/z",
        "HF_TOKEN": "secret",
        "TRITON_CACHE_DIR": "/data/triton",
    }
    lines = list(env.lines(environment))
    assert lines[-3:] == [
        "DSV4_BACKEND=reference",
        "DSV4_CACHE_DIR=~/cache:~/x:~/y:/srv/z",
        "TRITON_CACHE_DIR=/data/triton",
    ]
    assert "secret" not in "".join(lines)
    assert list(env.lines({}))[-1].startswith("environment variables: none")
