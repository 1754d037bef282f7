# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import stat
import subprocess
import sys

import pytest
import zmq

from kvferry.control.keys import KeyFileError, main, make_keys, read_keys, write_keys


def test_keys_are_read_as_written_and_only_by_their_owner(tmp_path: pathlib.Path) -> None:
    keys = make_keys()
    path = write_keys(tmp_path / "new" / "folder", keys)
    assert read_keys(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["kvferry.key"]


def test_a_key_file_is_replaced_only_by_force(tmp_path: pathlib.Path) -> None:
    first, second = make_keys(), make_keys()
    path = write_keys(tmp_path, first)
    with pytest.raises(KeyFileError, match=r"kvferry\.key exists.*--force"):
        write_keys(tmp_path, second)
    assert read_keys(path) == first
    write_keys(tmp_path, second, force=True)
    assert read_keys(path) == second
    assert os.listdir(tmp_path) == ["kvferry.key"]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660])
def test_a_file_that_others_can_read_or_change_is_refused(
    tmp_path: pathlib.Path, mode: int
) -> None:
    path = write_keys(tmp_path, make_keys())
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}: other users.*chmod 600 {path}"):
        read_keys(path)


def test_a_file_that_the_group_can_read_is_warned_of(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys()
    path = write_keys(tmp_path, keys)
    path.chmod(0o440)
    assert read_keys(path) == keys
    assert "has mode 0440: its group can read it" in caplog.text


_OTHER = zmq.curve_keypair()[1].decode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "public_key or secret_key is missing"),
        ('public_key = "a"', "public_key or secret_key is missing"),
        ("public_key = 1\nsecret_key = 2", "public_key or secret_key is missing"),
        ('public_key = "a"\nsecret_key = "b"', "do not belong together"),
        (f'public_key = "{_OTHER}"\nsecret_key = "{_OTHER}"', "do not belong together"),
        ('public_key = "é"\nsecret_key = "é"', "do not belong together"),
        ("-----BEGIN PRIVATE KEY-----", "was not made by `python -m kvferry.keys`"),
        ("\udcff", "was not made by `python -m kvferry.keys`"),
        ("#" * 5000, "more than 4096 bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: pathlib.Path, text: str, problem: str) -> None:
    path = write_keys(tmp_path, make_keys())
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(KeyFileError, match=problem) as caught:
        read_keys(path)
    assert str(path) in str(caught.value) and _OTHER not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KeyFileError, match="nowhere cannot be read: No such file"):
        read_keys(tmp_path / "nowhere")
    with pytest.raises(KeyFileError, match="directory"):
        read_keys(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="pipe is not a file"):
        read_keys(tmp_path / "pipe")


def test_the_tool_says_what_to_do_next(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvferry.key"
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    keys = read_keys(path)
    assert f"--curve_key_file={path}" in printed and keys.label in printed
    assert keys.secret_key.decode() not in printed
    assert main([str(tmp_path)]) == 1
    assert "error:" in capsys.readouterr().err
    assert main([str(tmp_path), "--force"]) == 0
    assert read_keys(path) != keys
    assert main([str(path)]) == 1  # A file where the folder should be.
    assert "error:" in capsys.readouterr().err


def test_the_module_runs(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "kvferry.keys", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert read_keys(tmp_path / "kvferry.key")
