"""What all stages share: atomic files, locks, exit codes, progress."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import ROOT

from support import common
from support.common import (
    FolderLock,
    Progress,
    UserError,
    atomic_write,
    explain_os_error,
    format_duration,
    read_json,
    write_json,
)


def run_code(code: str, **kwargs) -> subprocess.Popen:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    """A file truncated by a writer that failed half-way."""
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert read_json(path, "x") == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_order_of_write_flush_fsync_rename_and_folder_fsync(tmp_path: Path, monkeypatch) -> None:
    """A rename that reaches the disk before the content does: after a power cut the file is empty."""
    calls = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{fd}")) if Path("/proc/self/fd").exists() else None
        size = os.fstat(fd).st_size
        calls.append(("fsync", target.name if target else None, size))
        real_fsync(fd)

    def replace(source: Path, target: Path) -> None:
        calls.append(("replace", Path(target).name, None))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"12345")
    assert [c[0] for c in calls] == ["fsync", "replace", "fsync"]
    assert calls[0][2] == 5, "the content was not flushed before fsync"
    assert calls[1][1] == "a.bin"
    if calls[0][1] is not None:
        assert (calls[0][1], calls[2][1]) == ("a.bin.tmp", tmp_path.name)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": 1} x', b"[" * 100_000])
def test_damaged_json_names_the_file_and_the_command(tmp_path: Path, content: bytes) -> None:
    """A truncated artifact ending in a traceback, or read as something else."""
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(UserError, match=r"m\.json is damaged .*make it"):
        read_json(tmp_path / "m.json", "make it")
    with pytest.raises(UserError, match=r"gone\.json is missing; run: make it"):
        read_json(tmp_path / "gone.json", "make it")


def test_a_second_process_is_refused_and_a_killed_ones_lock_is_taken_over(tmp_path: Path) -> None:
    """Two writers mixing their output; or a stale lock file that keeps a crashed run from ever resuming."""
    holder = run_code(f"""
        import time; from pathlib import Path; from support.common import FolderLock
        with FolderLock(Path({str(tmp_path)!r}), "run a"):
            print("held", flush=True); time.sleep(60)
    """)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"run a is being written by process {holder.pid}"), FolderLock(tmp_path, "run a"):
        pass
    holder.kill()
    holder.wait()
    with FolderLock(tmp_path, "run a"):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text(encoding="utf-8")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_clean_up_and_give_their_exit_code(tmp_path: Path, signum: int, code: int) -> None:
    """SIGTERM skipping `finally`, which leaves a half-written temporary behind."""
    process = run_code(f"""
        import time; from pathlib import Path; from support.common import atomic_write, run_main
        def main(argv):
            with atomic_write(Path({str(tmp_path / "x.bin")!r})) as file:
                file.write(b"1"); print("writing", flush=True); time.sleep(60)
            return 0
        run_main(main)
    """)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signum)
    assert process.wait(20) == code
    assert "Traceback" not in process.stderr.read()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_one_line_and_code_2() -> None:
    """A traceback where the user only has to free some space."""
    process = run_code("""
        from support.common import run_main
        def main(argv):
            raise OSError(28, "No space left on device", "data/x.bin")
        run_main(main)
    """)
    assert process.wait(20) == 2
    assert process.stderr.read().startswith("error: no space left on the disk of data/x.bin")


def test_other_failures_keep_their_traceback() -> None:
    """Our own bugs hidden behind a friendly line that helps nobody."""
    process = run_code("""
        from support.common import run_main
        def main(argv):
            return {}["bug"]
        run_main(main)
    """)
    assert process.wait(20) == 1
    assert "KeyError" in process.stderr.read()
    assert explain_os_error(OSError(errno.EIO, "Input/output error")) is None


@pytest.mark.skipif(os.name == "nt", reason="makes links and limits of Unix")
def test_whatever_the_system_says_of_a_file_is_one_line(tmp_path: Path) -> None:
    """A traceback for links in a circle, a socket, a share that went away, or too few files that may be open."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError) as caught:
        (tmp_path / "a").read_bytes()
    assert explain_os_error(caught.value).startswith(f"{tmp_path / 'a'}: ")
    assert "ulimit -n" in explain_os_error(OSError(errno.EMFILE, "Too many open files", "x.bin"))
    assert "share/x.bin: " in explain_os_error(OSError(errno.ENOTCONN, "Transport endpoint is not connected", "share/x.bin"))


def test_json_holds_a_path_of_any_bytes(tmp_path: Path) -> None:
    """A traceback (UnicodeEncodeError) of a run under a folder whose name is not UTF-8, when its config.json is written."""
    value = {"data_dir": os.fsdecode(b"d\xff"), "corpus": "é"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json", "x") == value


def test_a_file_or_dangling_link_in_the_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    """A traceback (FileExistsError) where checkpoints/RUN is a file, or checkpoints a link to a disk that is not mounted."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        folder = tmp_path / name
        with pytest.raises(OSError) as caught, FolderLock(folder, "a run"):
            pass
        assert f"{folder} is in the way" in explain_os_error(caught.value)


def test_output_that_the_console_cannot_show_is_escaped() -> None:
    """A sample, or a prompt, with an emoji killing the run on a console that is not UTF-8."""
    process = run_code(
        """
        from support.common import run_main
        def main(argv):
            print("caf\\u00e9 \\U0001f600", len(input())); return 0
        run_main(main)
    """,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        stdin=subprocess.PIPE,
    )
    out, err = process.communicate("\u00e9\n", timeout=20)
    assert (process.returncode, out) == (0, "caf\\xe9 \\U0001f600 2\n"), err


def test_closed_streams_are_no_failure(tmp_path: Path) -> None:
    """A service that starts us without standard streams: None where one is flushed, or output inside the next file opened."""
    code = f"""
        import os, sys
        from support.common import run_main
        def main(argv):
            with open({str(tmp_path / "file")!r}, "w") as file:
                file.write("a")
                print("b"); print("c", file=sys.stderr); os.write(1, b"d")
                return 0 if sys.stdin.read() == "" else 3
        run_main(main)
    """
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    process = subprocess.run(["sh", "-c", command, sys.executable, textwrap.dedent(code)], cwd=ROOT, timeout=20)
    assert (process.returncode, (tmp_path / "file").read_text()) == (0, "a")


def test_progress_without_a_terminal_prints_heartbeats_with_rate_and_eta(monkeypatch, capsys) -> None:
    """A stage that is silent for hours when its output goes to a file."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Progress(100, "encode", "documents", initial=20) as progress:
        for _ in range(4):
            clock[0] += 10.0
            progress.update(10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "encode: 40 documents of 100 (40 %), 1.0 documents/s, ETA 1:00"


def test_free_space_is_checked_on_the_nearest_existing_folder(tmp_path: Path) -> None:
    """A check that fails on a folder that does not exist yet, or passes on the wrong disk."""
    common.require_free_space(tmp_path / "a" / "b", 1, "this")
    with pytest.raises(UserError, match="no space left on the disk of"):
        common.require_free_space(tmp_path / "a" / "b", 10**18, "this")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (75.4, "1:15"), (3675, "1:01:15"), (200_000, "2 d 7:33:20"), (-5, "0:00")]
)
def test_durations(seconds: float, text: str) -> None:
    """A wrong carry between minutes, hours and days."""
    assert format_duration(seconds) == text


@pytest.mark.skipif(os.name == "nt", reason="a shell's redirections")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_nowhere(tmp_path: Path, closed: str) -> None:
    """A traceback under `>&-`, and what is printed (by a worker process too) in the first file that is opened."""
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from support.common import Progress, run_main
def main(argv):
    with open("data.bin", "wb") as file, Progress(1, "work") as progress:
        print("printed"), print("printed", file=sys.stderr)
        os.write(1, b"by a library"), os.write(2, b"by a library")
        subprocess.run([sys.executable, "-c", "print(1); import sys; sys.stdin.read()"], check=True)
        sys.stdin.read(), progress.update(), file.write(b"data")
    return 0
run_main(main)
"""
    (tmp_path / "x.py").write_text(code, encoding="utf-8")
    command = f"{shlex.quote(sys.executable)} x.py {closed}"
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "data.bin").read_bytes() == b"data"


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe otherwise")
@pytest.mark.parametrize(("early", "code"), [(True, 141), (False, 0)])
def test_a_closed_pipe_is_success_only_for_work_that_is_done(tmp_path: Path, early: bool, code: int) -> None:
    """`prepare_data.py | head -1 && train.py`: exit code 0 for a stage that was cut short at its first line."""
    process = run_code(
        f"""
        import sys; from pathlib import Path; from support.common import run_main
        def main(argv):
            sys.stdin.readline()
            print("a line", flush={early})
            Path({str(tmp_path / "work")!r}).write_text("done"); return 0
        run_main(main)
    """,
        stdin=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.wait(20) == code
    assert process.stderr.read() == ""
    assert (tmp_path / "work").exists() == (not early)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_error_line_that_cannot_be_written_keeps_its_exit_code() -> None:
    """Code 1, as of a failed check or a bug, where the log that takes the error line lies on a full disk."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom support.common import UserError, run_main\n"
    code += "def main(argv): raise UserError('a mistake')\nrun_main(main)"
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, timeout=60).returncode == 2


@pytest.mark.parametrize("error", ["MemoryError()", 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory: 9 bytes")'])
def test_too_little_memory_is_one_line_and_code_2(error: str) -> None:
    """A traceback of torch's or NumPy's for what is too large for the machine."""
    process = run_code(f"""
        from support.common import run_main
        def main(argv):
            raise {error}
        run_main(main)
    """)
    assert process.wait(20) == 2
    assert process.stderr.read().startswith("error: out of memory; ask for less")
